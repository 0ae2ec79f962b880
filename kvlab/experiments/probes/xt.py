"""x-transformers (lucidrains), 1.22.   python xt.py FOLDER "after_long alibi" "left_pad absolute" "left_pad rotary"

after_long   greedy with the wrapper's own cache, after a longer request
left_pad     a short row beside a long one: the wrapper moves the padding to the left itself
"""

from importlib.metadata import version

import torch
from common import fill, ids_of, main, plain_runs, recompute
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

N = 8
MODELS = {
    "alibi": ({"use_abs_pos_emb": False}, {"alibi_pos_bias": True, "alibi_num_heads": 2}),
    "absolute": ({"use_abs_pos_emb": True}, {}),
    "rotary": ({"use_abs_pos_emb": False}, {"rotary_pos_emb": True}),
}


def build(arch):
    outer, inner = MODELS[arch]
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=32, **inner)
    return fill(TransformerWrapper(num_tokens=96, max_seq_len=64, attn_layers=layers, **outer).eval())


def only_best(logits):
    """Sampling from what this leaves is greedy."""
    return torch.where(logits == logits.amax(-1, keepdim=True), logits, torch.full_like(logits, -1e9))


@torch.no_grad()
def suspect(scenario, arch, prompt):
    net = build(arch)
    options = {}
    if scenario == "left_pad":
        ids = torch.tensor([prompt + [0] * 8, ids_of(15, 4)])
        options["prompt_lens"] = torch.tensor([7, 15])
    else:
        net(torch.tensor([ids_of(40, 5)]))  # an earlier, longer request leaves its table of biases in the model
        ids = torch.tensor([prompt])
    seen = []
    hook = net.to_logits.register_forward_hook(lambda _, __, out: seen.append(out[0, -1].float().clone()))
    out = AutoregressiveWrapper(net, pad_value=0).generate(ids, N, temperature=1.0, filter_logits_fn=only_best, **options)
    hook.remove()
    return out[0, -N:].tolist(), torch.stack(seen)


def play(scenario, arch):
    prompt = ids_of(7, 3)
    runs = {"suspect": suspect(scenario, arch, prompt)}
    runs.update(plain_runs(build(arch), prompt, N))
    runs["healthy.float64"] = recompute(build(arch).double(), prompt, N)
    return prompt, runs, {}


if __name__ == "__main__":
    main(play, "x-transformers " + version("x-transformers"))
