"""The bundled model's making: text, tokenizer, training loop, checkpoint, and the model itself.

`data/sched.py.txt` is the module `sched` of CPython 3.12, Copyright © 2001-2023 Python Software
Foundation, under the PSF License Agreement. Its path is on the held-out side, so no model of
`carat_jax.training.tiny` has seen it.
"""

import dataclasses
import functools
import json
import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from carat_jax.chat import ChatFormat
from carat_jax.checkpoint import load_params
from carat_jax.config import GemmaConfig
from carat_jax.params import abstract_params
from carat_jax.tokenizer import Tokenizer
from carat_jax.training import (
    corpus,
    export,
    initial,
    loop,
    next_token,
    tiny,
    token_stream,
    tokenizer_training,
)

TESTS = Path(__file__).parent
ASSETS = Path(tiny.__file__).parents[1] / "assets" / "tiny"
SCHED = (TESTS / "data" / "sched.py.txt").read_text(encoding="utf-8")

# Gemma 4's own ids, as published.
PUBLISHED_IDS = {
    **{"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4},
    **{"<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49},
    **{"<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98},
    **{"<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106},
    **{"\n": 107, "\n" * 31: 137, "▁▁": 138, "▁" * 31: 167, "<0x00>": 238, "<0xFF>": 493},
}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(ASSETS / "tokenizer.json")


@pytest.fixture(scope="module")
def learned(backend) -> dict[str, int]:
    return {token: i for token, i in backend.get_vocab().items() if i >= 494}


@pytest.fixture(scope="module")
def small_tokenizer() -> tokenizers.Tokenizer:
    return tokenizer_training.train_tokenizer([SCHED], vocab_size=700)


# --- The tokenizer -------------------------------------------------------------------------------


def test_fixed_ids_are_gemmas(backend):
    assert {token: backend.token_to_id(token) for token in PUBLISHED_IDS} == PUBLISHED_IDS


def test_every_id_has_one_token(backend):
    vocab = backend.get_vocab()
    assert sorted(vocab.values()) == list(range(tiny.CONFIG.vocab_size))


def test_control_tokens_are_special_and_unused_slots_are_not(tokenizer):
    named = {i for token, i in PUBLISHED_IDS.items() if i <= 106}
    assert {i for i in range(494) if tokenizer.is_special(i)} == named
    assert tokenizer.encode("<unused40><unused41>", add_bos=False)[0] != 46  # a renamed slot
    assert tokenizer.encode("<unused92>x<unused93>", add_bos=False)[-1] == 99


def test_structure_is_gemmas(backend):
    structure = json.loads(backend.to_str())
    assert structure["normalizer"] == {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": "▁",
    }
    assert structure["pre_tokenizer"] is None
    assert structure["post_processor"] is None
    assert [d["type"] for d in structure["decoder"]["decoders"]] == [
        "Replace",
        "ByteFallback",
        "Fuse",
    ]
    model = structure["model"]
    assert (model["type"], model["byte_fallback"], model["fuse_unk"]) == ("BPE", True, True)
    assert model["unk_token"] == "<unk>"


@pytest.mark.parametrize(("character", "id_of_one_less"), [("\n", 106), (" ", 136)])
def test_runs_are_one_token_up_to_31(tokenizer, character, id_of_one_less):
    for n in range(2, 32):
        ids = tokenizer.encode(f"x{character * n}def", add_bos=False)
        assert ids == [
            *tokenizer.encode("x", add_bos=False),
            id_of_one_less + n,
            *tokenizer.encode("def", add_bos=False),
        ]
    assert len(tokenizer.encode(character * 62, add_bos=False)) <= 4


def test_learned_pieces_keep_the_rules(learned):
    assert all("\n" not in piece for piece in learned)
    assert all(len(piece) == 1 for piece in learned if any(c.isdigit() for c in piece))
    assert all("▁" not in piece[1:] for piece in learned)
    assert all(piece.isascii() for piece in (p.removeprefix("▁") for p in learned))


def test_every_learned_piece_can_be_reached(tokenizer, learned):
    for piece, i in learned.items():
        assert tokenizer.encode(piece, add_bos=False) == [i]


def test_python_takes_the_expected_tokens(backend):
    tokens = backend.encode("def f(self):\n    return self.x[12]\n").tokens
    assert tokens[:2] == ["def", "▁f"]
    assert tokens[-10:-7] == ["\n", "▁▁▁▁", "return"]
    assert tokens[-7:] == ["▁self", ".x", "[", "1", "2", "]", "\n"]


def test_characters_outside_the_alphabet_are_spelt_in_bytes(tokenizer):
    ids = tokenizer.encode("😀é", add_bos=False)
    assert ids == [238 + byte for byte in "😀é".encode()]
    assert tokenizer.decode(ids) == "😀é"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
def test_text_comes_back(text):
    tokenizer = _bundled_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == text


def test_source_comes_back_in_few_tokens(tokenizer):
    ids = tokenizer.encode(SCHED, add_bos=False)
    assert tokenizer.decode(ids) == SCHED
    assert len(SCHED) / len(ids) > 3.0


def test_a_tokenizer_needs_room_and_text():
    with pytest.raises(ValueError, match="vocab_size 500 is below 591"):
        tokenizer_training.train_tokenizer([SCHED], vocab_size=500)
    with pytest.raises(ValueError, match="give more text or a smaller vocab_size"):
        tokenizer_training.train_tokenizer(["abab"], vocab_size=4096)


@functools.cache
def _bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(ASSETS / "tokenizer.json")


# --- The text ------------------------------------------------------------------------------------


def test_the_split_is_by_path_and_does_not_move():
    held_out = ["sched.py", "secrets.py", "copyreg.py", "traceback.py", "zipfile/__init__.py"]
    training = ["argparse.py", "json/decoder.py", "test/test_sched.py", "x/sched.py"]
    assert all(map(corpus.is_held_out, held_out))
    assert not any(map(corpus.is_held_out, training))


def test_about_a_twentieth_is_held_out():
    share = np.mean([corpus.is_held_out(f"package/module_{i}.py") for i in range(4000)])
    assert 0.04 < share < 0.06


def test_reading_a_library(tmp_path):
    files = {
        "sched.py": "a = 1\n",
        "json/decoder.py": "b = '\u00e9'\n",
        "empty.py": "\n",
        "notes.txt": "c\n",
        "site-packages/other.py": "d = 1\n",
        "encodings/cp037.py": "e = 1\n",
        "_sysconfigdata__linux.py": "prefix = '/home/someone'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("f = 'é'\n".encode("latin-1"))
    found = corpus.read_corpus(tmp_path)
    assert found.training == {"json/decoder.py": files["json/decoder.py"]}
    assert found.held_out == {"sched.py": files["sched.py"]}
    assert found.describe()["training_bytes"] == 9
    assert "PSF" in found.describe()["licence"]


def test_a_folder_without_enough_text_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 usable Python sources"):
        corpus.read_corpus(tmp_path / "absent")
    (tmp_path / "sched.py").write_text("a = 1\n")
    with pytest.raises(FileNotFoundError, match="holds 1 usable Python sources"):
        corpus.read_corpus(tmp_path)


def test_definitions_of_a_source():
    source = '''import x

@x.decorator(
    1)
def first(a):
    """Gives back what it is given.

    More.
    """
    return a

class Second:
    """Short."""

    def method(self): pass

if x:
    def inner(): pass
'''
    first, second = corpus.definitions(source)
    assert first.text.startswith("@x.decorator(\n    1)\ndef first") and first.text.endswith("a\n")
    assert first.summary == "Gives back what it is given."
    assert second.text.endswith("def method(self): pass\n") and second.summary == ""
    assert corpus.definitions("def f(:\n") == []
    assert corpus.definitions(f"def f():\n    '''{'x' * 5000}'''\n") == []


def test_documents_are_files_definitions_and_chats():
    source = 'a = 1\n\ndef one():\n    """Returns the number one."""\n    return 1\n'
    definition = source[source.index("def") :]
    chat = (
        "<bos><|turn>user\nReturns the number one.<turn|>\n<|turn>model\n"
        f"<|channel>thought\n<channel|>{definition.rstrip()}<turn|>\n<eos>"
    )
    expected = [f"<bos>{source}<eos>", f"<bos>{definition}<eos>", chat]
    assert sorted(corpus.documents([source, source], ChatFormat(empty_thought=True))) == sorted(
        expected
    )


# --- Windows -------------------------------------------------------------------------------------


def test_drawn_windows_begin_with_bos_and_a_whole_line(small_tokenizer):
    stream = token_stream.token_stream(small_tokenizer, [f"<bos>{SCHED}<eos>"] * 3, window=24)
    drawn = token_stream.draw_windows(stream, jax.random.key(0), batch=200, window=24)
    assert drawn.shape == (200, 25)
    lines = {line for line in SCHED.split("\n") if line}
    unindented = 0
    for row in np.asarray(drawn):
        assert row[0] == 2
        text = small_tokenizer.decode(row[1:].tolist(), skip_special_tokens=False)
        text, cut, _ = text.partition("\n")
        assert text in lines if cut else any(line.startswith(text) for line in lines)
        unindented += not text.startswith(" ")
    share = np.mean([not line.startswith(" ") for line in lines])
    assert unindented / 200 == pytest.approx((1 + share) / 2, abs=0.12)


def test_held_out_windows_hold_every_token_once(small_tokenizer):
    sources = {"a.py": SCHED, "b.py": "x = 1\n"}
    windows, paths = token_stream.held_out_windows(small_tokenizer, sources, window=100)
    tokens, counts = np.asarray(windows.tokens), np.asarray(windows.counts)
    assert (tokens[:, 0] == 2).all() and paths[-1] == "b.py" and paths[0] == "a.py"
    for path, source in sources.items():
        rows = [i for i, p in enumerate(paths) if p == path]
        ids = np.concatenate([tokens[i, 1 : 1 + counts[i]] for i in rows]).tolist()
        assert ids == [*small_tokenizer.encode(source).ids, 1]


def test_too_little_text_for_a_window_is_refused(small_tokenizer):
    with pytest.raises(ValueError, match="fewer than a window of 1001"):
        token_stream.token_stream(small_tokenizer, ["<bos>x = 1\n<eos>"], window=1000)


# --- Training ------------------------------------------------------------------------------------

SMALL = dataclasses.replace(
    tiny.CONFIG,
    vocab_size=700,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    head_dim=8,
    global_head_dim=16,
    sliding_window=16,
    dtype="float32",
)
OPTIONS = loop.TrainingOptions(seconds=2, batch=4, window=64, learning_rate=1e-2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict, Path]:
    """A whole run on two small texts: its log and its folder."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    text = Path(tiny.__file__).read_text(encoding="utf-8")
    small = corpus.Corpus(training={"tiny.py": text + SCHED}, held_out={"sched.py": SCHED})
    return tiny.run(small, OPTIONS, out, config=SMALL), out


def test_a_run_learns(finished):
    log, _ = finished
    assert log["curve"][-1]["step"] == log["steps"]
    assert log["curve"][-1]["held_out_loss"] < log["curve"][0]["held_out_loss"] - 1.0
    assert log["curve"][-1]["loss"] < log["curve"][1]["loss"] - 1.0


def test_a_run_leaves_a_model_and_a_log(finished):
    log, out = finished
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "training_curve.png",
        "training_log.json",
    }
    assert GemmaConfig.from_json(out) == SMALL
    text = (out / "training_log.json").read_text(encoding="utf-8")
    assert json.loads(text) == log
    assert str(out.parent) not in text and str(Path.home()) not in text
    assert log["tokens"] == log["steps"] * 4 * 64
    assert log["corpus"]["held_out_bytes"] == len(SCHED.encode())


def test_the_logged_loss_is_that_of_the_saved_weights(finished):
    log, out = finished
    assert measure(out, "sched.py", SCHED) == pytest.approx(log["held_out"]["loss"], abs=2e-3)
    bits = log["held_out"]["loss"] * log["held_out"]["tokens"] / np.log(2) / len(SCHED)
    assert log["held_out"]["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


def test_another_size_has_the_bundled_models_last_layers():
    assert tiny.of_size(12, 160, 320) == tiny.CONFIG
    small = tiny.of_size(8, 64, 96)
    assert (small.num_hidden_layers, small.hidden_size, small.intermediate_size) == (8, 64, 96)
    assert [i for i, spec in enumerate(small.layers) if spec.window is None] == [1, 7]
    with pytest.raises(ValueError, match="num_hidden_layers = 0: it must be an integer from 1"):
        tiny.of_size(0, 64, 96)


def test_a_drafter_takes_the_tokenizer_and_the_vocabulary_of_its_target(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "train", Stopped.at)
    text = Path(tiny.__file__).read_text(encoding="utf-8")
    small = corpus.Corpus(training={"tiny.py": text}, held_out={"sched.py": SCHED})
    monkeypatch.setattr(tiny, "read_corpus", lambda folder: small)
    argv = ["--tokenizer", "tiny", "--layers", "2", "--hidden-size", "32", "--window", "64"]
    with pytest.raises(Stopped) as stopped:
        tiny.main([*argv, "--out", str(tmp_path / "out")])
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    bundled = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    assert written.get_vocab() == bundled.get_vocab()
    assert written.encode(SCHED).ids == bundled.encode(SCHED).ids
    params, task = stopped.value.args
    assert params["embed_tokens"].shape == (4096, 32)
    assert task.config.num_hidden_layers == 2


class Stopped(Exception):
    """Before the first step: nothing is compiled."""

    @classmethod
    def at(cls, params, task, *_):
        raise cls(params, task)


def test_matrices_decay_and_norms_do_not():
    """With a learning rate this low only the decay moves the weights visibly."""
    params = initial.initial_params(abstract_params(SMALL), SMALL.num_hidden_layers, 0)
    options = dataclasses.replace(OPTIONS, learning_rate=1e-7, weight_decay=1e5)
    stream = token_stream.TokenStream(
        tokens=jnp.arange(600, dtype=jnp.uint16),
        lines=jnp.arange(500),
        unindented=jnp.arange(500),
    )
    windows = token_stream.Windows(tokens=jnp.zeros((1, 65), jnp.uint16), counts=jnp.array([64]))
    task = next_token.NextToken(stream, windows, SMALL, options.batch, options.window)
    state, _ = loop.train_steps(loop.start(params, options), task, 0.02, options=options, steps=1)
    rate = 1e-7 * 0.5 * (1 + np.cos(np.pi * 0.02))
    np.testing.assert_allclose(
        state.params["embed_tokens"], params["embed_tokens"] * (1 - rate * 1e5), atol=1e-6
    )
    np.testing.assert_allclose(state.params["norm"], params["norm"], atol=1e-6)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="window = 2048: it must be from 1 to 1024"):
        dataclasses.replace(OPTIONS, window=2048)
    with pytest.raises(ValueError, match="seconds = 0: it must be positive"):
        dataclasses.replace(OPTIONS, seconds=0)


def test_the_command_line_refuses_without_a_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny.main(["--out", str(tmp_path / "out"), "--corpus", str(tmp_path)])
    assert "usable Python sources" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokenizer", "no-such-model"], "'no-such-model' is no folder"),
        (["--tokenizer", str(ASSETS / "drafter")], "has no tokenizer.json: leave --tokenizer out"),
        (["--hidden-size", "0"], "hidden_size = 0: it must be"),
    ],
)
def test_a_size_or_a_tokenizer_that_cannot_be_is_refused(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny.main([*argv, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err


def measure(folder: Path, path: str, text: str) -> float:
    """Mean nats per token of a checkpoint folder's model on one source, as the log counts them."""
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    config = GemmaConfig.from_json(folder)
    windows, _ = token_stream.held_out_windows(
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        {path: text},
        log["held_out"]["window"],
    )
    params = load_params(folder, config, progress=False)
    return float(next_token.held_out_loss(params, config, windows))


# --- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense_31b_like", "e2b_like", "moe_26b_like"])
def test_written_tensors_are_those_of_a_published_checkpoint(name, tmp_path):
    """Names, shapes and values against files that Hugging Face transformers wrote."""
    source = TESTS / "fixtures" / name
    config = dataclasses.replace(GemmaConfig.from_json(source), dtype="bfloat16")
    export.save_weights(
        tmp_path / "model.safetensors", load_params(source, config, progress=False), config
    )
    written, original = (_tensors(folder / "model.safetensors") for folder in (tmp_path, source))
    borrowed = [i for i, layer in enumerate(config.layers) if not layer.owns_kv]
    unused = {
        f"layers.{i}.self_attn.{part}.weight"
        for i in borrowed
        for part in ("k_proj", "v_proj", "k_norm")
    }
    assert written.keys() == original.keys() - unused
    for tensor_name, tensor in written.items():
        assert tensor.dtype == jnp.bfloat16
        expected = original[tensor_name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(tensor, expected, err_msg=tensor_name)


@pytest.mark.parametrize("name", ["dense_31b_like", "e2b_like", "moe_26b_like"])
def test_parameters_come_back_bit_for_bit(name, tmp_path):
    config = GemmaConfig.from_json(TESTS / "fixtures" / name)
    config = dataclasses.replace(config, dtype="bfloat16")
    rng = np.random.default_rng(7)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), abstract_params(config)
    )
    export.save_weights(tmp_path / "model.safetensors", params, config)
    loaded = load_params(tmp_path, config, progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def _tensors(file: Path) -> dict[str, np.ndarray]:
    """By name without prefix."""
    with safetensors.safe_open(file, framework="flax") as tensors:
        names = list(tensors.keys())
        arrays = [np.asarray(tensors.get_tensor(name)) for name in names]
    return {
        name.removeprefix("model.").removeprefix("language_model."): array
        for name, array in zip(names, arrays, strict=True)
    }


# --- The bundled model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log() -> dict:
    return json.loads((ASSETS / "training_log.json").read_text(encoding="utf-8"))


def test_the_bundled_model_is_31bs_architecture_in_small():
    config, large = GemmaConfig.from_json(ASSETS), GemmaConfig.preset("31b")
    assert config == tiny.CONFIG
    assert config.layer_types == large.layer_types[: config.num_hidden_layers]
    assert config.sliding_window >= 64 and config.attention_k_eq_v
    assert config.final_logit_softcapping == large.final_logit_softcapping
    for small, big in zip(config.layers, large.layers, strict=False):
        assert small.shared_projection == big.shared_projection
        assert small.rotated * big.head_dim == big.rotated * small.head_dim
    assert config.num_global_key_value_heads < config.num_key_value_heads
    assert config.global_head_dim == 2 * config.head_dim


def test_the_bundled_files_stay_small():
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) <= 10e6
    assert (ASSETS / "model.safetensors").stat().st_size <= 6.8e6


def test_layer_scalars_were_trained():
    params = load_params(ASSETS, GemmaConfig.from_json(ASSETS), progress=False)
    scalars = [float(params[f"layers_{i}"]["layer_scalar"][0]) for i in range(12)]
    assert max(abs(s - 1.0) for s in scalars) > 0.01


def test_the_log_tells_of_the_bundled_model(log):
    assert log["corpus"]["training_bytes"] > 10e6 and "PSF" in log["corpus"]["licence"]
    assert log["curve"][0]["held_out_loss"] > np.log(4096)  # it began knowing nothing
    assert log["held_out"]["loss"] == pytest.approx(
        min(p["held_out_loss"] for p in log["curve"] if "held_out_loss" in p), abs=0.15
    )


def test_the_bundled_model_is_as_good_as_its_log_says(log):
    measured = measure(ASSETS, "sched.py", SCHED)
    assert measured == pytest.approx(log["held_out"]["files"]["sched.py"], rel=0.02)


def test_the_bundled_model_beats_a_general_compressor(tokenizer):
    nats = measure(ASSETS, "sched.py", SCHED) * (len(tokenizer.encode(SCHED, add_bos=False)) + 1)
    compressed = lzma.compress(SCHED.encode(), format=lzma.FORMAT_ALONE, preset=9)
    assert nats / np.log(2) / 8 < 0.95 * len(compressed)
