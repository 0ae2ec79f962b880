"""The bug zoo on the real model: one scene for each fault, played with the fault off and on, and what the detectors say.

A scene is one piece of code. It is played twice and held against a reference that does not run through what the fault breaks.
Detectors look at each: the logits (`compare.judge`), the run's own log (`compare.audit`), and what more a scene has: the
block manager's `check()`, the owner scan, a count of bytes, the ids read back. With the fault off all have to be silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kvlab import record
from kvlab.compare import audit, compare, judge, noise_bound
from kvlab.core import ledger as memory
from kvlab.core.spec import ModelSpec
from kvlab.experiments import attention, bookkeeping, clients, leak, lengths, prefix, served
from kvlab.experiments import blocks as office
from kvlab.experiments import ledger as measured
from kvlab.experiments.prompts import encode
from kvlab.faults import ZOO, fault
from kvlab.runtime import Loaded, load, parrot
from kvlab.runtime.decode import Trace, attention_kernel, greedy, static_cache

SEED = 4
NEW_TOKENS = 6
PASSWORD = 9  # tokens of the parrot: a character each

# What a reader may have seen: the page is filtered by these. The last two come from what was recorded.
SIGNS = {
    "leak": "it says what somebody else said",
    "company": "right alone, wrong in company",
    "again": "right the first time, wrong the next",
    "far": "right when short, wrong when long",
    "memory": "memory runs out, or stays empty",
    "first": "wrong from the first token",
    "later": "the first token right, later ones wrong",
    "silent": "no word changes, only logits",
}

SECRET = "KITE-5802"
ADA = f"My bank password is {SECRET}. Please remember it."
ASK = " What is the password? The password is"
CAPITALS = "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is"
COUNT = "One, two, three, four, five, six,"
GIFT = "She gave him a red"
HOME = "My name is Anna and I live in"
STORY = "Once upon a time there was a little girl who lived with her grandmother near the old forest, and every morning"
SYSTEM = "You are the assistant of a city library. You answer in one short sentence."
LONG_TALK = (
    "The meeting began at nine. Anna spoke about the new printer and the old carpet. Ben had a question about the keys to the "
    "garage. The next meeting is on Thursday. Then everybody had lunch, and it was soup. "
    "Remember: the capital of Japan is Tokyo, and the capital of Germany is Berlin."
)
AFAR = 4000  # tokens


# --- what scenes are played on ------------------------------------------------------------------------------------------


class Stage:
    """The bundled model; for what it does not have the parrot and tiny models with random weights; ε of each, measured once."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._epsilon: dict[tuple, float] = {}
        self._alone: dict[tuple, Trace] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of exactly this text."""
        return encode(self.loaded.tokenizer, text)

    @cached_property
    def windowed(self) -> Loaded:
        """A Mistral of two layers that sees eight tokens."""
        from transformers import MistralConfig, MistralForCausalLM

        shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = MistralConfig(**shape, **heads, vocab_size=512, sliding_window=8, initializer_range=0.2)
        return self._tiny(MistralForCausalLM, config, "tiny Mistral")

    @cached_property
    def scaled(self) -> Loaded:
        """A Llama of two layers, made for sixteen tokens, whose RoPE is scaled by a longer request's length."""
        return lengths.tiny("dynamic", self.loaded.device)

    @cached_property
    def learned(self) -> Loaded:
        """The parrot: its positions are learned, not rotated."""
        return load(parrot.NAME, device=self.loaded.device, dtype="float32")

    def asked(self, count: int, seed: int = SEED) -> list[list[int]]:
        """Prompts for the parrot, each with a password to repeat."""
        rows = parrot.prompts(count, seed, lengths=(45, 90))
        return [encode(self.learned.tokenizer, row.prompt) for row in rows]

    def _tiny(self, kind, config, name: str) -> Loaded:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = kind(config).requires_grad_(False).eval().to(self.loaded.model.device)
        spec = ModelSpec.from_config(config, "float32", name)
        # its "tokenizer" is only asked for the pad
        return Loaded(model, self.loaded.tokenizer, spec, name, f"random, seed {SEED}", self.loaded.device, "float32")

    def tiny_ids(self, length: int) -> list[int]:
        """Made-up ids for a tiny model."""
        draw = torch.Generator().manual_seed(length)
        return torch.randint(3, 512, (length,), generator=draw).tolist()

    def epsilon(self, loaded: Loaded, shifted: int = 0) -> float:
        """ε of a model: twice the largest |Δlogit| among healthy ways to run three prompts.

        `shifted`: for runs that begin at this position and are held against runs at 0. There honest noise is larger: an
        fp32 angle of 4000 radians is exact to 2.4e-4 only.
        """
        key = (loaded.name, shifted)
        if key not in self._epsilon:
            if loaded is self.loaded:
                rows = [self.ids(text) for text in (COUNT, LONG_TALK + ASK, ADA + ASK)]
            elif loaded.name == parrot.NAME:
                rows = self.asked(3)
            else:  # one whose angles depend on the length is healthy within the trained length only
                rows = [self.tiny_ids(length) for length in ((4, 7, 10) if loaded.spec.rope_by_length else (12, 24, 40))]
            runs = [greedy(loaded, [row], NEW_TOKENS)[0] for row in rows]
            if shifted:
                others = [clients.from_afar(loaded, row, shifted, NEW_TOKENS) for row in rows]
            else:
                others = [greedy(loaded, [row], NEW_TOKENS, use_cache=False)[0] for row in rows]
                others += [greedy(loaded, [row], NEW_TOKENS, chunk=3)[0] for row in rows]
                others += greedy(loaded, rows, NEW_TOKENS)
            self._epsilon[key] = noise_bound(compare(a, b) for a, b in zip(runs * 3, others))
        return self._epsilon[key]

    def alone(self, trace: Trace) -> Trace:
        """The prompt of `trace` alone through the bundled model: a fresh cache, one prefill. Computed once."""
        key = (*trace.prompt, -len(trace.tokens))
        if key not in self._alone:
            self._alone[key] = greedy(self.loaded, [trace.prompt], len(trace.tokens))[0]
        return self._alone[key]


@dataclass
class Played:
    """One run of a scene. `words`: what its own detectors complain about; `symptom`: where there is no text, what is seen."""

    trace: Trace | None = None
    words: list[str] = field(default_factory=list)
    symptom: str | None = None


@dataclass(frozen=True)
class Scene:
    """How one fault is provoked.

    fault       its name in the zoo
    what        what is run, in a sentence
    play        the code, the same with the fault off and on
    signs       keys of SIGNS that a user would tick
    reference   of a played trace: what it should have been, by another way
    model       attribute of the Stage that holds the model
    shifted     position at which the request begins; its reference begins at 0
    """

    fault: str
    what: str
    play: Callable[[Stage], Played]
    signs: tuple[str, ...] = ()
    reference: Callable[[Stage, Trace], Trace] | None = Stage.alone
    model: str = "loaded"
    shifted: int = 0


SCENES: dict[str, Scene] = {}


def scene(name: str, what: str, *signs: str, **options) -> Callable:
    """Decorator: enter a function as the scene of a fault. Raises ValueError for a fault that has one."""

    def enter(play):
        if name in SCENES:
            raise ValueError(f"fault {name!r} has a scene already")
        SCENES[name] = Scene(name, what, play, signs, **options)
        return play

    return enter


# --- faults of the decode loop -------------------------------------------------------------------------------------------


@scene("cache-not-reset", "User A tells a password; user B asks for one, through the same cache.", "leak", "again")
def _not_reset(stage: Stage) -> Played:
    return Played(leak.two_users(stage.loaded, new_tokens=NEW_TOKENS))


@scene("stale-buffer", "A long request goes through a static buffer, then a short one.", "again")
def _stale(stage: Stage) -> Played:
    long, short = stage.ids(LONG_TALK), stage.ids(CAPITALS)
    cache = static_cache(stage.loaded, len(long) + NEW_TOKENS)
    greedy(stage.loaded, [long], NEW_TOKENS, cache=cache)
    return Played(greedy(stage.loaded, [short], NEW_TOKENS, cache=cache)[0])


def _beside(stage: Stage, *, at: int = 0, **options) -> Played:
    """A short row in a batch with a longer one, padded on the left. `at`: the short row's place."""
    rows = [stage.ids(COUNT), stage.ids(LONG_TALK)]
    if at:
        rows.reverse()
    return Played(greedy(stage.loaded, rows, NEW_TOKENS, **options)[at])


@scene("pads-not-masked", "A short prompt in a batch with a longer one, padded on the left.", "company")
def _unmasked(stage: Stage) -> Played:
    return _beside(stage)


@scene("conventions-mixed", "A short prompt in a batch with a longer one: prefill, then cached steps.", "company")
def _mixed(stage: Stage) -> Played:
    return _beside(stage)


@scene("one-offset-for-all", "A long prompt and a short one in a batch: cached steps of the second row.", "company")
def _one_offset(stage: Stage) -> Played:
    return _beside(stage, at=1)


@scene("masked-row-is-nan", "A short prompt and a longer one in a static buffer, attention written out.", "company")
def _nan(stage: Stage) -> Played:
    with attention_kernel(stage.loaded, "eager"):
        return _beside(stage, cache=static_cache(stage.loaded, len(stage.ids(LONG_TALK)) + NEW_TOKENS))


@scene("positions-restarted", "A prompt is prefilled, then decoded with a cache.")
def _restarted(stage: Stage) -> Played:
    return Played(greedy(stage.loaded, [stage.ids(COUNT)], NEW_TOKENS)[0])


@scene("position-one-too-far", "A prompt is prefilled, then decoded with a cache.")
def _one_too_far(stage: Stage) -> Played:
    return Played(greedy(stage.loaded, [stage.ids(HOME)], NEW_TOKENS)[0])


@scene("prefill-from-one", "A prompt is prefilled with positions counted from the mask, then decoded with a cache.")
def _from_one(stage: Stage) -> Played:
    return Played(greedy(stage.loaded, [stage.ids(HOME)], NEW_TOKENS)[0])


@scene("steps-count-pads", "A short prompt in a batch with a longer one: cached steps.", "company")
def _pads_counted(stage: Stage) -> Played:
    return _beside(stage)


@scene("step-position-in-bf16", "A context of some five hundred tokens is prefilled, then decoded with a cache.", "far")
def _counted_low(stage: Stage) -> Played:
    return Played(greedy(stage.loaded, [stage.ids(6 * LONG_TALK + " The capital of Japan is")], NEW_TOKENS)[0])


@scene("mask-one-short", "A prompt is prefilled, then decoded with a cache, the mask made by hand.")
def _one_short(stage: Stage) -> Played:
    return Played(greedy(stage.loaded, [stage.ids(GIFT)], NEW_TOKENS)[0])


# --- faults of caches, masks and positions in Transformers ---------------------------------------------------------------


def _two(stage: Stage) -> tuple[list[int], list[int], list[int]]:
    return stage.ids(SYSTEM), stage.ids(" " + ADA), stage.ids(ASK)


@scene("prefix-copied-shallow", "A saved system prompt serves Ada, who tells a password, then Ben, who asks.", "leak", "again")
def _shallow(stage: Stage) -> Played:
    return Played(clients.two_on_a_prefix(stage.loaded, *_two(stage), NEW_TOKENS))


@scene("fork-shares-the-buffer", "A sentence is forked: one branch says cat, the other dog; the first goes on.", "leak")
def _branches(stage: Stage) -> Played:
    trunk, more = stage.ids("Tom has one animal. It is a"), stage.ids(". Tom loves his")
    return Played(
        clients.two_branches(stage.loaded, trunk, stage.ids(" cat"), stage.ids(" dog"), more, NEW_TOKENS),
    )


@scene("look-writes", "A continuation is tried with use_cache=False; then the request goes on without it.", "leak")
def _look(stage: Stage) -> Played:
    prompt = stage.ids("My bank password is")
    tried = stage.ids(f" is {SECRET}. Please remember it. My bank password")
    return Played(clients.look_ahead(stage.loaded, prompt, tried, NEW_TOKENS))


@scene("length-is-live", "One static buffer is rolled back to its prefix after Ada; Ben asks.", "leak", "again")
def _live(stage: Stage) -> Played:
    return Played(clients.roll_back(stage.loaded, *_two(stage), NEW_TOKENS))


@scene("static-cache-not-reset", "Ada's message goes through a StaticCache; it is reset; Ben asks.", "leak", "again")
def _static(stage: Stage) -> Played:
    return Played(clients.one_buffer(stage.loaded, stage.ids(ADA), stage.ids(ASK), NEW_TOKENS))


def _new_weights(stage: Stage, trace: Trace) -> Trace:
    with clients.adapter(stage.loaded):
        return greedy(stage.loaded, [trace.prompt], len(trace.tokens))[0]


@scene(
    "old-weights-cache",
    "A prefix is cached, an adapter is merged into the weights, a request comes on that prefix.",
    "again",
    reference=_new_weights,
)
def _old_weights(stage: Stage) -> Played:
    return Played(clients.updated(stage.loaded, stage.ids(LONG_TALK), stage.ids(" The next meeting is on"), NEW_TOKENS))


@scene(
    "beams-not-reordered",
    "Beam search with four beams; its text is scored once more in one forward.",
    reference=lambda stage, trace: clients.forced(stage.loaded, trace),
)
def _beams(stage: Stage) -> Played:
    trace = clients.beams(stage.loaded, stage.ids(STORY), 12)
    again = clients.forced(stage.loaded, trace)
    said, true = (_log_probability(t) for t in (trace, again))
    return Played(trace, symptom=f"mean log-probability of the text: {said:.2f} by the search, {true:.2f} rescored")


def _log_probability(trace: Trace) -> float:
    """Mean log-probability of a trace's tokens under its own logits."""
    return float(trace.logits.log_softmax(-1)[torch.arange(len(trace.tokens)), trace.tokens].mean())


def _uncached(model: str) -> Callable[[Stage, Trace], Trace]:
    def reference(stage: Stage, trace: Trace) -> Trace:
        return greedy(getattr(stage, model), [trace.prompt], len(trace.tokens), use_cache=False)[0]

    return reference


def _windowed(stage: Stage) -> Played:
    ids = stage.tiny_ids(20)
    from transformers import DynamicCache

    cache = DynamicCache(config=stage.windowed.model.config)
    return Played(clients.go_on(stage.windowed, cache, ids, 0, NEW_TOKENS))


for _name, _what in (
    ("window-one-too-wide", "A prompt of 20 tokens through a model that sees 8, with a cache that keeps 7."),
    ("window-caps-the-length", "A prompt of 20 tokens through a model that sees 8; cached steps follow."),
):
    scene(_name, _what, "far", reference=_uncached("windowed"), model="windowed")(_windowed)


@scene("right-padding-misread", "A short prompt and a longer one, padded on the right.", "company")
def _right(stage: Stage) -> Played:
    rows = [stage.ids(CAPITALS), stage.ids(LONG_TALK)]
    return Played(clients.padded(stage.loaded, rows, 3, side="right")[0])


@scene(
    "no-position-ids",
    "A short row and a longer one, padded on the left, in a model with learned positions; and in one with RoPE.",
    "company",
    reference=_uncached("learned"),
    model="learned",
)
def _no_positions(stage: Stage) -> Played:
    short, long = sorted(stage.asked(2, seed=5), key=len)
    trace = clients.padded(stage.learned, [short, long], PASSWORD, side="left")[0]
    rows = [stage.ids(COUNT), stage.ids(CAPITALS)]
    rope = clients.padded(stage.loaded, rows, 2, side="left")[0]
    delta = compare(stage.alone(rope), rope).delta
    within = "within ε" if delta <= stage.epsilon(stage.loaded) else "beyond ε"
    return Played(trace, symptom=f"on the RoPE model the same code moves logits {within}")


@scene(
    "prefix-of-another-length",
    f"A prompt of {lengths.LONG} tokens through a model made for {lengths.TRAINED}; then one of {lengths.SHORT} with the same beginning.",
    "again",
    reference=_uncached("scaled"),
    model="scaled",
)
def _other_length(stage: Stage) -> Played:
    return Played(lengths.on_its_blocks("dynamic", stage.loaded.device)[0])


@scene(
    "angles-not-set-back",
    f"A prompt of {lengths.LONG} tokens through a model made for {lengths.TRAINED}; then one of {lengths.SHORT}, on a new cache.",
    "again",
    reference=_uncached("scaled"),
    model="scaled",
)
def _not_set_back(stage: Stage) -> Played:
    loaded, asked = lengths.tiny("dynamic", stage.loaded.device), lengths.prompts()  # its own: the fault stays in the model
    greedy(loaded, [asked[lengths.LONG]], 1)
    return Played(greedy(loaded, [asked[lengths.SHORT]], NEW_TOKENS)[0])


@scene("angles-in-bf16", f"A prompt whose first token stands at position {AFAR}; alone it stands at 0.", "far", shifted=AFAR)
def _afar(stage: Stage) -> Played:
    return Played(clients.from_afar(stage.loaded, stage.ids(CAPITALS), AFAR, NEW_TOKENS))


SHIFTED = 32  # tokens that are dropped


def _beginning_masked(stage: Stage, trace: Trace) -> Trace:
    """The context in full, its first tokens masked: nothing is renumbered."""
    ids = stage.ids(LONG_TALK)
    cache = clients.prefill(stage.loaded, ids)
    fed = trace.prompt[len(ids) - SHIFTED :]
    cached = len(ids) - SHIFTED
    return clients.go_on(stage.loaded, cache, trace.prompt, cached, len(trace.tokens), fed=fed, hidden=SHIFTED)


@scene(
    "shift-without-rotation",
    f"A context drops its first {SHIFTED} tokens and goes on.",
    "far",
    reference=_beginning_masked,
)
def _shift(stage: Stage) -> Played:
    question = stage.ids(" The capital of Japan is")
    return Played(clients.shift_context(stage.loaded, stage.ids(LONG_TALK), SHIFTED, question, NEW_TOKENS))


@scene("tokenised-apart", "A cached prefix that ends in a blank, and a suffix that begins with a word.")
def _apart(stage: Stage) -> Played:
    pieces = ("The code word is ", "kangaroo. Please repeat the code word: ")
    fed = clients.token_ids(stage.loaded.tokenizer, pieces)
    words = []
    if encode(stage.loaded.tokenizer, stage.loaded.tokenizer.decode(fed)) != fed:
        words.append("ids: decoded and encoded again they are others")
    return Played(clients.assembled(stage.loaded, pieces, NEW_TOKENS), words)


# --- faults of prefix sharing, of the block manager, of the ledger -------------------------------------------------------


def _from_prefix(name: str) -> Callable[[Stage], Played]:
    """The arm of lab 6 that has this fault."""
    arm = next(arm for arm in prefix.ARMS.values() if arm.fault == name)

    def play(stage: Stage) -> Played:
        pair = prefix.make_pairs(stage.loaded.tokenizer, prefix.QUICK)[0]
        outcome = arm.run(stage.loaded, pair, NEW_TOKENS)
        return Played(outcome.served["B"].trace, [f"check(): {outcome.check}"] if outcome.check else [])

    return play


for _name, _what, *_signs in (
    ("prefix-unchained", "A asks about a text behind another beginning; B asks about the text alone.", "again"),
    ("blocks-not-verified", "A and B send prompts that differ in one character.", "again"),
    ("hit-rounded-up", "A and B have a prefix in common that ends inside a block.", "again"),
    ("suffix-positions-from-zero", "A and B have a prefix in common; B finds it.", "again"),
    ("prefix-cache-aliased", "A saved cache is handed to A, who tells a password, then to B, who asks.", "leak", "again"),
    ("last-token-fed-twice", "A prompt that is cached to its last token.", "again"),
):
    scene(_name, _what, *_signs)(_from_prefix(_name))


def _in_the_office(name: str) -> Callable[[Stage], Played]:
    """The afternoon of lab 5 that this fault spoils."""

    def play(stage: Stage) -> Played:
        told = office.play(stage.loaded, name, False, secret=SECRET, new_tokens=NEW_TOKENS)
        words = [f"check(): {told.complaint['rule']}"] if told.complaint else []
        return Played(told.trace, words + [f"owner scan: {finding}" for finding in told.findings[:1]])

    return play


for _name in office.SCENES:
    scene(_name, office.SCENES[_name].what, "leak", "company")(_in_the_office(_name))


@scene("leaked-reference", "120 requests of two samples each, the second a fork of the first.", "memory", reference=None)
def _leaking(stage: Stage) -> Played:
    told = bookkeeping.leaking(True, False)
    words = [f"check(): {told['complaint']['says']}"] if told["complaint"] else []
    return Played(words=words, symptom=f"{told['served']} of 120 requests are admitted; {told['held'][-1]} of 256 blocks held")


@scene("query-heads-counted", "The bytes of 100 tokens by the ledger, and in a cache that holds 100.", "memory", reference=None)
def _ledger(stage: Stage) -> Played:
    cache = measured.dynamic(stage.loaded, 1, 100)
    planned, held = 100 * memory.token_bytes(stage.loaded.spec), measured.cache_bytes(cache)
    words = [f"count of bytes: {planned} planned, {held} held"] if planned != held else []
    return Played(words=words, symptom=f"{planned} bytes planned, {held} held")


@scene(
    "queries-cached", "A text is read with attention by hand; the bytes its cache holds are counted.", "memory", reference=None
)
def _queries(stage: Stage) -> Played:
    told = attention.held(stage.loaded, stage.ids(LONG_TALK))
    words = [f"count of bytes: {told['planned']} planned, {told['held']} held"] if told["planned"] != told["held"] else []
    return Played(words=words, symptom=f"{told['planned']} bytes planned, {told['held']} held")


@scene(
    "output-cached",
    "User A tells a password; user B asks for one; the cache is reset between them; attention by hand.",
    "again",
)
def _outputs(stage: Stage) -> Played:
    return Played(attention.told(stage.loaded, new_tokens=NEW_TOKENS)[1])


# --- faults of the serving engine ----------------------------------------------------------------------------------------


def _at_the_engine(name: str) -> Callable[[Stage], Played]:
    def play(stage: Stage) -> Played:
        told = served.SCENES[name](stage.loaded, SECRET, NEW_TOKENS)
        return Played(told.trace, told.words)

    return play


for _name, *_signs in (
    ("preempted-keeps-its-place", "leak", "company"),
    ("cancelled-freed-too-early", "leak", "company"),
    ("chunk-off-by-one", "far"),
    ("hit-before-written", "leak", "again"),
    ("row-not-reset", "leak", "again"),
):
    scene(_name, served.SCENES[_name].__doc__, *_signs)(_at_the_engine(_name))


@scene("sampler-shared", "One request with temperature 1 and a seed, alone and beside two others.", "company", reference=None)
def _sampled(stage: Stage) -> Played:
    symptom, words = served.sampled(stage.loaded, NEW_TOKENS, stage.epsilon(stage.loaded))
    return Played(words=words, symptom=symptom)


# --- playing -------------------------------------------------------------------------------------------------------------


def look(stage: Stage, one: Scene, played: Played) -> dict:
    """What the detectors say of one played scene, as plain values. Call it with the fault off: the reference is run here."""
    found = {"words": list(played.words), "symptom": played.symptom, "caught": bool(played.words)}
    if played.trace is None:
        return found
    loaded = getattr(stage, one.model)
    epsilon, trace = stage.epsilon(loaded, one.shifted), played.trace
    reference = one.reference(stage, trace)
    difference = compare(reference, trace)
    verdict = judge(difference, epsilon, steps=trace.steps)
    accused = verdict.kind == "state fault"
    log = audit(trace.steps)
    real = not loaded.name.startswith("tiny")  # whose weights are random
    found |= {
        "said": loaded.tokenizer.decode(trace.tokens) if real else " ".join(map(str, trace.tokens)),
        "meant": loaded.tokenizer.decode(reference.tokens) if real else " ".join(map(str, reference.tokens)),
        "prompt": loaded.tokenizer.decode(trace.prompt[-24:]) if real else f"{len(trace.prompt)} tokens",
        "delta": None if difference.delta == float("inf") else record.short(difference.delta),
        "first": difference.first,
        "margin": None if difference.margin is None else record.short(difference.margin),
        "epsilon": record.short(epsilon),
        "onset": difference.onset(epsilon),
        "kind": verdict.kind,
        "log": log,
        "named": list(verdict.possible),
        "sentence": verdict.sentence,
        "caught": accused or log is not None or bool(played.words),
    }
    return found


def examine(stage: Stage, name: str) -> dict:
    """One fault's scene with the fault off and on, and whether all is as it should be.

    Returns `what`, `model`, `signs`, `healthy` and `sick` (see `look`), `seen` (the sick run differs in what a user sees),
    `caught`, `accused` (a detector spoke up with the fault off). Raises KeyError for a fault that has no scene.
    """
    if name not in SCENES:
        raise KeyError(f"no scene for the fault {name!r}; there is one for: {', '.join(sorted(SCENES))}")
    one = SCENES[name]
    healthy = one.play(stage)
    with fault(name):
        sick = one.play(stage)
    off, on = look(stage, one, healthy), look(stage, one, sick)
    signs = list(one.signs)
    if on.get("onset") is not None:
        signs.append("later" if on["onset"] else "first")
    if sick.trace is not None and on["first"] is None and on["symptom"] is None:
        signs.append("silent")
    return {
        "what": one.what,
        "model": getattr(stage, one.model).name,
        "signs": [sign for sign in SIGNS if sign in signs],
        "healthy": off,
        "sick": on,
        "seen": on["symptom"] != off["symptom"] or on.get("first") is not None,
        "caught": on["caught"],
        "accused": off["caught"],
    }


def play_all(loaded: Loaded, names: Iterable[str] | None = None, *, progress: bool = True) -> dict[str, dict]:
    """`examine` for each of `names`, by default every fault that has a scene, in the zoo's order."""
    from tqdm.auto import tqdm

    stage = Stage(loaded)
    bar = tqdm([name for name in ZOO if name in SCENES] if names is None else list(names), unit="fault", disable=not progress)
    out = {}
    for name in bar:
        bar.set_description(name)
        out[name] = examine(stage, name)
    return out


def failures(outcomes: dict[str, dict], names: Iterable[str] = ()) -> list[str]:
    """What is not as it should be, in words: a fault not caught, a healthy run accused, one of `names` not played."""
    found = [f"{name} has no scene yet" for name in names if name not in outcomes]
    found += [f"{name} is caught by no detector" for name, outcome in outcomes.items() if not outcome["caught"]]
    return found + [f"{name}: a healthy run is accused" for name, outcome in outcomes.items() if outcome["accused"]]


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """The whole zoo, off and on. Minutes at most: `quick` and `checkpoint` change nothing."""
    began = time.perf_counter()
    loaded = load(name, device=device, dtype="float32")
    manifest = record.manifest("zoo", loaded, dtypes=["float32"], seed=SEED, settings={"new_tokens": NEW_TOKENS})
    manifest = replace(manifest, model=manifest.model | {parrot.NAME: parrot.verify()})
    outcomes = play_all(loaded, progress=progress)
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), {"faults": outcomes})
