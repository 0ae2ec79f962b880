"""The bundled model's real weights in an old Transformers.   python smollm.py FOLDER "static llama" ...

The environment says where the weights lie (KVLAB_WEIGHTS: the converted folder), what the prompt's ids are (KVLAB_PROMPT), how
many tokens are asked for (KVLAB_NEW) and how many of them are written down (KVLAB_STEPS). Ids, because an old tokenizers cannot read the
folder's tokenizer.json. An old release does not know the folder's `rope_parameters` either, and would take its own default theta
without a word, so the config is built from the plain fields.
"""

import json
import os

import hf
import transformers as tf
from common import main, threads
from safetensors.torch import load_file

FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings "
    "rms_norm_eps tie_word_embeddings bos_token_id eos_token_id"
)


def build(folder):
    with open(os.path.join(folder, "config.json")) as file:
        raw = json.load(file)
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{n: raw[n] for n in FIELDS.split()}, rope_theta=theta))
    missing, unexpected = model.load_state_dict(load_file(os.path.join(folder, "model.safetensors")), strict=False)
    if set(missing) - {"lm_head.weight"} or any("inv_freq" not in name for name in unexpected):
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    g = model.generation_config
    g.eos_token_id, g.pad_token_id = None, 0
    model.config.eos_token_id = None
    return model.float().eval()


def play(scenario, arch):
    prompt = [int(i) for i in os.environ["KVLAB_PROMPT"].split()]
    new, steps = int(os.environ["KVLAB_NEW"]), int(os.environ["KVLAB_STEPS"])
    model = build(os.environ["KVLAB_WEIGHTS"])
    suspect = hf.generate(model, [prompt], new, cache_implementation="static")
    suspect = suspect[0][:steps], suspect[1][:steps]
    model = build(os.environ["KVLAB_WEIGHTS"])
    runs = {"reference": hf.recompute(model, prompt, steps), "suspect": suspect}
    runs["healthy.rows2"] = hf.recompute(model, prompt, steps, rows=2)
    runs["healthy.behind"] = hf.recompute(model, prompt, steps, after=5)
    threads()
    runs["healthy.threads"] = hf.recompute(model, prompt, steps)
    threads()
    return prompt, runs, {}


if __name__ == "__main__":
    main(play, "transformers " + tf.__version__, 30)
