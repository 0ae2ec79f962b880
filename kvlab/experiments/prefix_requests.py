"""The requests of lab 6 and the two ways to serve one: from a block pool, or by hand as with a DynamicCache.

The arms in `prefix` and the studies in `prefix_studies` are both made from these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvlab.experiments.prompts import encode
from kvlab.experiments.serving import Served
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Step, Trace
from kvlab.runtime.paged import PagedPool

SEED = 6
BLOCK = 16


@dataclass(frozen=True)
class Sizes:
    """How large the experiment is, in tokens (`prefix`, `suffix`, `new`, `long`) and in requests."""

    prefix: int = 512
    suffix: int = 32
    new: int = 12
    pairs: int = 3
    requests: int = 16
    long: int = 2000
    many: int = 100


# --- texts -------------------------------------------------------------------------------------------------------------

TOPICS = (
    "a lost card",
    "a late return",
    "a damaged book",
    "the reading room",
    "a reserved seat",
    "the children's corner",
    "an interlibrary loan",
    "the map collection",
    "printing and copies",
    "the lockers",
    "a guest pass",
    "the film evenings",
    "old newspapers",
    "a wrong address",
    "quiet hours",
    "the language cafe",
)
ADVICE = (
    "answer in two sentences and name the desk that decides",
    "give the fee, the date and the floor, and nothing else",
    "ask for the card number first and never repeat it",
    "say plainly what the library cannot do",
    "offer the printed form and tell where it lies",
    "point to the notice by the door and give its number",
    "stay friendly, stay brief, and do not guess",
)
SECRETS = ("MOSS-7731", "LARK-9046", "KITE-5802")
TELL = "\nUser: My bank password is {secret}. Please remember it.\nAssistant: I will."
ASK = "\nUser: What is the password?\nAssistant: The password is"
FILLER = "\nThis is a new conversation with one reader of the library, on a quiet day in spring, about nothing in particular so far, as ever."


def handbook(lines: int = 400) -> str:
    """The system prompt of a library's assistant: made up, as long as needed, no two lines alike."""
    text = ["You are the assistant of a city library. Follow these rules."]
    for n in range(lines):
        topic, advice = TOPICS[n % len(TOPICS)], ADVICE[n % len(ADVICE)]
        text.append(f"Rule {n + 1}. When a reader on floor {n * 7 % 12 + 1} asks about {topic}, {advice}.")
    return "\n".join(text)


def prefix_ids(tokenizer, tokens: int) -> list[int]:
    """The handbook's first `tokens` token ids."""
    ids = encode(tokenizer, handbook(tokens // 8 + 8))
    if len(ids) < tokens:
        raise ValueError(f"tokens: the handbook has only {len(ids)}, {tokens} were asked for")
    return ids[:tokens]


def suffix_ids(tokenizer, text: str, tokens: int, lead: str = "") -> list[int]:
    """`lead`, filler and `text`: exactly `tokens` ids (more only if lead and text alone are longer)."""
    head, ids = encode(tokenizer, lead), encode(tokenizer, text)
    return head + encode(tokenizer, FILLER)[: max(tokens - len(head) - len(ids), 0)] + ids


def tell_ids(tokenizer, secret: str, tokens: int) -> list[int]:
    """What A adds to the prefix. Its first token is not that of what B adds."""
    return suffix_ids(tokenizer, TELL.format(secret=secret), tokens, lead=" Note.")


def ask_ids(tokenizer, tokens: int) -> list[int]:
    """What B adds to the prefix."""
    return suffix_ids(tokenizer, ASK, tokens)


# --- from a pool, and by hand ------------------------------------------------------------------------------------------


def make_pool(loaded: Loaded, requests: Mapping[str, Sequence[int]], new_tokens: int, **options) -> PagedPool:
    """A pool in which all of them fit, each for itself."""
    blocks = sum(-(-(len(ids) + new_tokens) // BLOCK) + 1 for ids in requests.values())
    return PagedPool(loaded.spec, blocks, BLOCK, device=loaded.model.device, **options)


@torch.inference_mode()
def prefill(loaded: Loaded, ids: Sequence[int]):
    """A DynamicCache that holds `ids`."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    loaded.model(input_ids=torch.tensor([list(ids)], device=loaded.model.device), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def go_on(loaded: Loaded, cache, prompt: Sequence[int], cached: int, new_tokens: int) -> Served:
    """Feed what of `prompt` is not cached, then decode. Positions follow from the cache's length: Transformers' default."""
    began = time.perf_counter()
    trace, logits, fed, first = Trace(list(prompt)), [], list(prompt[cached:]), None
    held = int(cache.get_seq_length()) - cached  # what it holds beyond what this request may use
    for step in range(new_tokens):
        ids = torch.tensor([fed], device=loaded.model.device)
        out = loaded.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits.append(out.logits[0, -1].float().cpu())
        length = int(cache.get_seq_length())
        trace.steps.append(Step(len(prompt) + step, length - 1, length, 0, held))
        trace.tokens.append(int(logits[-1].argmax()))
        fed, first = [trace.tokens[-1]], first or time.perf_counter() - began
    trace.logits = torch.stack(logits)
    return Served(trace, len(prompt) - cached, first, time.perf_counter() - began)
