"""Every exercise of every lab: right passes, each classic mistake is refused in its own words, and what is no answer is said to be none.

What a lab asks of its own exercises besides (answers written another way, slips nobody planted) stands in that lab's tests.
"""

import importlib
import pkgutil

import pytest

import kvlab.checks
from kvlab.checks import Exercise, Unfinished, Wrong

LABS = [name for _, name, _ in pkgutil.iter_modules(kvlab.checks.__path__)]
EXERCISES = [
    pytest.param(exercise, id=f"{name}-{exercise.name}")
    for name in LABS
    for exercise in importlib.import_module(f"kvlab.checks.{name}").EXERCISES
]


def test_all_labs_are_here():
    assert len(LABS) >= 6 and len(EXERCISES) >= 4 * len(LABS)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_planted_mistake_is_refused_by_its_own_words_and_the_right_answer_is_not(exercise):
    assert len(exercise.mistakes) >= 3
    exercise.check(exercise.right)
    for mistake in exercise.mistakes:
        with pytest.raises(Wrong) as caught:
            exercise.check(mistake.code)
        assert "not yet" in str(caught.value) and mistake.says in str(caught.value)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_unfinished_broken_and_no_function(exercise):
    def unfinished(*arguments):
        raise NotImplementedError

    def broken(*arguments):
        return undefined_name  # noqa: F821

    with pytest.raises(Unfinished) as told:
        exercise.check(unfinished)
    assert str(told.value).startswith(f"Exercise {exercise.number} ({exercise.name}) is not finished yet")
    assert "in the cell above, run that cell, then run this one again" in str(told.value)
    with pytest.raises(Wrong, match="NameError"):
        exercise.check(broken)
    with pytest.raises(Wrong, match="should be a function"):
        exercise.check(3)


def test_of_long_values_the_part_that_differs_is_shown():
    long = Exercise(1, "long", lambda n: list(range(n)), cases=((400,),))
    with pytest.raises(Wrong, match=r"gave … .* 299, -1, 301, .* …, and should give … .* 299, 300, 301, .* …\.") as told:
        long.check(lambda n: [*range(300), -1, *range(301, n)])
    assert len(str(told.value)) < 500
    close = Exercise(1, "close", lambda: 0.123456, cases=((),))
    with pytest.raises(Wrong, match=r"gave 0.123457, and should give 0.123456\."):
        close.check(lambda: 0.123457)
