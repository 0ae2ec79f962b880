"""Mistral's sliding window in Transformers 4.34, with a twin.   python mistral.py FOLDER "twin mistral_sw"

The case itself is `cached mistral_sw` of hf.py. The twin is a run without a cache in which the prompt's tokens see the window and later ones
another: the number is that other window's length.
"""

import hf
import torch
import transformers as tf
from common import NotThere, main

WINDOWS = (7, 8, 9, 10, 12, 64)  # 64 is longer than all there is: no window


def twin(prompt, tokens, window):
    from transformers.models.mistral.modeling_mistral import MistralModel

    plain = getattr(MistralModel, "_prepare_decoder_attention_mask", None)
    if plain is None:
        raise NotThere("this release makes its masks elsewhere")

    def mask(self, *arguments, **options):
        out = plain(self, *arguments, **options)
        hidden = torch.finfo(out.dtype).min
        for row in range(len(prompt), out.shape[-1]):
            out[:, :, row, : row + 1] = 0
            out[:, :, row, : max(0, row + 1 - window)] = hidden
        return out

    MistralModel._prepare_decoder_attention_mask = mask
    try:
        return hf.recompute(hf.build("mistral_sw"), prompt, len(tokens), forced=tokens)[1]
    finally:
        MistralModel._prepare_decoder_attention_mask = plain


def play(scenario, arch):
    prompt, runs, note = hf.play("cached", arch)
    tokens = runs["suspect"][0]
    runs.update({f"twin.{window}": (tokens, twin(prompt, tokens, window)) for window in WINDOWS})
    return prompt, runs, note


if __name__ == "__main__":
    main(play, "transformers " + tf.__version__, hf.L)
