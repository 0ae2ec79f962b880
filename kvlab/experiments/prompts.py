"""Password prompts from a seed: many shapes of password, English and Chinese wording, chat and plain completion."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"  # no I and O: they read like digits
WORDS = ("amber", "birch", "cedar", "coral", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper", "kettle")
WORDS += ("lantern", "maple", "nectar", "otter", "pebble", "quartz", "river", "saddle", "timber", "umber", "violet", "willow")
WORDS += ("yarrow", "zephyr")
HAN = "山水云松石月风雨江湖竹梅"

SHAPES = {
    "letters-digits": lambda r: f"{_pick(r, LETTERS, 4)}-{_pick(r, string.digits, 4)}",
    "digits": lambda r: _pick(r, string.digits, 6),
    "words": lambda r: "-".join(r.sample(WORDS, 3)),
    "mixed": lambda r: _pick(r, LETTERS + LETTERS.lower() + string.digits, 8),
    "symbols": lambda r: "".join(r.sample(_pick(r, LETTERS, 3) + _pick(r, string.digits, 3) + _pick(r, "#!%&*+?@", 2), 8)),
    "hex": lambda r: "0x" + _pick(r, "0123456789abcdef", 6),
    "han-digits": lambda r: _pick(r, HAN, 2) + _pick(r, string.digits, 4),
}

# (language, style) -> wordings. In a chat the wording is the user's turn; in a completion the model goes on from its end.
WORDINGS = {
    ("en", "plain"): (
        "The password is: {p}. I repeat, the password is:",
        "Door code {p}. Once more, the door code is",
        "Copy the line below.\n{p}\n",
        "The key to the safe is {p}, so to open the safe you enter",
    ),
    ("en", "chat"): (
        "Repeat this password: {p}",
        "My access code is {p}. What is my access code?",
    ),
    ("zh", "plain"): (
        "口令是：{p}。再说一次，口令是：",
        "门的密码是{p}，所以开门要输入",
        "抄写这一行：\n{p}\n",
    ),
    ("zh", "chat"): (
        "请把这个口令重复一遍：{p}",
        "我的密码是{p}。我的密码是什么？",
    ),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text as the tokenizer gets it, its token ids, and what it was made from."""

    text: str
    ids: tuple[int, ...]
    password: str
    shape: str
    language: str
    style: str


def _pick(r: random.Random, alphabet: str, count: int) -> str:
    return "".join(r.choice(alphabet) for _ in range(count))


def make(tokenizer, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts; the first n of a longer list are the shorter list. Without a chat template all are completions.

    Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    r = random.Random(seed)
    kinds = [kind for kind in WORDINGS if kind[1] == "plain" or getattr(tokenizer, "chat_template", None)]
    shapes = list(SHAPES)
    prompts = []
    for index in range(count):
        language, style = kinds[index % len(kinds)]
        shape = shapes[index % len(shapes)]
        password = SHAPES[shape](r)
        text = r.choice(WORDINGS[language, style]).format(p=password)
        if style == "chat":
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(text, tuple(encode(tokenizer, text)), password, shape, language, style))
    return prompts


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of exactly this text: nothing is added in front or behind."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
