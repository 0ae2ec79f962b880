"""The parrot: a toy model with learned positions, trained for one habit, to repeat a password that stands in its context.

    password:KITE-5802. fgh ijk password:   →   KITE-5802.

A GPT-2 of two layers over single characters. It knows no language and answers nothing else. The password is told at the very
beginning, so that the parrot knows by position where to look. The course needs it because a model with learned absolute
positions breaks where one with RoPE does not, and the bundled model has RoPE. `kvlab.runtime.load`
gives it by the name "parrot"; `python -m kvlab.runtime.parrot.train` trains it again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import KvlabError

NAME = "parrot"

FOLDER = Path(__file__).parent / "weights"
"""Config, tokenizer and weights, as Transformers loads them."""

MANIFEST = "parrot.json"
"""What trained it: seed, settings, versions, the loss curve, how it did on held-out passwords."""

PAD, CUE, END = "_", "password:", "."
SMALL, CAPITAL, DIGIT = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
ALPHABET = PAD + " " + SMALL + CAPITAL + DIGIT + ".:-"
"""Character of each token id."""

SHORTEST, LONGEST = 40, 128
"""Characters of a row it was trained on, least and most. It has no position beyond the last."""

PASSWORD = (4, 10)
"""Characters of a password it was trained on, least and most."""


def manifest() -> dict:
    """What trained the parrot: settings, versions, the loss curve `[[step, nats], …]`, the share of held-out answers exact."""
    return json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))


def verify() -> str:
    """The weights' SHA-256. Raises KvlabError if they are not those the manifest speaks of."""
    found = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    if found != manifest()["sha256"]:
        remedy = "Install kvlab again, or train it: `python -m kvlab.runtime.parrot.train`."
        raise KvlabError("the parrot's weights are not those its manifest speaks of.", remedy)
    return found


@dataclass(frozen=True)
class Row:
    """A text that begins by telling a password and repeats it: `answers` are the spans of the repetitions, their END included."""

    text: str
    password: str
    answers: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> str:
        """The text up to the last repetition."""
        return self.text[: self.answers[-1][0]]


def password(draw: random.Random) -> str:
    """A password: half of them shaped as KITE-5802, half of 4 to 10 capitals and digits in any order."""
    if draw.random() < 0.5:
        return "".join(draw.choices(CAPITAL, k=4)) + "-" + "".join(draw.choices(DIGIT, k=4))
    return "".join(draw.choices(CAPITAL + DIGIT, k=draw.randint(*PASSWORD)))


def filler(draw: random.Random, length: int) -> str:
    """Small letters and spaces that mean nothing."""
    return "".join(draw.choices(SMALL + 6 * " ", k=length))


def row(draw: random.Random, length: int, *, repeats: int | None = None) -> Row:
    """A row of exactly `length` characters: the password told, filler, the password repeated once or more.

    Args:
        draw: where chance comes from.
        length: characters, `SHORTEST` to `LONGEST`.
        repeats: how often the password is repeated; by default by chance, up to four times, as far as there is room.

    Raises:
        ValueError: the length is not one the parrot is trained for, or has no room for so many repeats.
    """
    if not SHORTEST <= length <= LONGEST:
        raise ValueError(f"length is {length}: give {SHORTEST} to {LONGEST} characters")
    secret = password(draw)
    said = CUE + secret + END
    room = length // len(said) - 1
    if repeats is not None and not 1 <= repeats <= room:
        raise ValueError(f"repeats is {repeats}: {length} characters have room for 1 to {room}")
    count = repeats or draw.randint(1, min(4, room))
    free = length - (count + 1) * len(said)
    cuts = [0, *sorted(draw.randint(0, free) for _ in range(count))]
    if draw.random() < 0.3:  # else nearly no answer would stand at the last positions
        cuts[-1] = free
    text, answers = "", []
    for index, (begin, end) in enumerate(zip([0, *cuts], cuts)):
        text += filler(draw, end - begin)
        if index:
            answers.append((len(text) + len(CUE), len(text) + len(said)))
        text += said
    return Row(text + filler(draw, length - len(text)), secret, tuple(answers))


def prompts(count: int, seed: int, *, lengths: tuple[int, int] = (SHORTEST, LONGEST)) -> Iterator[Row]:
    """Rows with one repetition, at their very end, of lengths drawn evenly: what the parrot is asked in a test or a lab."""
    draw = random.Random(f"parrot {seed}")
    for _ in range(count):
        length = draw.randint(*lengths)
        secret = password(draw)
        said = CUE + secret + END
        text = said + filler(draw, length - 2 * len(said)) + said
        yield Row(text, secret, ((length - len(secret) - len(END), length),))
