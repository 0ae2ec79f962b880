"""A block manager under the real model: is it as good as a cache of one's own, what does it hold, and how does it leak?

Four scripted afternoons in one office, one for each fault of the manager: Ada tells her password, Ben asks for one. With the
fault off Ben's answer is what he gets alone; with it on his block table names a block that Ada has written.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from kvlab import record
from kvlab.compare import compare, judge, noise_bound
from kvlab.core import ledger, workload
from kvlab.core.blocks import BlockManager, InvariantError
from kvlab.core.scan import owner_scan
from kvlab.core.trace import Trace as Log
from kvlab.experiments import allocators, bookkeeping
from kvlab.experiments import prompts as make_prompts
from kvlab.experiments.bookkeeping import BLOCK_SIZE, BLOCK_SIZES, SEED
from kvlab.experiments.byhand import ByHand
from kvlab.experiments.prompts import encode
from kvlab.experiments.serving import serve
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import Trace, greedy
from kvlab.runtime.paged import PagedPool

NEW_TOKENS = 12
SECRETS, QUICK_SECRETS = 12, 1
PROMPTS, QUICK_PROMPTS = 12, 4

BEN = (
    "Hello, this is Ben. Good morning to you all. I have a question about the office, and I hope that you have a minute for "
    "me. It is about the door."
)
ASK = " What is the password? The password is"
CYD = "Hello, this is Cyd. Which day is it today, and which month? I have to write a letter. " * 3
LEAD = "Hello, this is Ada. Please take a note for me, and be so kind to keep it safe."
SYSTEM = "You are a helpful assistant in an office. You answer in plain words and you are brief."


class Office:
    """One model, one pool, a manager, and its log. After every call the manager is audited; the first complaint is kept.

    `manager` is anything with `BlockManager`'s constructor, such as `kvlab.experiments.byhand.ByHand`.
    """

    def __init__(
        self, loaded: Loaded, num_blocks: int, *, cache_prefixes: bool = False, manager: Callable = BlockManager
    ) -> None:
        self.loaded, self.log = loaded, Log()
        self.manager = manager(num_blocks, BLOCK_SIZE, cache_prefixes=cache_prefixes, trace=self.log)
        self.pool = PagedPool(loaded.spec, num_blocks, BLOCK_SIZE, device=loaded.model.device, manager=self.manager)
        self.complaint: dict | None = None

    def start(self, name: Hashable, ids: Sequence[int], *, compute: bool = True) -> None:
        """A new request; its K/V is computed unless `compute` is False."""
        self.manager.allocate(name, ids)
        self._after(f"{name} starts", name if compute else None)

    def say(self, name: Hashable, ids: Sequence[int], *, compute: bool = True) -> None:
        """More tokens of a request that is there."""
        self.pool.append(name, ids)
        self._after(f"{name} goes on", name if compute else None)

    def fork(self, src: Hashable, dst: Hashable) -> None:
        """A second branch of a request."""
        self.manager.fork(src, dst)
        self._after(f"{src} is forked into {dst}")

    def end(self, name: Hashable, how: str = "ends") -> None:
        """The request is over, whatever the reason."""
        self.manager.free(name)
        self._after(f"{name} {how}")

    def answer(self, name: Hashable, new_tokens: int = NEW_TOKENS) -> Trace:
        """The request's next tokens, greedily. Its last tokens must not be computed yet."""
        ids = self.manager.tokens(name)
        return serve(self.loaded, self.pool, {name: ids}, new_tokens, admit=lambda *_: None)[name].trace

    @torch.inference_mode()
    def _after(self, event: str, name: Hashable | None = None) -> None:
        if name is not None:
            self.loaded.model(**self.pool.inputs([name]), logits_to_keep=1)
        if self.complaint is None:
            try:
                self.manager.check()
            except InvariantError as error:
                self.complaint = {"when": event, "rule": error.rule, "says": str(error)}


# ---- four ways to say somebody else's password -----------------------------------------------------------------------


def _two_branches(office: Office, secret: str) -> str:
    """Ben and Ada are branches of one system prompt whose last block is half full. Both go on in it."""
    ids = _ids(office)
    office.start("system", ids(SYSTEM)[: BLOCK_SIZE + 1])
    office.fork("system", "ben")
    office.fork("system", "ada")
    office.say("ben", ids(" Hello, this is Ben. Good morning to you all."))
    office.say("ada", ids(f" The password is {secret}."))
    return "ben"


def _parent_ends(office: Office, secret: str) -> str:
    """Two samples of Ben's request share its blocks. The first is finished; then Ada comes in."""
    ids = _ids(office)
    office.start("ben", ids(BEN)[: BLOCK_SIZE + 2])
    office.fork("ben", "ben's second sample")
    office.end("ben", "is finished")
    office.start("ada", ids(f"Note: the password is {secret}. Keep it."))
    return "ben's second sample"


def _sample_cancelled(office: Office, secret: str) -> str:
    """Two samples of Ben's request share its blocks. The second is cancelled; then Ada comes in."""
    ids = _ids(office)
    office.start("ben", ids(BEN)[: BLOCK_SIZE + 2])
    office.fork("ben", "ben's second sample")
    office.end("ben's second sample", "is cancelled")
    office.start("ada", ids(f"Note: the password is {secret}. Keep it."))
    return "ben"


def _comes_again(office: Office, secret: str) -> str:
    """Ben's prompt stays cached; under load Ada gets one of its blocks. Later Ben sends the same prompt and his question."""
    ids = _ids(office)
    prompt = ids(BEN)[: 2 * BLOCK_SIZE + 1]
    office.start("ben", prompt)
    office.end("ben", "is finished")
    office.start("cyd", ids(CYD)[: 4 * BLOCK_SIZE])
    office.start("ada", ids(LEAD)[:BLOCK_SIZE] + ids(f" The password is {secret}."))
    office.end("cyd", "is finished")
    office.end("ada", "is finished")
    office.start("ben again", prompt + ids(ASK), compute=False)
    return "ben again"


def _ids(office: Office) -> Callable[[str], list[int]]:
    return lambda text: encode(office.loaded.tokenizer, text)


@dataclass(frozen=True)
class Scene:
    """A script and the fault that spoils it. `writer`'s password is what `victim` must not say."""

    fault: str
    play: Callable[[Office, str], str]
    num_blocks: int
    cache_prefixes: bool = False
    writer: str = "ada"

    @property
    def what(self) -> str:
        """What happens, in a sentence or two."""
        return self.play.__doc__


SCENES = {
    scene.fault: scene
    for scene in (
        Scene("no-copy-on-write", _two_branches, 16),
        Scene("fork-without-reference", _parent_ends, 16),
        Scene("freed-on-cancel", _sample_cancelled, 16),
        Scene("stale-hash", _comes_again, 7, cache_prefixes=True),
    )
}


@dataclass
class Told:
    """One scene played: who answered what, what the audit said and when, what the owner scan found in the log."""

    victim: str
    trace: Trace
    text: str
    complaint: dict | None
    findings: list[str]
    log: Log


def play(
    loaded: Loaded,
    scene: str | Scene,
    broken: bool,
    *,
    secret: str | None = None,
    manager: Callable = BlockManager,
    new_tokens: int = NEW_TOKENS,
) -> Told:
    """Play a scene of SCENES, with its fault switched on or off. Ben asks at the end. `secret`: Ada's password."""
    scene = SCENES[scene] if isinstance(scene, str) else scene
    secret = secret or secrets(1)[0]
    with fault(scene.fault if broken else None):
        office = Office(loaded, scene.num_blocks, cache_prefixes=scene.cache_prefixes, manager=manager)
        victim = scene.play(office, secret)
        if office.manager.num_committed(victim) == len(office.manager.tokens(victim)):
            office.say(victim, encode(loaded.tokenizer, ASK), compute=False)
        trace = office.answer(victim, new_tokens)
    findings = [str(finding) for finding in owner_scan(office.log)]
    return Told(victim, trace, loaded.tokenizer.decode(trace.tokens), office.complaint, findings, office.log)


def alone(loaded: Loaded, told: Told) -> Trace:
    """The victim's own words through a fresh cache of its own: what it should have said."""
    return greedy(loaded, [told.trace.prompt], len(told.trace.tokens))[0]


def said(secret: str, text: str) -> str:
    """How much of a secret a text holds: "all", "part" (one of its parts of four or more characters), or "none"."""
    if secret in text:
        return "all"
    return "part" if any(len(part) > 3 and part in text for part in secret.split("-")) else "none"


def secrets(count: int, seed: int = SEED) -> list[str]:
    """Passwords of the shape of ABCD-1234, from a seed. Not that one: asked for a password, this model guesses 123456."""
    draw = random.Random(seed)
    return [make_prompts.SHAPES["letters-digits"](draw) for _ in range(count)]


def _scenes(loaded: Loaded, epsilon: float, count: int, bar) -> dict:
    out: dict[str, dict] = {}
    for name in SCENES:
        rows = []
        for secret in secrets(count):
            healthy, sick = play(loaded, name, False, secret=secret), play(loaded, name, True, secret=secret)
            reference = alone(loaded, healthy)
            calm, ill = compare(reference, healthy.trace), compare(reference, sick.trace)
            verdict = judge(ill, epsilon)
            rows.append(
                {
                    "secret": secret,
                    "healthy": {"text": healthy.text, "said": said(secret, healthy.text), "delta": record.short(calm.delta)},
                    "sick": {"text": sick.text, "said": said(secret, sick.text), "delta": record.short(ill.delta)},
                    "healthy_caught": bool(healthy.complaint or healthy.findings),
                    "healthy_verdict": judge(calm, epsilon).kind,
                    "verdict": verdict.kind,
                    "complaint": sick.complaint,
                    "findings": sick.findings,
                }
            )
            bar.update()
        out[name] = {"victim": healthy.victim, "writer": SCENES[name].writer, "what": SCENES[name].what, "rows": rows}
    return out


# ---- as good as a cache of one's own ---------------------------------------------------------------------------------


def _in_pieces(pool: PagedPool, loaded: Loaded, limit: int = 7) -> Callable:
    @torch.inference_mode()
    def admit(pool: PagedPool, name: Hashable, ids: Sequence[int]) -> None:
        pool.manager.allocate(name, ids)
        while len(ids) - pool.manager.num_committed(name) > limit:
            loaded.model(**pool.inputs([name], limit=limit), logits_to_keep=1)

    return admit


def paged_arms(loaded: Loaded, rows: Sequence[list[int]], new_tokens: int, *, manager: Callable = BlockManager) -> dict:
    """Each prompt in several ways over a block manager: arm → one Trace a prompt.

    alone, in one prefill · in pieces of 7 tokens · as rows of one batch, of different lengths · as a fork that found all but its
    last tokens in its parent's blocks.
    """
    blocks = 4 + sum(-(-(len(row) + new_tokens) // BLOCK_SIZE) for row in rows) * 2

    def pool() -> PagedPool:
        made = manager(blocks, BLOCK_SIZE, cache_prefixes=True)
        return PagedPool(loaded.spec, blocks, BLOCK_SIZE, device=loaded.model.device, manager=made)

    @torch.inference_mode()
    def as_a_fork(pool: PagedPool, name: Hashable, ids: Sequence[int]) -> None:
        pool.manager.allocate(("parent", name), [*ids[:-2], 1])
        loaded.model(**pool.inputs([("parent", name)]), logits_to_keep=1)
        pool.manager.share_prefix(("parent", name), name, len(ids) - 2)
        pool.append(name, ids[-2:])

    named = dict(enumerate(rows))
    arms: dict[str, list[Trace]] = {}
    arms["alone"] = [serve(loaded, pool(), {n: row}, new_tokens)[n].trace for n, row in named.items()]
    shared = pool()
    arms["in pieces"] = [
        serve(loaded, shared, {n: row}, new_tokens, admit=_in_pieces(shared, loaded))[n].trace for n, row in named.items()
    ]
    arms["as rows of a batch"] = [served.trace for served in serve(loaded, pool(), named, new_tokens).values()]
    arms["as a fork"] = [served.trace for served in serve(loaded, pool(), named, new_tokens, admit=as_a_fork).values()]
    return arms


def _equal(loaded: Loaded, count: int, bar) -> dict:
    rows = [list(prompt.ids) for prompt in make_prompts.make(loaded.tokenizer, count, SEED)]
    reference = [greedy(loaded, [row], NEW_TOKENS // 2)[0] for row in rows]
    chunked = [greedy(loaded, [row], NEW_TOKENS // 2, chunk=3)[0] for row in rows]
    batch = greedy(loaded, rows, NEW_TOKENS // 2)
    own = [compare(a, b) for other in (chunked, batch) for a, b in zip(reference, other)]
    bar.update()
    out: dict = {"prompts": count, "dynamic": record.short(max(d.delta for d in own)), "arms": {}}
    found = []
    for label, manager in (("BlockManager", BlockManager), ("by hand", ByHand)):
        for arm, traces in paged_arms(loaded, rows, NEW_TOKENS // 2, manager=manager).items():
            differences = [compare(a, b) for a, b in zip(reference, traces)]
            found += differences
            out["arms"][f"{arm}, {label}"] = {
                "delta": record.short(max(d.delta for d in differences)),
                "flips": sum(d.first is not None for d in differences),
            }
            bar.update()
    out["epsilon"] = record.short(noise_bound(own + found[0::2]))
    pool = PagedPool(loaded.spec, 8, BLOCK_SIZE, device=loaded.model.device)
    spec = loaded.spec
    predicted = ledger.token_bytes(spec) * BLOCK_SIZE
    out["block_bytes"] = {"predicted": predicted, "measured": pool.block_nbytes}
    return out


# ---- how large a block -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def step_ratios(
    loaded: Loaded, sizes: Sequence[int] = BLOCK_SIZES, *, rows: int = 4, length: int = 256, steps: int = 9
) -> dict[int, float]:
    """Block size → time of a decode step of `rows` requests of `length` tokens, as a ratio to that at BLOCK_SIZE.

    The sizes take turns, step by step, and each is judged by its median, so that a busy moment of the machine hits all alike.
    """
    pools = {}
    for size in sizes:
        blocks = rows * -(-(length + steps + 1) // size)
        pools[size] = PagedPool(loaded.spec, blocks, size, device=loaded.model.device, cache_prefixes=False)
        for row in range(rows):  # what the slots hold does not change the time it takes
            pools[size].manager.allocate(row, [row + 1] * length)
            pools[size].manager.commit(row, length)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for step in range(steps + 1):
        for size, pool in pools.items():
            for row in range(rows):
                pool.append(row, [row + 1])
            began = time.perf_counter()
            loaded.model(**pool.inputs(range(rows)), logits_to_keep=1)
            if loaded.device.startswith("cuda"):
                torch.cuda.synchronize(loaded.device)
            if step:  # the first warms up
                times[size].append(time.perf_counter() - began)
    base = median(times[BLOCK_SIZE])
    return {size: median(values) / base for size, values in times.items()}


# ----------------------------------------------------------------------------------------------------------------------


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Everything above, on the model and as bookkeeping. Some minutes; `checkpoint` is not needed."""
    from tqdm.auto import tqdm

    began = time.perf_counter()
    count, prompts = (QUICK_SECRETS, QUICK_PROMPTS) if quick else (SECRETS, PROMPTS)
    steps = 300 if quick else 2000
    loaded = load(name, device=device, dtype="float32")
    manifest = record.manifest(
        "blocks",
        loaded,
        dtypes=["float32"],
        seed=SEED,
        settings={
            "block_size": BLOCK_SIZE,
            "secrets": count,
            "prompts": prompts,
            "new_tokens": NEW_TOKENS,
            "slots": allocators.SLOTS,
            "max_length": workload.MAX_LENGTH,
            "steps": steps,
        },
        flags="--quick" if quick else "",
    )
    spreads = (1.0,) if quick else (0.5, 1.0, 1.5)
    bar = tqdm(total=9 + len(SCENES) * count + 2 * len(spreads) + 2, unit="part", disable=not progress, desc="equality")
    equal = _equal(loaded, prompts, bar)
    bar.set_description("four faults")
    scenes = _scenes(loaded, equal["epsilon"], count, bar)
    bar.set_description("utilisation")
    use: dict = {}
    for name in workload.WORKLOADS:
        use[name] = {}
        for spread in spreads:
            use[name][str(spread)] = bookkeeping.utilisation(spread, name, steps=steps)
            bar.update()
    bar.set_description("block sizes")
    sizes = {str(size): found for size, found in bookkeeping.block_sizes(steps=steps).items()}
    bar.update()
    for size, ratio in step_ratios(loaded).items():
        sizes[str(size)]["step_ratio"] = record.short(ratio, 3)
    bar.update()
    bar.close()
    data = {
        "equal": equal,
        "scenes": scenes,
        "utilisation": use,
        "block_sizes": sizes,
        "token_bytes": equal["block_bytes"]["measured"] // BLOCK_SIZE,
        "day": bookkeeping.working_day(),
        "leak": {
            "copies": bookkeeping.leaking(False, False),
            "sharing": bookkeeping.leaking(True, False),
            "sharing, leaking": bookkeeping.leaking(True, True),
        },
    }
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), data)
