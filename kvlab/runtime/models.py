"""Load a model: the bundled one, the parrot, or any causal language model Transformers can read."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlab.core.spec import ModelSpec, canonical_dtype
from kvlab.errors import KvlabError
from kvlab.runtime import parrot, weights


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to run.

    Attributes:
        model: Transformers model in eval mode on `device`; its parameters take no gradients.
        tokenizer: its tokenizer, with a pad token, padding on the left.
        spec: its shape.
        name: the bundled model's name, "parrot", the Hugging Face id, or the folder's name.
        sha256: of the GGUF for the bundled model; of the weights for the parrot; of the weight files' names and hashes for a folder;
            `"commit:…"`, the repository's commit, for a Hugging Face id.
        device: "cuda", "cuda:1", "mps" or "cpu".
        dtype: canonical name of the parameters' dtype.
    """

    model: Any
    tokenizer: Any
    spec: ModelSpec
    name: str
    sha256: str
    device: str
    dtype: str


def load(
    name: str | os.PathLike | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        name: a bundled model ("smollm2"), "parrot" (the toy with learned positions that comes with the package), a Hugging
            Face id, or a folder. By default `KVLAB_MODEL`, else "smollm2".
        device: by default `KVLAB_DEVICE`, else the first there is of cuda, mps, cpu.
        dtype: of the weights: float32, bfloat16 or float16 (or fp32, bf16, fp16). By default `KVLAB_DTYPE`, else
            float32.
        attention: "sdpa" or "eager"; by default sdpa where the model has it.

    Raises:
        KvlabError: an argument names nothing there is, or the files cannot be had or are damaged.
    """
    name = str(name or os.environ.get("KVLAB_MODEL") or weights.DEFAULT)
    device = pick_device(device)
    dtype = _pick_dtype(dtype)
    bundled = weights.find(name)
    if name.lower() == parrot.NAME:
        source = str(parrot.FOLDER)
    else:
        source = str(weights.ensure(bundled)) if bundled else name
    model, tokenizer, spec = _from_transformers(source, dtype, _pick_attention(attention))
    if name.lower() == parrot.NAME:
        label, digest = parrot.NAME, parrot.verify()
    elif bundled:
        label, digest = bundled.name, bundled.sha256
    else:
        label, digest = _identity(source, model.config)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.requires_grad_(False).eval().to(device)
    return Loaded(model, tokenizer, replace(spec, name=label), label, digest, device, dtype)


def pick_device(device: str | None = None) -> str:
    """The device asked for by argument or `KVLAB_DEVICE`, else the first there is of cuda, mps, cpu.

    Raises:
        KvlabError: the device is unknown or not there.
    """
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = str(device or os.environ.get("KVLAB_DEVICE") or next(kind for kind, found in there.items() if found))
    kind, _, index = device.partition(":")
    remedy = f"Use one of: {', '.join(kind for kind, found in there.items() if found)}."
    if kind not in there or (index and not index.isdigit()):
        raise KvlabError(f"device {device!r} is unknown.", remedy)
    if not there[kind] or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        raise KvlabError(f"device {device!r} is not on this machine, or this torch cannot use it.", remedy)
    return device


def _pick_dtype(dtype: str | None) -> str:
    try:
        name = canonical_dtype(dtype or os.environ.get("KVLAB_DTYPE") or "float32")
    except ValueError as error:
        raise KvlabError(f"{error}.", "Use float32, bfloat16 or float16.") from None
    if name.startswith("int"):
        raise KvlabError(f"dtype {name!r} is no type for weights here.", "Use float32, bfloat16 or float16.")
    return name


def _pick_attention(attention: str | None) -> str | None:
    from transformers import AttentionInterface

    known = {"eager", *AttentionInterface().valid_keys()}
    if attention is not None and attention not in known:
        raise KvlabError(f"attention {attention!r} is unknown.", f"Use one of: {', '.join(sorted(known))}.")
    return attention


def _from_transformers(source: str, dtype: str, attention: str | None) -> tuple[Any, Any, ModelSpec]:
    """Model, tokenizer and shape as Transformers reads them, or one clear error."""
    import torch
    import transformers

    remedy = "Give a bundled model (smollm2, parrot), the id of a causal language model on Hugging Face, or a folder with one."
    try:
        with weights.quiet():
            config = transformers.AutoConfig.from_pretrained(source)
            if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
                raise KvlabError(f"{source!r} is no causal language model: its type is {config.model_type}.", remedy)
            spec = ModelSpec.from_config(config, dtype, source)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except KvlabError:
        raise
    except Exception as error:  # whatever a library may raise over files that are not what they should be
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not os.path.isdir(source):
            remedy += " Offline, set HF_HUB_OFFLINE=1: what was downloaded before still loads."
        raise KvlabError(f"cannot load the model {source!r}: {first}", remedy) from error
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise KvlabError(f"{source!r} lacks weights its model needs ({some}).", remedy)
    return model, tokenizer, spec


def _identity(source: str, config: Any) -> tuple[str, str]:
    """Name and hash of a model that is not bundled."""
    folder = Path(source)
    if not folder.is_dir():
        return source, f"commit:{getattr(config, '_commit_hash', None) or 'unknown'}"
    files = sorted(p for kind in ("*.safetensors", "*.bin") for p in folder.glob(kind))
    lines = "".join(f"{weights.known_sha256(path)}  {path.name}\n" for path in files)
    return folder.resolve().name, hashlib.sha256(lines.encode()).hexdigest()
