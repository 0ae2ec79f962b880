"""Write down what an engine chose its tokens from, so that another process can judge it.

Copy this one file into any engine's process, of any year: it needs numpy and nothing else. There, call `save`:

    import probe
    probe.save("suspect.npz", prompt, tokens, logits, dtype="float32", layers=30, engine="transformers 4.40.2")

and here `kvlab judge REFERENCE.npz HEALTHY.npz… SUSPECT.npz` says noise, unclear or state fault. An engine that returns tokens only
is tapped at the layer that makes its logits (`Tap`).

The file, an .npz without pickles, format 1:

    format    "kvlab run 1"
    prompt    int64 [n]              token ids
    tokens    int64 [steps]          the tokens that were chosen, or given
    forced    bool                   True: the tokens were given to the engine, it did not choose them
    kind      str                    what the scores are: "logits", "logprobs" (natural logarithm), "top logits", "top logprobs",
                                     or "tokens": there are none
    scores    float32 [steps, vocab] what each token was chosen from; [steps, k] where only the k best are known
    ids       int64 [steps, k]       which tokens those are (the "top" kinds only)
    vocab     int                    size of the vocabulary, 0 where it is not known
    log       int64 [steps, 5]       optional, what the model was really given: own, position, visible, beyond, held
                                     (see `kvlab.compare.Step`)
    manifest  str                    JSON: what made the run. `dtype` and `layers` are used: they say how large rounding can be
"""

from __future__ import annotations

import json
import os
import platform
import sys

import numpy as np

FORMAT = "kvlab run 1"
KINDS = ("logits", "logprobs", "top logits", "top logprobs", "tokens")


class RunFile:
    """One run of one prompt: `prompt`, `tokens`, `scores`, `kind`, `ids`, `vocab`, `forced`, `steps` (the log), `manifest`.

    Raises ValueError, naming the argument, for anything that does not fit together.
    """

    def __init__(
        self, prompt, tokens, scores=None, *, kind=None, ids=None, vocab=0, forced=False, log=None, manifest=None, path=None
    ):
        where = "" if path is None else f"{path}: "
        self.path = path
        self.kind = kind or ("tokens" if scores is None else "logits")
        if self.kind not in KINDS:
            raise ValueError(f"{where}kind is {self.kind!r}; it is one of {', '.join(KINDS)}")
        self.prompt, self.tokens = _ids(where + "prompt", prompt), _ids(where + "tokens", tokens)
        if not self.prompt or not self.tokens:
            raise ValueError(f"{where}a run needs a prompt and at least one token")
        self.scores, self.ids, self.vocab = None, None, int(vocab)
        if self.kind != "tokens":
            if scores is None:
                raise ValueError(f"{where}scores are missing: kind {self.kind!r} needs them, [steps, …]")
            self.scores = _table(where + "scores", scores, np.float32)
            if len(self.scores) != len(self.tokens):
                raise ValueError(f"{where}scores have {len(self.scores)} rows for {len(self.tokens)} tokens: one each")
            if np.isnan(self.scores).all(axis=1).any():
                raise ValueError(
                    f"{where}scores have a row without a number: a fully masked row, or a step that was not recorded"
                )
        if self.kind.startswith("top"):
            if ids is None:
                raise ValueError(f"{where}ids are missing: the {self.kind} are of which tokens?")
            self.ids = _table(where + "ids", ids, np.int64)
            if self.ids.shape != self.scores.shape:
                raise ValueError(f"{where}ids are {self.ids.shape}, scores {self.scores.shape}: one id for each score")
            if any(len(set(row)) < len(row) for row in self.ids.tolist()):
                raise ValueError(f"{where}ids name a token twice in a row")
        elif self.scores is not None:
            if self.vocab not in (0, self.scores.shape[1]):
                raise ValueError(f"{where}vocab is {self.vocab}, scores have {self.scores.shape[1]} columns")
            self.vocab = self.scores.shape[1]
        self.forced = bool(forced)
        self.steps = [] if log is None else [tuple(map(int, row)) for row in _table(where + "log", log, np.int64)]
        if any(len(row) != 5 for row in self.steps) or len(self.steps) not in (0, len(self.tokens)):
            raise ValueError(f"{where}log must be [steps, 5]: own, position, visible, beyond, held of each token")
        self.manifest = dict(manifest or {})


def save(path, prompt, tokens, scores=None, *, kind=None, ids=None, vocab=0, forced=False, log=None, **manifest):
    """Write a run file; returns its path. The arguments are `RunFile`'s; what else is named goes into the manifest.

    `scores` may be anything numpy takes, a torch tensor on the CPU included (bf16: `.float()` first). The file is written whole or
    not at all. Raises ValueError as `RunFile` does.
    """
    run = RunFile(prompt, tokens, scores, kind=kind, ids=ids, vocab=vocab, forced=forced, log=log)
    arrays = {
        "format": FORMAT,
        "prompt": np.asarray(run.prompt, np.int64),
        "tokens": np.asarray(run.tokens, np.int64),
        "forced": run.forced,
        "kind": run.kind,
        "vocab": run.vocab,
        "manifest": json.dumps({**about(), **manifest}),
    }
    if run.scores is not None:
        arrays["scores"] = run.scores
    if run.ids is not None:
        arrays["ids"] = run.ids
    if run.steps:
        arrays["log"] = np.asarray(run.steps, np.int64)
    path = os.fspath(path)
    part = path + ".part"
    with open(part, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(part, path)
    return path


def load(path):
    """A run from its file. Raises ValueError, naming the file, for one that is damaged, of another kind, or of another format."""
    path = os.fspath(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except Exception as error:  # whatever a damaged archive may raise
        raise ValueError(f"{path}: not a readable .npz ({str(error) or type(error).__name__})") from None
    said = str(arrays.get("format", "none"))
    if said != FORMAT:
        raise ValueError(f"{path}: format is {said!r}, this reads {FORMAT!r}; write it with kvlab/probe.py")
    lacks = {"prompt", "tokens", "kind", "manifest"} - set(arrays)
    if lacks:
        raise ValueError(f"{path}: lacks {', '.join(sorted(lacks))}")
    return RunFile(
        arrays["prompt"],
        arrays["tokens"],
        arrays.get("scores"),
        kind=str(arrays["kind"]),
        ids=arrays.get("ids"),
        vocab=int(arrays.get("vocab", 0)),
        forced=bool(arrays.get("forced", False)),
        log=arrays.get("log"),
        manifest=json.loads(str(arrays["manifest"])),
        path=path,
    )


def about():
    """What is known of this process without asking anybody: Python, system, command, and the packages that are loaded."""
    loaded = {}
    for name in ("torch", "transformers", "numpy"):
        if name in sys.modules:
            loaded[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "command": " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]]),
        "packages": loaded,
    }


class Tap:
    """Collects what a layer of a torch model makes, for an engine that returns tokens only.

        with probe.Tap(model.lm_head) as tap:
            tokens = engine.generate(prompt)
        probe.save("run.npz", prompt, tokens, tap.logits(tokens))

    `calls` holds one array for each forward, `[rows, vocab]`: of every sequence the last position.
    """

    def __init__(self, layer):
        self.layer, self.calls = layer, []

    def __enter__(self):
        self._hook = self.layer.register_forward_hook(self._take)
        return self

    def __exit__(self, *error):
        self._hook.remove()

    def _take(self, layer, inputs, out):
        out = out[0] if isinstance(out, tuple) else out
        if out.dim() == 3 and out.shape[0] == 1:
            out = out[0]  # [1, seq, vocab]: a packed batch, or one row; which of its positions counts, `logits` finds
        elif out.dim() == 3:
            out = out[:, -1]
        self.calls.append(out.detach().float().cpu().numpy())

    def logits(self, tokens):
        """`[steps, vocab]`: of each call the row that `tokens` was chosen from, greedily: in a batch found by its token.

        Raises ValueError where a step has no row, or more than one with different numbers, that chose its token.
        """
        if len(self.calls) != len(tokens):
            raise ValueError(f"tap: {len(self.calls)} forwards for {len(tokens)} tokens; tap one request, one token a forward")
        found = []
        for step, (rows, token) in enumerate(zip(self.calls, tokens)):
            fits = [row for row in rows if int(row.argmax()) == int(token)]
            fits = fits or ([rows[-1]] if len(rows) == 1 else [])
            if int(rows[-1].argmax()) == int(token) and (step == 0 or len(rows) == 1):
                fits = [rows[-1]]  # a prefill: its last position
            if not fits or any(not np.array_equal(fits[0], row) for row in fits[1:]):
                raise ValueError(
                    f"tap: step {step}: {len(fits) or 'no'} rows chose token {int(token)}; which is the request's?"
                )
            found.append(fits[0])
        return np.stack(found)


def _ids(name, values):
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be token ids in a list, not {type(values).__name__}")
    out = list(values)
    for value in out:
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
            raise ValueError(f"{name} holds {value!r}; ids are whole numbers of 0 and more")
    return [int(value) for value in out]


def _table(name, values, dtype):
    try:
        table = np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} are no table of numbers: {error}") from None
    if table.ndim != 2 or not table.shape[1]:
        raise ValueError(f"{name} must be two-dimensional, one row a step; got {table.shape}")
    return table
