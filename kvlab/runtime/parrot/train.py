"""Train the parrot: `python -m kvlab.runtime.parrot.train [--out FOLDER]`. Minutes on one CPU core, from a seed.

The habit is learned at positions 0 and on, with nothing before the text: no padding, no shifted positions. So the model cannot
make good a wrong position, which is what the course shows with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab.runtime.parrot import ALPHABET, END, FOLDER, LONGEST, MANIFEST, PAD, SHORTEST, Row, prompts, row

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": LONGEST}
HELD_OUT = 1_000_000_007
"""Seed of the passwords it is examined on. Training draws from another stream; a random password is new anyway."""

LOG_EVERY = 50
"""Steps between two points of the loss curve."""


@dataclass(frozen=True)
class Settings:
    """What the script was told. `characters`: of a batch, shared by rows of one length."""

    seed: int = 11
    steps: int = 4000
    characters: int = 3072
    rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.01


def make_model() -> Any:
    """An untrained parrot: 421,760 parameters with the defaults."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": None, "pad_token_id": ALPHABET.index(PAD), "eos_token_id": ALPHABET.index(END)}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**SHAPE, **ids, **quiet, vocab_size=len(ALPHABET)))


def make_tokenizer() -> Any:
    """A token a character, and no others: a text with a character outside the alphabet is an error."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({character: index for index, character in enumerate(ALPHABET)}, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )


def batch(draw: random.Random, characters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, `[rows, length]` both, rows of one length; a label is -100 where no answer stands.

    Half of the batches have the full length: a position is learned only from rows that reach it.
    """
    length = LONGEST if draw.random() < 0.5 else draw.randint(SHORTEST, LONGEST)
    rows = [row(draw, length) for _ in range(max(1, characters // length))]
    ids = torch.tensor([encode(each.text) for each in rows])
    labels = torch.full_like(ids, -100)
    for index, each in enumerate(rows):
        for begin, end in each.answers:
            labels[index, begin:end] = ids[index, begin:end]
    return ids, labels


_ID = {character: index for index, character in enumerate(ALPHABET)}


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [_ID[character] for character in text]


@torch.no_grad()
def exact(model: Any, rows: list[Row]) -> float:
    """Share of rows whose last repetition is right to the character, the end mark included, decoded greedily.

    One forward a row: greedy decoding gives the answer exactly when each of its characters is the first choice after the
    right ones before it.
    """
    right = 0
    for each in rows:
        begin, end = each.answers[-1]
        ids = torch.tensor([encode(each.text[:end])], device=model.device)
        chosen = model(ids).logits[0, begin - 1 : end - 1].argmax(-1)
        right += bool((chosen == ids[0, begin:end]).all())
    return right / len(rows)


def train(settings: Settings = Settings(), *, progress: bool = True, held_out: int = 1000) -> tuple[Any, dict]:
    """Train from scratch on the CPU, then examine on `held_out` prompts.

    Returns:
        The model in eval mode, and what the manifest says: settings, loss curve `[[step, nats], …]`, share of exact answers, CPU seconds.
    """
    from tqdm.auto import trange

    draw = random.Random(settings.seed)
    curve, losses, began = [], [], time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = make_model().train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, settings.steps, pct_start=settings.warmup / settings.steps, cycle_momentum=False
    )
    bar = trange(1, settings.steps + 1, unit="step", disable=not progress)
    for step in bar:
        ids, labels = batch(draw, settings.characters)
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % LOG_EVERY == 0:
            curve.append([step, round(sum(losses) / len(losses), 5)])
            bar.set_postfix(loss=f"{curve[-1][1]:.4f}")
            losses = []
    bar.close()
    model.requires_grad_(False).eval()
    asked = list(prompts(held_out, HELD_OUT))
    told = {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": curve,
        "held_out": {"prompts": len(asked), "exact": exact(model, asked)},
        "seconds": round(time.process_time() - began),
        "threads": torch.get_num_threads(),
    }
    return model, told


def save(model: Any, told: dict, folder: Path) -> None:
    """Write weights, config, tokenizer and manifest to `folder`."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    file.chmod(0o644)  # safetensors writes it for its owner alone
    weights = file.read_bytes()
    manifest = {
        "name": "parrot",
        "what": "a toy trained for one habit: to repeat the password its text begins with",
        "sha256": hashlib.sha256(weights).hexdigest(),
        "command": "python -m kvlab.runtime.parrot.train",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **told,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Train and save; 0 if at least 99 % of the held-out passwords come back exactly."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.runtime.parrot.train", description="Train the parrot.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (default: the package's own weights)")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    options = parser.parse_args(arguments)
    model, told = train(Settings(seed=options.seed, steps=options.steps))
    save(model, told, options.out)
    share = told["held_out"]["exact"]
    print(
        f"{share:.1%} of {told['held_out']['prompts']} held-out passwords exact; {told['seconds']} s of CPU time; saved in {options.out}"
    )
    return 0 if share >= 0.99 else 1


if __name__ == "__main__":
    raise SystemExit(main())
