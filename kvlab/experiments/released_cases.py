"""The tables of the experiment `released`: which bug, in which release of which package, told in which public thread.

A case is a scenario on a small model (`probes/`) that a release gets wrong. `broken` and `fixed` are the releases that are run: the
last that is known to be wrong and the first that is known to be right.
"""

from __future__ import annotations

from dataclasses import dataclass

HF = "huggingface/transformers"


@dataclass(frozen=True)
class Case:
    """One bug of released software.

    what      the probe's scenario and model: "static llama"
    fixed     None while it is open; `says` is then what was found of it
    threads   where it was reported or repaired: "owner/repository#number"; empty where none was found
    symptom   what a user sees, in a line
    family    what the fault is by its thread and by reading the code
    number    what the twin's number counts, where there is a twin
    """

    name: str
    package: str
    what: str
    broken: str
    fixed: str | None
    threads: tuple[str, ...]
    symptom: str
    family: str
    number: str | None = None


BUGS = (
    Case(
        "xglm-left-pad",
        "transformers",
        "left_pad xglm",
        "4.28.1",
        "4.29.0",
        (HF + "#22707", HF + "#22828"),
        "XGLM: a short row beside a longer one gets positions that count its pads",
        "position",
        "pads counted",
    ),
    Case(
        "mistral-window",
        "transformers",
        "cached mistral_sw",
        "4.34.1",
        "4.35.0",
        (HF + "#26792",),
        "Mistral: cached steps see past the window",
        "mask",
    ),
    Case(
        "static-cache",
        "transformers",
        "static llama",
        "4.40.2",
        "4.41.0",
        (HF + "#30400", HF + "#30437"),
        "static cache: each cached step reads the slots nobody has written",
        "mask",
        "slots visible",
    ),
    Case(
        "assisted",
        "transformers",
        "assisted llama",
        "4.40.2",
        "4.41.0",
        (HF + "#30413", HF + "#30042"),
        "assisted decoding is not greedy decoding",
        "own state altered",
    ),
    Case(
        "prompt-lookup",
        "transformers",
        "lookup llama",
        "4.40.2",
        "4.41.0",
        (HF + "#30413", HF + "#30042"),
        "prompt lookup decoding is not greedy decoding",
        "own state altered",
    ),
    Case(
        "cache-copied",
        "transformers",
        "own_cache llama",
        "4.40.2",
        "4.41.0",
        (HF + "#30108",),
        "a DynamicCache that is handed in is copied, not filled: a loop of one's own loses its history",
        "mask",
        "earlier tokens seen",
    ),
    Case(
        "mamba-left-pad",
        "transformers",
        "left_pad mamba",
        "4.41.2",
        "4.45.0",
        (HF + "#31540", HF + "#32677"),
        "Mamba: the pads of a short row enter its state",
        "mask",
        "pads read",
    ),
    Case(
        "dynamic-ntk",
        "transformers",
        "after_long llama_dyn",
        "4.42.4",
        "4.43.4",
        (HF + "#25306", HF + "#27226", HF + "#32135"),
        "dynamic NTK: after a long request every short one runs at the long one's frequencies",
        "foreign state",
        "length of the earlier request",
    ),
    Case(
        "dynamic-ntk-again",
        "transformers",
        "after_long llama_dyn",
        "5.12.1",
        "5.13.0",
        (HF + "#46624",),
        "dynamic NTK: the same, again",
        "foreign state",
        "length of the earlier request",
    ),
    Case(
        "longrope",
        "transformers",
        "cached phi3_long",
        "4.44.2",
        "4.45.0",
        (HF + "#33129",),
        "Phi-3 longrope: keys of the short factor stay in the cache past the switch",
        "position",
    ),
    Case(
        "longrope-again",
        "transformers",
        "cached phi3_long",
        "5.19.0",
        "5.20.0",
        (),
        "Phi-3 longrope: the same symptom, again",
        "position",
    ),
    Case(
        "mamba2-cached",
        "transformers",
        "cached mamba2",
        "4.47.1",
        "4.48.0",
        (HF + "#33567", HF + "#34817", HF + "#35154"),
        "Mamba-2: cached steps update the state wrongly",
        "own state altered",
    ),
    Case(
        "gemma-window",
        "transformers",
        "window gemma3",
        "4.51.3",
        "4.52.3",
        (HF + "#37574", HF + "#38046"),
        "Gemma-3: a token of its own is lost where the window fills",
        "mask",
    ),
    Case(
        "mamba-beams",
        "transformers",
        "beams mamba",
        "5.12.1",
        "5.13.0",
        (HF + "#29730", HF + "#46612", HF + "#46819"),
        "Mamba, beam search: a beam goes on from another beam's state",
        "foreign state",
    ),
    Case(
        "paged-forward",
        "transformers",
        "paged_forward llama",
        "5.16.1",
        "5.20.2",
        (HF + "#48296",),
        "a plain forward while paged attention is switched on is not causal",
        "mask",
        "later tokens seen (1: all)",
    ),
    Case(
        "tl-alibi",
        "transformer-lens",
        "cached alibi",
        "2.8.1",
        "2.9.0",
        ("TransformerLensOrg/TransformerLens#776", "TransformerLensOrg/TransformerLens#777"),
        "ALiBi with a cache takes the first row of the table of biases",
        "position",
    ),
    Case(
        "xt-alibi",
        "x-transformers",
        "after_long alibi",
        "1.22.15",
        "1.22.17",
        ("lucidrains/x-transformers#187",),
        "ALiBi with a cache takes the first row, once a longer request has filled the table",
        "position",
    ),
    Case(
        "xt-left-pad",
        "x-transformers",
        "left_pad absolute",
        "1.22.15",
        "1.22.17",
        ("lucidrains/x-transformers#187",),
        "prompts of unequal length: left padding masked and counted wrongly",
        "mask",
    ),
    Case(
        "xt-left-pad-rotary",
        "x-transformers",
        "left_pad rotary",
        "1.22.15",
        "1.22.17",
        ("lucidrains/x-transformers#187",),
        "the same with rotary positions",
        "mask",
    ),
    Case(
        "litgpt-window",
        "litgpt",
        "window gemma3",
        "0.5.11",
        "0.5.12",
        ("Lightning-AI/litgpt#2145", "Lightning-AI/litgpt#2153"),
        "Gemma-3: cached steps see past the window",
        "mask",
        "window, tokens (64: none)",
    ),
)

# The same bug on the bundled model's real weights, its logits as a server would have had them.
REAL = Case(
    "static-cache-real",
    "transformers",
    "real static",
    "4.40.2",
    "4.41.0",
    BUGS[2].threads,
    BUGS[2].symptom,
    "mask",
    "slots visible",
)

# The Mistral case once more, with a twin, which needs that release's own way to make masks.
NAMED = Case(
    "mistral-window-twin",
    "transformers",
    "twin mistral_sw",
    "4.34.1",
    None,
    BUGS[1].threads,
    BUGS[1].symptom,
    "mask",
    "window of cached steps, tokens (64: none)",
)

# A report that was none: both releases are sound.
ACQUITTED = Case(
    "neox-left-pad",
    "transformers",
    "left_pad gpt_neox",
    "4.27.4",
    "4.28.1",
    (HF + "#22161",),
    "GPT-NeoX does not work with padding on the left",
    "none",
)

# Observed on the newest release; `prefix_copied` is the sound way round the first.
TODAY = "5.24.0"
OPEN = (
    Case(
        "borrowed-cache",
        "transformers",
        "prefix_no_cache llama",
        TODAY,
        None,
        (HF + "#37078",),
        "use_cache=False still writes into a cache that is handed in",
        "foreign state",
        "foreign tokens in front",
    ),
    Case(
        "neo-static",
        "transformers",
        "static gpt_neo",
        TODAY,
        None,
        (),
        "GPT-Neo with a static cache, past its local window",
        "mask",
    ),
)
SOUND = Case(
    "borrowed-copy",
    "transformers",
    "prefix_copied llama",
    TODAY,
    None,
    (),
    "a copy of the cache is handed in instead",
    "none",
)

# The calendar: the last patch of each minor release, the oldest first.
_RELEASES = """
    4.27.4 4.28.1 4.29.2 4.30.2 4.31.0 4.32.1 4.33.3 4.34.1 4.35.2 4.36.2 4.37.2 4.38.2 4.39.3 4.40.2 4.41.2 4.42.4 4.43.4 4.44.2
    4.45.2 4.46.3 4.47.1 4.48.3 4.49.0 4.50.3 4.51.3 4.52.4 4.53.3 4.54.1 4.55.4 4.56.2 4.57.6 5.0.0 5.1.0 5.2.0 5.3.0 5.4.0 5.5.4
    5.6.2 5.7.0 5.8.1 5.9.0 5.10.4 5.11.0 5.12.1 5.13.1 5.14.1 5.15.1 5.16.1 5.17.0 5.18.0 5.19.0 5.20.2 5.21.1 5.22.2 5.23.0
    5.24.0
"""
CALENDAR = tuple(_RELEASES.split())

PROBES = {"transformers": "hf.py", "transformer-lens": "tl.py", "x-transformers": "xt.py", "litgpt": "lit.py"}

# Tokenizers for a release of Transformers: (from this release on, version).
_TOKENIZERS = (
    ((4, 27, 0), "0.13.3"),
    ((4, 34, 0), "0.14.1"),
    ((4, 35, 1), "0.15.2"),
    ((4, 40, 0), "0.19.1"),
    ((4, 45, 0), "0.20.3"),
    ((4, 47, 0), "0.21.4"),
    ((4, 56, 0), "0.22.2"),
    ((5, 16, 0), "0.23.3"),
)
_HUBS = (((4, 0, 0), "0.36.2"), ((5, 0, 0), "1.33.0"), ((5, 20, 0), "2.4.0"))
_OTHERS = {
    "transformer-lens": (
        ("beartype", "0.23.1"),
        ("better-abc", "0.0.3"),
        ("fancy-einsum", "0.0.3"),
        ("jaxtyping", "0.2.36"),
        ("rich", "15.0.0"),
        ("typeguard", "4.6.1"),
        ("sentencepiece", "0.2.3"),
        ("einops", "0.8.2"),
        ("pandas", "3.1.1"),
        ("transformers-stream-generator", "0.0.5"),
        ("accelerate", "1.15.0"),
    ),
    "x-transformers": (("einops", "0.8.2"),),
    "litgpt": (
        ("lightning", "2.6.6"),
        ("lightning-utilities", "0.15.3"),
        ("torchmetrics", "1.9.0"),
        ("jsonargparse", "4.53.0"),
        ("docstring-parser", "0.18.0"),
    ),
}
_BESIDE = {"transformer-lens": "4.46.3", "litgpt": "4.57.6"}  # the Transformers they import


def numbers(version: str) -> tuple[int, ...]:
    """A release as numbers, to compare: "4.40.2" → (4, 40, 2)."""
    return tuple(map(int, version.split(".")))


def _since(table: tuple, version: str) -> str:
    return [value for first, value in table if first <= numbers(version)][-1]


def pins(package: str, version: str) -> list[tuple[str, str]]:
    """What must be on the path for this release, itself first: (package, version) each. Torch is the environment's."""
    if package != "transformers":
        beside = pins("transformers", _BESIDE[package]) if package in _BESIDE else []
        return [(package, version), *_OTHERS[package], *beside]
    found = [(package, version), ("tokenizers", _since(_TOKENIZERS, version)), ("huggingface_hub", _since(_HUBS, version))]
    if (4, 42, 0) <= numbers(version) < (4, 45, 0):
        found.append(("numpy", "1.26.4"))  # these three say so
    return found


def swept() -> tuple[Case, ...]:
    """The calendar's rows: each scenario of a bug of Transformers once, and what is open."""
    seen, rows = set(), []
    for case in (*BUGS, *OPEN):
        if case.package == "transformers" and case.what not in seen:
            seen.add(case.what)
            rows.append(case)
    return tuple(rows)
