"""TransformerLens: a small model with ALiBi, decoded with its key-value cache.   python tl.py FOLDER "cached alibi" ..."""

import importlib.machinery
import sys
import types
from importlib.metadata import version


def _stub(name):
    """A package that is imported and not used here."""
    module = types.ModuleType(name)
    module.__getattr__ = lambda wanted: type(wanted, (), {}) if not wanted.startswith("__") else _absent(wanted)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module


def _absent(name):
    raise AttributeError(name)


for package in ("wandb", "datasets", "datasets.arrow_dataset", "datasets.load"):
    _stub(package)

import torch  # noqa: E402
from common import fill, ids_of, main, plain_runs, recompute  # noqa: E402
from transformer_lens import HookedTransformer, HookedTransformerConfig, utils  # noqa: E402
from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache  # noqa: E402

N = 8
utils.get_attention_mask = lambda tokenizer, tokens, prepend_bos: torch.ones_like(tokens)  # it would ask a tokenizer for pads


def build():
    torch.manual_seed(0)
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=64,
        n_ctx=64,
        d_head=16,
        n_heads=4,
        d_mlp=128,
        d_vocab=96,
        act_fn="gelu",
        positional_embedding_type="alibi",
        device="cpu",
        seed=0,
    )
    return fill(HookedTransformer(config).eval())


def uncached(model):
    """Ids to logits, no cache, nothing put in front."""
    return lambda ids: model(ids, return_type="logits", prepend_bos=False)


@torch.no_grad()
def suspect(prompt):
    model = build()
    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 1)
    ids, tokens, out = prompt, [], []
    for _ in range(N):
        logits = model(torch.tensor([ids]), return_type="logits", prepend_bos=False, past_kv_cache=cache)[0, -1]
        out.append(logits.float())
        tokens.append(int(logits.argmax()))
        ids = [tokens[-1]]
    return tokens, torch.stack(out)


def play(scenario, arch):
    prompt = ids_of(12, 3)
    runs = {"suspect": suspect(prompt)}
    runs.update(plain_runs(uncached(build()), prompt, N))
    try:
        double = build()
        double.cfg.dtype = torch.float64
        runs["healthy.float64"] = recompute(uncached(double.double()), prompt, N)
    except Exception as error:
        print("no float64", str(error)[:80])
    return prompt, runs, {}


if __name__ == "__main__":
    main(play, "transformer-lens " + version("transformer-lens"))
