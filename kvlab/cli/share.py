"""`kvlab share`: how much of one prompt's K/V another may use, and why not more."""

import argparse
import os
from pathlib import Path

from kvlab.cli.grammar import command
from kvlab.errors import KvlabError, UsageError


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "share", _share, "say how much of one prompt's K/V another may use, and why not more")
    for name in ("first", "second"):
        made.add_argument(name, metavar=name.upper(), help="a prompt's text, or @FILE with the text in it")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="each is a user's message in the model's chat template")
    form.add_argument("--ids", action="store_true", help="each is a list of token ids, as in 5,6,7; no model is needed")
    made.add_argument("--block", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    made.add_argument(
        "--salts", nargs=2, metavar="SALT", default=(None, None), help="the salts of the two, where they have any"
    )
    made.add_argument("--model", metavar="NAME", help="whose tokenizer (default: KVLAB_MODEL)")


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
