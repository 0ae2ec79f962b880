"""`kvlab run`: an experiment, and where its run is saved."""

import argparse
from pathlib import Path

import kvlab
from kvlab.cli.grammar import command
from kvlab.errors import UsageError


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "run", _run, "run an experiment and save what it measured")
    made.add_argument("experiment", metavar="EXPERIMENT", help=f"one of: {', '.join(experiments())}")
    made.add_argument("--quick", action="store_true", help="a small version, saved only with --out")
    made.add_argument("--out", metavar="DIR", type=Path, help="where to save the run (default: results/)")
    made.add_argument("--model", metavar="NAME", help="bundled name, Hugging Face id or folder (default: KVLAB_MODEL)")
    made.add_argument("--device", help="cuda, mps or cpu (default: KVLAB_DEVICE, else the best there is)")
    made.add_argument("--dtype", action="append", metavar="DTYPE", help="float32, bfloat16, float16; may be repeated")
    again = made.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with a run that was cut (the default)")
    again.add_argument("--fresh", action="store_true", help="start anew")


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
