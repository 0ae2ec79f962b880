"""Sharing a prefix: what it saves, and what breaks when the boundary of what is shared is drawn wrongly.

Five groups of two requests, A and then B. In each, B runs isolated, shared rightly, and shared wrongly in the ways its group
invites. A carries a password; B asks for one. What else there is to measure about prefixes is in `prefix_studies`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvlab import record
from kvlab.compare import Verdict, judge, noise_bound
from kvlab.core.blocks import BlockManager, InvariantError
from kvlab.core.ledger import token_bytes
from kvlab.core.prefixes import Chain, PrefixIndex
from kvlab.experiments import prefix_studies as studies
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.password import difference_of, row_of
from kvlab.experiments.prefix_requests import (
    ASK,
    BLOCK,
    SECRETS,
    SEED,
    Sizes,
    ask_ids,
    go_on,
    handbook,  # noqa: F401  (lab 6 has it from here)
    make_pool,
    prefill,
    prefix_ids,
    suffix_ids,  # noqa: F401  (lab 6 has it from here)
    tell_ids,
)
from kvlab.experiments.prompts import encode
from kvlab.experiments.serving import Served, serve
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import greedy
from kvlab.runtime.paged import PagedPool

SPARE = 8  # tokens of the partial block that some arms share
QUICK = Sizes(prefix=128, new=6, pairs=1, requests=4, long=256)


@dataclass(frozen=True)
class Pair:
    """The ids both requests are made from. `long_prefix` is `prefix` and half a block more; `edited` has one other character."""

    prefix: list[int]
    long_prefix: list[int]
    edited: list[int]
    tell: list[int]
    ask: list[int]
    secret: str
    joined: list[int]
    pieces: list[int]


def make_pairs(tokenizer, sizes: Sizes) -> list[Pair]:
    """One pair for each secret, up to `sizes.pairs`."""
    ids = prefix_ids(tokenizer, sizes.prefix + SPARE)
    ask = ask_ids(tokenizer, sizes.suffix)
    made = []
    for n in range(sizes.pairs):
        secret = SECRETS[n % len(SECRETS)]
        tell = tell_ids(tokenizer, secret, sizes.suffix)
        prefix = ids[: sizes.prefix]
        begin = tokenizer.decode(prefix) + "\nUser: Say the sentence about the quick brown "
        end = "fox again." + ASK
        pieces, joined = encode(tokenizer, begin) + encode(tokenizer, end), encode(tokenizer, begin + end)
        made.append(
            Pair(
                prefix,
                ids,
                one_character(tokenizer, prefix, (n + 1) * sizes.prefix // (sizes.pairs + 2)),
                tell,
                ask,
                secret,
                joined,
                pieces,
            )
        )
    return made


def one_character(tokenizer, ids: Sequence[int], after: int) -> list[int]:
    """The same ids with one digit of the text changed, behind token `after` and inside a block."""
    for at in range(after, len(ids)):
        piece = tokenizer.decode([ids[at]])
        if piece.strip().isdigit() and 0 < at % BLOCK < BLOCK - 1:
            other = encode(tokenizer, piece.replace(piece.strip(), str((int(piece) + 3) % 10)))
            if len(other) == 1 and other[0] != ids[at]:
                return [*ids[:at], *other, *ids[at + 1 :]]
    raise ValueError("after: no digit behind it stands inside a block")


# --- sharing by hand, as with a DynamicCache ---------------------------------------------------------------------------


def hand_over(cache):
    """What the next request gets of a saved prefix: a copy, because it will append to it."""
    return copy.deepcopy(cache)


def before_last(cache):
    """Make room for the last token of a prompt that is cached whole: without computing it there is no query."""
    cache.crop(-1)
    return cache


def nbytes(cache) -> int:
    """Bytes of a DynamicCache's tensors."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def moved(loaded: Loaded, cache, start: int, stop: int):
    """Tokens `start..stop` of a cache as a cache of their own, their keys rotated back to positions 0…: RoPE only."""
    from transformers import DynamicCache

    out = DynamicCache(config=loaded.model.config)
    for n, layer in enumerate(cache.layers):
        keys, values = layer.keys[:, :, start:stop], layer.values[:, :, start:stop]
        cos, sin = loaded.model.base_model.rotary_emb(keys, torch.tensor([[-start]], device=keys.device))
        half = keys.shape[-1] // 2
        turned = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)
        out.update(keys * cos[:, None] + turned * sin[:, None], values.clone(), n)
    return out


# --- the arms ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one arm did with a pair: the two requests served, K/V bytes held at the end, and what `check()` said."""

    served: dict[str, Served]
    held: int
    check: str | None = None


@dataclass(frozen=True)
class Arm:
    """One way to serve a group's two requests. `kind`: "isolated", "right" or "wrong"; `fault`: of the zoo."""

    name: str
    group: int
    kind: str
    what: str
    run: Callable[[Loaded, Pair, int], Outcome]
    fault: str | None = None


GROUPS = {
    1: "the same prompt twice",
    2: "an overlap at another start",
    3: "the same prefix, another context",
    4: "one character differs",
    5: "the same text, other token ids",
}


def requests_of(group: int, pair: Pair) -> dict[str, list[int]]:
    """Token ids of the two requests of a group."""
    p = pair
    return {
        1: {"A": p.prefix + p.ask, "B": p.prefix + p.ask},
        2: {"A": p.tell + p.prefix, "B": p.prefix + p.ask},
        3: {"A": p.prefix + p.tell, "B": p.prefix + p.ask},
        4: {"A": p.prefix + p.tell, "B": p.edited + p.ask},
        5: {"A": p.pieces[: -len(p.ask)] + p.tell, "B": p.joined},
    }[group]


def _finish(pool: PagedPool, served: dict[str, Served]) -> Outcome:
    try:
        pool.manager.check()
    except InvariantError as error:
        return Outcome(served, pool.held_nbytes, error.rule)
    return Outcome(served, pool.held_nbytes)


def _pooled(group: int, *, sharing: bool) -> Callable[[Loaded, Pair, int], Outcome]:
    """Both requests from one pool, which finds prefixes or does not."""

    def run(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
        requests = requests_of(group, pair)
        pool = make_pool(loaded, requests, new_tokens, cache_prefixes=sharing)
        return _finish(pool, serve(loaded, pool, requests, new_tokens))

    return run


def _long_prefix(pair: Pair) -> dict[str, list[int]]:
    return {"A": pair.long_prefix + pair.tell, "B": pair.long_prefix + pair.ask}


def _from_system(loaded: Loaded, pair: Pair, new_tokens: int, *, sharing: bool = True) -> Outcome:
    """The prefix, which ends inside a block, is a sequence of its own; each request starts from its blocks."""
    requests = _long_prefix(pair)
    system = {"system": pair.long_prefix}
    pool = make_pool(loaded, requests | system, new_tokens, cache_prefixes=False)
    if not sharing:
        return _finish(pool, serve(loaded, pool, requests, new_tokens))

    def admit(pool, name, ids):
        pool.manager.share_prefix("system", name, len(pair.long_prefix))
        pool.append(name, ids[len(pair.long_prefix) :])

    serve(loaded, pool, system, 1)
    return _finish(pool, serve(loaded, pool, requests, new_tokens, admit=admit))


def _rounded(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    requests = _long_prefix(pair)
    pool = make_pool(loaded, requests, new_tokens)
    return _finish(pool, serve(loaded, pool, requests, new_tokens))


def _saved_cache(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    """The field report's own code: a saved `past_key_values`, handed to one request after the other."""
    saved = prefill(loaded, pair.prefix)
    caches, served = {}, {}
    for name, ids in requests_of(3, pair).items():
        began = time.perf_counter()
        caches[name] = hand_over(saved)
        copying = time.perf_counter() - began
        served[name] = go_on(loaded, caches[name], ids, len(pair.prefix), new_tokens)
        served[name].ttft, served[name].seconds = served[name].ttft + copying, served[name].seconds + copying
    return Outcome(served, sum({id(c): nbytes(c) for c in [saved, *caches.values()]}.values()))


def _cached_whole(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    """A prompt that is cached to its last token."""
    prompt = requests_of(1, pair)["B"]
    cache = before_last(prefill(loaded, prompt))
    served = go_on(loaded, cache, prompt, len(prompt) - 1, new_tokens)
    return Outcome({"B": served}, nbytes(cache))


def _moved(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    requests = requests_of(2, pair)
    cache = moved(loaded, prefill(loaded, requests["A"]), len(pair.tell), len(pair.tell) + len(pair.prefix))
    served = go_on(loaded, cache, requests["B"], len(pair.prefix), new_tokens)
    return Outcome({"B": served}, nbytes(cache))


def _pieces(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    """Prefix and suffix tokenised apart and put together: the text is the same."""
    requests = requests_of(5, pair) | {"B": pair.pieces}
    pool = make_pool(loaded, requests, new_tokens)
    return _finish(pool, serve(loaded, pool, requests, new_tokens))


def _unshared_long(loaded: Loaded, pair: Pair, new_tokens: int) -> Outcome:
    return _from_system(loaded, pair, new_tokens, sharing=False)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("1 isolated", 1, "isolated", "each computes its whole prompt", _pooled(1, sharing=False)),
        Arm("1 shared", 1, "right", "full blocks, at most all tokens but the last", _pooled(1, sharing=True)),
        Arm("1 cached whole, one cropped", 1, "right", "by hand: the last token is cropped and computed", _cached_whole),
        Arm(
            "1 last token fed twice",
            1,
            "wrong",
            "by hand: fed again over a full cache",
            _cached_whole,
            "last-token-fed-twice",
        ),
        Arm("2 isolated", 2, "isolated", "each computes its whole prompt", _pooled(2, sharing=False)),
        Arm("2 shared", 2, "right", "nothing is found: the first tokens differ", _pooled(2, sharing=True)),
        Arm(
            "2 found by its own tokens", 2, "wrong", "reused as if it began there", _pooled(2, sharing=True), "prefix-unchained"
        ),
        Arm("2 moved, keys turned back", 2, "wrong", "by hand: reused with its positions repaired", _moved),
        Arm("3 isolated", 3, "isolated", "each computes its whole prompt", _pooled(3, sharing=False)),
        Arm("3 shared", 3, "right", "the prefix is found, the rest computed", _pooled(3, sharing=True)),
        Arm("3 saved cache, copied", 3, "right", "by hand: each gets a copy of a saved cache", _saved_cache),
        Arm(
            "3 saved cache, the object itself",
            3,
            "wrong",
            "by hand: each gets the saved cache itself",
            _saved_cache,
            "prefix-cache-aliased",
        ),
        Arm(
            "3 suffix positions from 0",
            3,
            "wrong",
            "the suffix begins at position 0",
            _pooled(3, sharing=True),
            "suffix-positions-from-zero",
        ),
        Arm("3½ isolated", 3, "isolated", "the same with a prefix that ends inside a block", _unshared_long),
        Arm("3½ shared, copied on write", 3, "right", "the partial block is copied by who writes it", _from_system),
        Arm(
            "3½ shared block written",
            3,
            "wrong",
            "both write the partial block; A reads what B wrote",
            _from_system,
            "no-copy-on-write",
        ),
        Arm("3½ hit rounded up", 3, "wrong", "the block in which they part is shared too", _rounded, "hit-rounded-up"),
        Arm("4 isolated", 4, "isolated", "each computes its whole prompt", _pooled(4, sharing=False)),
        Arm("4 shared", 4, "right", "found up to the block with the difference", _pooled(4, sharing=True)),
        Arm(
            "4 blocks not verified",
            4,
            "wrong",
            "blocks compared by their first and last token",
            _pooled(4, sharing=True),
            "blocks-not-verified",
        ),
        Arm("5 isolated", 5, "isolated", "the text tokenised in one piece", _pooled(5, sharing=False)),
        Arm("5 shared", 5, "right", "tokenised in one piece, found up to where ids differ", _pooled(5, sharing=True)),
        Arm("5 tokenised apart", 5, "wrong", "prefix and suffix tokenised apart", _pieces),
    )
}


def reference_of(arm: Arm) -> str:
    """The name of the isolated arm that `arm` is held against."""
    return f"{arm.name.split()[0]} isolated"


def run_arm(loaded: Loaded, arm: Arm, pair: Pair, new_tokens: int) -> Outcome:
    """One arm on one pair, its fault switched on if it has one."""
    with fault(arm.fault):
        return arm.run(loaded, pair, new_tokens)


def possible(loaded: Loaded) -> list[Arm]:
    """The arms this model can run: keys can only be turned back where positions are rotations."""
    turns = loaded.spec.positions == "rope" and hasattr(loaded.model.base_model, "rotary_emb")
    return [arm for arm in ARMS.values() if turns or arm.run is not _moved]


def differences(reference: Outcome, other: Outcome) -> dict[str, list]:
    """For each request: [first, margin, deltas, kl, family its log names] against the isolated run, as it is recorded."""
    return {
        name: row_of(reference.served[name].trace, replace(served.trace, prompt=reference.served[name].trace.prompt))
        for name, served in other.served.items()
    }


def verdict_of(row: Sequence, epsilon: float) -> Verdict:
    """The verdict on one recorded row; the family is the log's, where the log shows one."""
    found = judge(difference_of(row), epsilon)
    return replace(found, family=row[4]) if found.kind == "state fault" and row[4] else found


def healthy_rows(loaded: Loaded, pair: Pair, reference: Outcome, new_tokens: int) -> list[list]:
    """B of group 3 computed in ways that must not matter, none of which shares: what ε is measured from."""
    prompt = requests_of(3, pair)["B"]
    runs = [
        greedy(loaded, [prompt], new_tokens)[0],
        greedy(loaded, [prompt], new_tokens, chunk=64)[0],
        greedy(loaded, [prompt], new_tokens, chunk=len(pair.prefix))[0],
        greedy(loaded, [prompt, pair.ask], new_tokens)[0],
    ]
    return [row_of(reference.served["B"].trace, trace) for trace in runs]


def epsilon_of(rows: Sequence[Sequence]) -> float:
    """ε from recorded healthy rows."""
    return noise_bound(difference_of(row) for row in rows)


def _pair_data(loaded: Loaded, pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> dict:
    """Every arm on one pair, one after another, so that times of one pair compare."""
    outcomes: dict[str, Outcome] = {}
    data: dict = {"secret": pair.secret, "arms": {}}
    for arm in possible(loaded):
        tick(arm.name)
        outcome = outcomes[arm.name] = run_arm(loaded, arm, pair, sizes.new)
        rows = differences(outcomes[reference_of(arm)], outcome)
        data["arms"][arm.name] = {
            "held": outcome.held,
            "check": outcome.check,
            "requests": {
                name: {
                    "length": len(served.trace.prompt),
                    "computed": served.computed,
                    "ttft": record.short(served.ttft, 3),
                    "seconds": record.short(served.seconds, 3),
                    "text": loaded.tokenizer.decode(served.trace.tokens),
                    "says_secret": pair.secret.split("-")[1] in loaded.tokenizer.decode(served.trace.tokens),
                    "row": rows[name],
                }
                for name, served in outcome.served.items()
            },
        }
    data["healthy"] = healthy_rows(loaded, pair, outcomes["3 isolated"], sizes.new)
    return data


# --- the reader's own functions, in the same pool ----------------------------------------------------------------------


class WrittenIndex(PrefixIndex):
    """A prefix index whose look-up is somebody else's: `block_keys(tokens, block_size, salt)` and
    `find_prefix(keys, index, num_tokens, block_size)` as lab 6 has them written."""

    def __init__(self, block_size: int, block_keys: Callable, find_prefix: Callable) -> None:
        super().__init__(block_size)
        self.block_keys, self.find_prefix = block_keys, find_prefix

    def match(self, chain: Chain, most: int | None = None) -> list[int]:
        index = {}
        for p in (p for p in self if p.blocks):
            tokens, root = list(p.tokens), p
            while root.parent is not None:
                root = root.parent
                tokens = list(root.tokens) + tokens
            key = self.block_keys(tokens, self.block_size, dict(p.domain).get("salt"))[-1]
            index[key] = p.block
        keys = self.block_keys(chain.tokens, self.block_size, dict(chain.domain).get("salt"))
        return self.find_prefix(keys, index, len(chain.tokens), self.block_size)


class WrittenManager(BlockManager):
    """A block manager that finds prefixes with the reader's functions."""

    def __init__(self, num_blocks: int, block_size: int, block_keys: Callable, find_prefix: Callable) -> None:
        self.written = block_keys, find_prefix
        super().__init__(num_blocks, block_size)

    def _clear(self) -> None:
        super()._clear()
        self._index = WrittenIndex(self.block_size, *self.written)


class WrittenPool(PagedPool):
    """A pool that feeds tokens at the positions `suffix_positions(num_tokens, num_cached)` gives."""

    def __init__(self, spec, num_blocks: int, *, block_keys, find_prefix, suffix_positions, device="cpu") -> None:
        manager = WrittenManager(num_blocks, BLOCK, block_keys, find_prefix)
        super().__init__(spec, num_blocks, BLOCK, manager=manager, device=device)
        self.suffix_positions = suffix_positions

    def inputs(self, seqs, *, limit=None) -> dict:
        """As in PagedPool; the position ids are the reader's."""
        fed = super().inputs(seqs, limit=limit)
        for row, seq in enumerate(seqs):
            cached = self.manager.num_committed(seq)
            positions = self.suffix_positions(len(self.manager.tokens(seq)), cached)[:limit]
            fed["position_ids"][row, fed["position_ids"].shape[1] - len(positions) :] = torch.tensor(positions)
        return fed


# --- the run -----------------------------------------------------------------------------------------------------------


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """All arms and all studies, in fp32. `checkpoint`, a file, keeps finished parts: a cut run goes on there."""
    from dataclasses import asdict

    from tqdm.auto import tqdm

    sizes = QUICK if quick else Sizes()
    loaded = load(name, device=device, dtype="float32")
    manifest = record.manifest(
        "prefix", loaded, dtypes=["float32"], seed=SEED, settings=asdict(sizes), flags="--quick" if quick else ""
    )
    kept = Checkpoint(checkpoint, manifest)
    parts = studies.parts(loaded, sizes)
    pairs = make_pairs(loaded.tokenizer, sizes)
    bar = tqdm(total=len(pairs) * len(possible(loaded)) + len(parts), unit="part", disable=not progress)

    def tick(what: str) -> None:
        bar.set_description(what)
        bar.update()

    run_arm(loaded, ARMS["1 isolated"], pairs[0], 2)  # warm: the first forward pays for what all use
    data = {
        "groups": {str(group): what for group, what in GROUPS.items()},
        "shape": {"bytes_per_token": token_bytes(loaded.spec), "block": BLOCK},
        "pairs": [
            kept.get(["pair", n], lambda pair=pair: _pair_data(loaded, pair, sizes, tick)) for n, pair in enumerate(pairs)
        ],
    }
    for part, compute in parts.items():
        tick(part)
        data[part] = kept.get([part], compute)
    bar.close()
    return record.Run(replace(manifest, seconds=kept.took()), data)
