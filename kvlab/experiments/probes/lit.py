"""litgpt: a Gemma-3-like model whose layers see a window of 8 tokens, decoded with its cache past it.   python lit.py FOLDER "window gemma3" """

from importlib.metadata import version

import torch
from common import fill, ids_of, main, plain_runs, recompute
from litgpt.model import GPT, Config

N = 10


def build(window=8):
    torch.manual_seed(0)
    config = Config.from_name(
        "Gemma-3-1b-it",
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_query_groups=2,
        head_size=16,
        intermediate_size=128,
        padded_vocab_size=96,
        vocab_size=96,
        block_size=64,
        sliding_window_size=window,
        sliding_window_indices=[1, 1],
        attention_scores_scalar=16,
    )
    return fill(GPT(config).eval())


@torch.no_grad()
def suspect(prompt):
    model = build()
    model.set_kv_cache(batch_size=1, max_seq_length=40)
    fed, at, tokens, out = prompt, 0, [], []
    for _ in range(N):
        logits = model(torch.tensor([fed]), torch.arange(at, at + len(fed)))[0, -1]
        at += len(fed)
        out.append(logits.float())
        tokens.append(int(logits.argmax()))
        fed = [tokens[-1]]
    return tokens, torch.stack(out)


def play(scenario, arch):
    prompt = ids_of(5, 3)
    runs = {"suspect": suspect(prompt)}
    runs.update(plain_runs(build(), prompt, N))
    runs["healthy.float64"] = recompute(build().double(), prompt, N)
    for size in (8, 9, 10, 64):  # a twin: a reference with another window
        runs[f"twin.{size}"] = recompute(build(size), prompt, N, forced=runs["suspect"][0])
    return prompt, runs, {}


if __name__ == "__main__":
    main(play, "litgpt " + version("litgpt"))
