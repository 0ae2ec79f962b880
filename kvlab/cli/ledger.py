"""`kvlab ledger`: how much memory a model's KV cache takes, and what fits on a card."""

import argparse
import os
from pathlib import Path

from kvlab.cli.grammar import command
from kvlab.errors import KvlabError, UsageError


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "ledger", _ledger, "say how much memory a model's KV cache takes, and what fits on a card")
    made.add_argument(
        "model", metavar="MODEL", help="a public model (`llama 3.1 8b`), a Hugging Face id, or a folder with a config"
    )
    made.add_argument(
        "--context", type=int, metavar="N", help="tokens of a request, prompt and answer (default: all it supports)"
    )
    made.add_argument("--batch", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    made.add_argument("--kv", default="bfloat16", metavar="FORMAT", help="how K and V are kept: bf16, fp8, int8, int4, …")
    made.add_argument("--weights", default="bfloat16", metavar="FORMAT", help="how the weights are kept")
    made.add_argument("--beams", type=int, default=1, metavar="N", help="beams of a request (default: 1)")
    made.add_argument("--block", type=int, default=16, metavar="N", help="tokens in a block; 1: no blocks (default: 16)")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--card", metavar="CARD", help="as in `4090` or `a100 80`")
    where.add_argument("--memory", type=float, metavar="GIB", help="the card's memory in GiB, in place of --card")
    made.add_argument(
        "--activations", type=float, default=1.0, metavar="GIB", help="kept free beside weights and K/V (default: 1)"
    )
    made.add_argument(
        "--watermark", type=float, default=0.9, metavar="SHARE", help="share of the card that may be used (default: 0.9)"
    )


def _ledger(arguments: argparse.Namespace) -> None:
    from kvlab.core import ledger
    from kvlab.core.cards import CARDS, MODELS

    name = arguments.model
    public = None if os.path.isdir(name) else _named(name, MODELS)
    if public:
        spec, parameters = public.spec, public.parameters
    else:
        spec, parameters = _shape_of(name, MODELS)
    memory = ledger.GIB * arguments.memory if arguments.memory is not None else 1
    if arguments.card:
        card = _named(arguments.card, CARDS)
        if card is None:
            raise UsageError(f"there is no card {arguments.card!r}.", f"There are: {', '.join(CARDS)}; or give --memory GIB.")
        memory = card.memory
    try:
        setting = ledger.Setting(
            spec=spec,
            parameters=parameters,
            memory=int(memory),
            context=spec.max_context if arguments.context is None else arguments.context,
            batch=arguments.batch,
            form=ledger.find_format(arguments.kv).name,
            weight_form=ledger.find_format(arguments.weights).name,
            beams=arguments.beams,
            block=arguments.block,
            activations=int(arguments.activations * ledger.GIB),
            watermark=arguments.watermark,
        )
        found = ledger.ledger(setting)
    except ValueError as error:
        raise UsageError(f"{error}.", "`kvlab ledger --help` says what each number is.") from None
    has_card = arguments.card or arguments.memory is not None
    for label, value in _rows(setting, found, bool(has_card)):
        print(f"{label:22} {value}")
    if has_card:
        print(f"\n{ledger.sentence(setting, found)}")


def _rows(s, found, has_card: bool) -> list[tuple[str, str]]:
    """What the command prints, line by line: label and value."""
    from kvlab.core.ledger import human, layer_lines

    spec, window = s.spec, f", window {s.spec.window:,}" if s.spec.window else ""
    beams = f", {s.beams} beams" if s.beams > 1 else ""
    shape = "" if spec.mixed else f", {spec.kv_heads} K/V heads of {spec.heads}, head_dim {spec.head_dim}{window}"
    rows = [("model", f"{spec.name}: {spec.layers} layers{shape}")]
    rows += [("", line) for line in (layer_lines(spec, s.form) if spec.mixed else ())]
    rows += [("K and V", f"{s.form}, blocks of {s.block}{beams}"), ("a token", f"{found.token:,} bytes")]
    if found.grows != found.token:
        rows.append(("", f"{found.grows:,} bytes of it stay once it has left the windows"))
    if found.state:
        rows.append(("state", f"{human(found.state)} a request, whatever its length"))
    rows += [
        (f"{s.context:,} tokens", f"{human(found.request)} ({found.request:,} bytes)"),
        (f"{s.batch:,} at once", human(found.kv)),
        ("weights", f"{human(found.weights)}, {s.parameters:,} in {s.weight_form}"),
    ]
    if has_card:
        rows += [
            ("card", f"{human(s.memory)}, of which {human(found.limit)} may be used ({s.watermark:.0%})"),
            ("activations", human(s.activations)),
            ("left for K/V", f"{human(found.room)}: {'the batch fits' if found.fits else 'the batch does not fit'}"),
        ]
    return rows


def _named(wanted: str, known: dict):
    """The entry whose name holds what was typed, spaces and punctuation aside, or None; an exact name goes first."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    exact = [name for name in known if plain(name) == plain(wanted)]
    near = exact or [name for name in known if plain(wanted) and plain(wanted) in plain(name)]
    if len(near) > 1:
        raise UsageError(f"{wanted!r} may be {', '.join(near[:-1])} or {near[-1]}.", "Say more of its name.")
    return known[near[0]] if near else None


def _shape_of(source: str, public: dict):
    """Shape and number of weights of a Hugging Face config."""
    from transformers import AutoConfig

    from kvlab.core.spec import ModelSpec
    from kvlab.experiments.ledger import parameters_of
    from kvlab.runtime import weights

    remedy = f"Give a folder or an id with a config.json, or one of: {', '.join(public)}."
    try:
        with weights.quiet():
            config = AutoConfig.from_pretrained(source)
            spec = ModelSpec.from_config(config, "bfloat16", Path(source).name)
            return spec, parameters_of(config)
    except Exception as error:  # whatever a library may raise over what is no config
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise KvlabError(f"{source!r} has no config the ledger can read: {first}.", remedy) from error
