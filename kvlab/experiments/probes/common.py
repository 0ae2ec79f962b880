"""What the probes share: seeded ids, the folder of run files of one case, and what is written when a release refuses.

A probe is called `python NAME.py FOLDER CASE...`. Each case gets a folder of its own:

    reference.npz       the plainest run: the whole history again at every step, no cache
    healthy.*.npz       runs that vary what must not matter
    suspect.npz         the run on trial
    twin.*.npz          a reference with one hypothesis built in; the number behind the dot is what was varied
    note.json           {"outcome": "ran" | "refused" | "not there", "says": …, and what else there is to say}
"""

import json
import os
import signal
import sys
import traceback
import warnings

import probe
import torch

warnings.filterwarnings("ignore")
SECONDS = 150  # for one case


class NotThere(Exception):
    """This release has no such model or feature."""


class Late(BaseException):
    """A case that takes too long."""


def ids_of(n, seed, vocab=96):
    """`n` token ids, the same for a seed in every release."""
    return torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def fill(model, scale=0.15, skip=()):
    """Random weights that do not depend on how a release initialises its models."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2 and not any(part in name for part in skip):
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
    return model


def threads():
    """One thread or two: another order of the sums, nothing else."""
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)


@torch.no_grad()
def recompute(forward, prompt, steps, rows=1, forced=None):
    """Greedy (or along `forced`), the whole history again at every step, alone or as equal rows.

    `forward` gives the logits `[rows, n, vocab]` of ids `[rows, n]`, by whatever name the engine calls it, without a cache.
    """
    ids, tokens, out = list(prompt), [], []
    for step in range(steps):
        logits = forward(torch.tensor([ids] * rows))[0, -1].float()
        out.append(logits)
        tokens.append(int(logits.argmax()) if forced is None else forced[step])
        ids.append(tokens[-1])
    return tokens, torch.stack(out)


def plain_runs(forward, prompt, steps):
    """The reference, and the arms that every engine has: equal rows, another thread count."""
    runs = {"reference": recompute(forward, prompt, steps)}
    runs.update({f"healthy.rows{n}": recompute(forward, prompt, steps, rows=n) for n in (2, 7)})
    threads()
    runs["healthy.threads"] = recompute(forward, prompt, steps)
    threads()
    return runs


def main(play, engine, layers=2):
    """Play the cases named on the command line. `play(*case)` gives (prompt, {name: (tokens, logits)}, note)."""
    torch.set_num_threads(1)
    folder = sys.argv[1]

    def late(*_):
        raise Late(f"not done after {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    for case in sys.argv[2:]:
        where = os.path.join(folder, case.replace(" ", "-"))
        os.makedirs(where, exist_ok=True)
        note = {"outcome": "ran"}
        signal.alarm(SECONDS)
        try:
            prompt, runs, more = play(*case.split())
            forced = bool(more.pop("forced", False))
            for name, (tokens, logits) in runs.items():
                where_to = os.path.join(where, name + ".npz")
                probe.save(where_to, prompt, tokens, logits, forced=forced, dtype="float32", layers=layers, engine=engine)
            note.update(more)
        except NotThere as error:
            note = {"outcome": "not there", "says": str(error)}
        except (Exception, Late) as error:
            traceback.print_exc()
            note = {"outcome": "refused", "says": (type(error).__name__ + ": " + " ".join(str(error).split()))[:300]}
        signal.alarm(0)
        torch.set_num_threads(1)
        with open(os.path.join(where, "note.json"), "w") as file:
            json.dump(note, file)
