"""Lab 3's checks: right answers pass however they are written; wrong ones are refused and told why."""

import pytest
import torch

from kvlab.checks import Wrong
from kvlab.checks import password as checks

# --- right answers, two ways each, none of them the library's own -------------------------------------------------------


def first_by_loop(a, b):
    shorter = min(len(a), len(b))
    for i in range(shorter):
        if a[i] != b[i]:
            return i
    if len(a) != len(b):
        return shorter
    return None


def first_by_zip_longest(a, b):
    from itertools import zip_longest

    return next((i for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=object())) if x != y), None)


def margin_by_sort(logits):
    ordered = torch.sort(logits, dim=1, descending=True)[0]
    return ordered[:, 0] - ordered[:, 1]


def margin_row_by_row(logits):
    return [sorted(row.tolist())[-1] - sorted(row.tolist())[-2] for row in logits]


def delta_by_numpy(a, b, first):
    import numpy as np

    end = a.shape[0] if first is None else first + 1
    return np.abs(a.numpy()[:end] - b.numpy()[:end]).max()


def delta_by_loop(a, b, first):
    largest = 0.0
    for step in range(len(a)):
        largest = max(largest, torch.max(torch.abs(a[step] - b[step])).item())
        if step == first:
            break
    return largest


def verdict_by_ifs(delta, margin, epsilon):
    if delta is not None:
        if delta > epsilon:
            return "state fault"
    if margin is None:
        return "noise"
    return "state fault" if margin > epsilon + epsilon else "noise"


def verdict_by_any(delta, margin, epsilon):
    signs = [delta is not None and delta / 1 > epsilon, margin is not None and margin / 2 > epsilon]
    return ["noise", "state fault"][any(signs)]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.FIRST_DIFFERENCE, first_by_loop),
        (checks.FIRST_DIFFERENCE, first_by_zip_longest),
        (checks.MARGIN, margin_by_sort),
        (checks.MARGIN, margin_row_by_row),
        (checks.LARGEST_DELTA, delta_by_numpy),
        (checks.LARGEST_DELTA, delta_by_loop),
        (checks.VERDICT, verdict_by_ifs),
        (checks.VERDICT, verdict_by_any),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


# --- wrong answers, written as somebody might ---------------------------------------------------------------------------


def counts_from_one(a, b):
    for i in range(max(len(a), len(b))):
        if i >= len(a) or i >= len(b) or a[i] != b[i]:
            return i + 1


def minus_one_when_equal(a, b):
    i = first_by_loop(a, b)
    return -1 if i is None else i


def stops_at_the_shorter(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i


def counts_differences(a, b):
    return len([1 for x, y in zip(a, b) if x != y])


def gives_the_token(a, b):
    for x, y in zip(a, b):
        if x != y:
            return x


def probabilities(logits):
    p = torch.softmax(logits, -1).sort(-1, descending=True).values
    return p[:, 0] - p[:, 1]


def turned_round(logits):
    top = logits.topk(2).values
    return top[:, 1] - top[:, 0]


def first_two_columns(logits):
    return logits[:, 0] - logits[:, 1]


def along_the_steps(logits):
    top = logits.sort(dim=0).values
    return top[-1] - top[-2] if len(top) > 1 else top[0, 2]


def smallest_only(logits):
    top = logits.topk(2).values
    return (top[:, 0] - top[:, 1]).min()


def to_the_mean(logits):
    return logits.max(dim=-1)[0] - logits.mean(dim=-1)


def all_steps(a, b, first):
    return torch.abs(a - b).max().item()


def excludes_the_flip(a, b, first):
    if first is None:
        first = len(a)
    return (a[:first] - b[:first]).abs().max().item() if first else 0.0


def no_absolute_value(a, b, first):
    end = len(a) if first is None else first + 1
    return (a[:end] - b[:end]).max().item()


def mean_difference(a, b, first):
    end = len(a) if first is None else first + 1
    return (a[:end] - b[:end]).abs().mean().item()


def one_epsilon(delta, margin, epsilon):
    bad = (delta is not None and delta > epsilon) or (margin is not None and margin > epsilon)
    return "state fault" if bad else "noise"


def tokens_only(delta, margin, epsilon):
    return "state fault" if margin is not None and margin > 2 * epsilon else "noise"


def every_flip(delta, margin, epsilon):
    return "noise" if margin is None and (delta is None or delta <= epsilon) else "state fault"


def no_margin(delta, margin, epsilon):
    return "state fault" if delta is not None and delta > epsilon else "noise"


def forgets_none(delta, margin, epsilon):
    return "state fault" if delta > epsilon or (margin is not None and margin > 2 * epsilon) else "noise"


@pytest.mark.parametrize(
    ("exercise", "answer", "names"),
    [
        (checks.FIRST_DIFFERENCE, counts_from_one, "counts from 1"),
        (checks.FIRST_DIFFERENCE, minus_one_when_equal, "equal should give None"),
        (checks.FIRST_DIFFERENCE, stops_at_the_shorter, "end earlier"),
        (checks.FIRST_DIFFERENCE, counts_differences, "how many tokens differ"),
        (checks.FIRST_DIFFERENCE, gives_the_token, "not its position"),
        (checks.MARGIN, probabilities, "probabilities"),
        (checks.MARGIN, turned_round, "sign is turned"),
        (checks.MARGIN, first_two_columns, "first two columns"),
        (checks.MARGIN, smallest_only, "one number"),
        (checks.MARGIN, to_the_mean, "distance to the mean"),
        (checks.LARGEST_DELTA, all_steps, "past the first differing token"),
        (checks.LARGEST_DELTA, excludes_the_flip, "one step early"),
        (checks.LARGEST_DELTA, no_absolute_value, "absolute value"),
        (checks.LARGEST_DELTA, mean_difference, "takes the mean"),
        (checks.VERDICT, one_epsilon, "between ε and 2ε"),
        (checks.VERDICT, tokens_only, "waits for a token to flip"),
        (checks.VERDICT, every_flip, "every flip a fault"),
        (checks.VERDICT, no_margin, "looks at no margin"),
        (checks.VERDICT, forgets_none, "delta is None"),
    ],
)
def test_wrong_answers_are_named(exercise, answer, names):
    with pytest.raises(Wrong, match=names):
        exercise.check(answer)


def test_an_answer_that_changes_its_arguments_is_refused():
    def sorts_in_place(a, b):
        result = first_by_loop(a, b)
        a.append(0)
        return result

    with pytest.raises(Wrong, match="changed its arguments"):
        checks.FIRST_DIFFERENCE.check(sorts_in_place)


SLOPPY = {
    "FIRST_DIFFERENCE": [
        lambda a, b: first_by_loop(a[:4], b[:4]),
        lambda a, b: next(
            (i for i, (x, y) in enumerate(zip(a, b)) if x < y), None if len(a) == len(b) else min(len(a), len(b))
        ),
        lambda a, b: next((i for i, y in enumerate(b) if y not in a), None if len(a) == len(b) else min(len(a), len(b))),
        lambda a, b: next(
            (i for i, (x, y) in enumerate(zip(a, b)) if x is not y), None if len(a) == len(b) else min(len(a), len(b))
        ),
    ],
    "LARGEST_DELTA": [
        lambda a, b, first: (b - a)[: None if first is None else first + 1].max().item(),
        lambda a, b, first: -(a - b)[: None if first is None else first + 1].min().item(),
        lambda a, b, first: (a - b)[: None if first is None else first + 1, :4].abs().max().item(),
        lambda a, b, first: (a - b)[: None if first is None else first + 1, 2:4].abs().max().item(),
        lambda a, b, first: (a - b)[0 if first is None else first].abs().max().item(),
        lambda a, b, first: (a - b)[: 3 if first is None else first + 1].abs().max().item(),
    ],
    "VERDICT": [
        lambda d, m, e: "state fault" if (d is not None and d > e) or (m is not None and m >= 2 * e) else "noise",
        lambda d, m, e: "state fault" if (d is not None and d > e) or (d is None and m is not None and m > 2 * e) else "noise",
        lambda d, m, e: "state fault" if (d is not None and d > e) or (m is not None and m > 2) else "noise",
        lambda d, m, e: "state fault" if (d is not None and d > e) or (m is not None and m > 1.6 * e) else "noise",
        lambda d, m, e: "state fault" if (d is not None and d > 1.2 * e) or (m is not None and m > 2 * e) else "noise",
        lambda d, m, e: "state fault" if (d is not None and d > 0.7 * e) or (m is not None and m > 2 * e) else "noise",
    ],
}


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, answers in SLOPPY.items() for i in range(len(answers))])
def test_answers_that_are_right_on_easy_cases_only_are_refused(name, index):
    with pytest.raises(Wrong):
        getattr(checks, name).check(SLOPPY[name][index])


def test_along_the_steps_is_refused():
    with pytest.raises(Wrong):
        checks.MARGIN.check(along_the_steps)
