"""Every weight in its place, and every defect of a checkpoint named in one error."""

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from fixture_models import FOLDER, step
from safetensors.numpy import load_file, save_file
from small_checkpoint import (
    CONFIGS,
    bits,
    join_file,
    same_bits,
    split_file,
    with_prefix,
    write,
    write_index,
    write_sharded,
)

from carat_jax.checkpoint import CheckpointError, load_params, loading, reading
from carat_jax.config import GemmaConfig

BF16 = ml_dtypes.bfloat16
DENSE = CONFIGS["dense"]


def load(folder: Path, **changes: object):
    config = dataclasses.replace(GemmaConfig.from_json(folder), **changes)
    return load_params(folder, config, progress=False)


def refusal(folder: Path, config: dict = DENSE) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_params(folder, GemmaConfig.from_dict(config), progress=False)
    return str(caught.value)


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors as the safetensors library reads them, without the prefix."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    prefix = "model.language_model." if "model.language_model.norm.weight" in tensors else "model."
    return {name.removeprefix(prefix): values for name, values in tensors.items()}


def assert_equal(loaded: jax.Array, expected: np.ndarray) -> None:
    expected = np.ascontiguousarray(expected)
    assert loaded.dtype == expected.dtype and loaded.shape == expected.shape
    assert np.array_equal(bits(loaded), expected.view(bits(loaded).dtype))


# Where the weights go


def assert_all_in_place(folder: Path) -> None:
    """Compares every parameter with the tensors, head by head and row by row."""
    config, raw, params = GemmaConfig.from_json(folder), raw_tensors(folder), load(folder)
    seen = {"embed_tokens", "norm", *(f"layers_{i}" for i in range(len(config.layers)))}
    assert_equal(params["embed_tokens"], raw["embed_tokens.weight"])
    assert_equal(params["norm"], raw["norm.weight"])
    if P := config.hidden_size_per_layer_input:
        table, projection = params["embed_tokens_per_layer"], params["per_layer_model_projection"]
        for i in range(len(config.layers)):
            rows = slice(i * P, (i + 1) * P)
            assert_equal(table[:, i], raw["embed_tokens_per_layer.weight"][:, rows])
            assert_equal(projection[:, i], raw["per_layer_model_projection.weight"][rows].T)
        norm = "per_layer_projection_norm"
        assert_equal(params[norm], raw[f"{norm}.weight"])
        seen |= {"embed_tokens_per_layer", "per_layer_model_projection", norm}
    assert params.keys() == seen
    for spec in config.layers:
        p = params[f"layers_{spec.index}"]
        r = {
            name.removeprefix(f"layers.{spec.index}."): values
            for name, values in raw.items()
            if name.startswith(f"layers.{spec.index}.")
        }
        assert_attention_in_place(spec, p["attention"], r)
        assert p["mlp"].keys() == {"gate_up", "down"}
        assert p["mlp"]["gate_up"].shape[1:] == (2, spec.mlp_width)
        assert_equal(p["mlp"]["gate_up"][:, 0], r["mlp.gate_proj.weight"].T)
        assert_equal(p["mlp"]["gate_up"][:, 1], r["mlp.up_proj.weight"].T)
        assert_equal(p["mlp"]["down"], r["mlp.down_proj.weight"].T)
        if config.num_experts:
            assert_experts_in_place(config, p["experts"], r)
        for name in p.keys() - {"attention", "mlp", "experts"}:
            if name == "layer_scalar":
                assert_equal(p[name], r[name])
            elif name in ("per_layer_input_gate", "per_layer_projection"):
                assert_equal(p[name], r[f"{name}.weight"].T)
            else:
                assert_equal(p[name], r[f"{name}.weight"])


def assert_attention_in_place(spec, p, r) -> None:
    K, G, H = spec.num_kv_heads, spec.group, spec.head_dim
    own = [name for name in ("k_proj", "v_proj") if spec.owns_kv]
    own = own[:1] if spec.shared_projection else own
    assert p["qkv"].shape[1:] == (K, G + len(own), H)
    for k in range(K):
        for g in range(G):
            head = slice((k * G + g) * H, (k * G + g + 1) * H)
            assert_equal(p["qkv"][:, k, g], r["self_attn.q_proj.weight"][head].T)
            assert_equal(p["o"][k, g], r["self_attn.o_proj.weight"][:, head].T)
        for i, name in enumerate(own):
            rows = slice(k * H, (k + 1) * H)
            assert_equal(p["qkv"][:, k, G + i], r[f"self_attn.{name}.weight"][rows].T)
    norms = {"q_norm", "k_norm"} if spec.owns_kv else {"q_norm"}
    for name in norms:
        assert_equal(p[name], r[f"self_attn.{name}.weight"])
    assert p.keys() == {"qkv", "o", *norms}


def assert_experts_in_place(config, p, r) -> None:
    F = config.moe_intermediate_size
    for e in range(config.num_experts):
        assert_equal(p["gate_up"][e, :, 0], r["experts.gate_up_proj"][e, :F].T)
        assert_equal(p["gate_up"][e, :, 1], r["experts.gate_up_proj"][e, F:].T)
        assert_equal(p["down"][e], r["experts.down_proj"][e].T)
    assert_equal(p["router"], r["router.proj.weight"].T)
    assert_equal(p["router_scale"], r["router.scale"])
    assert_equal(p["per_expert_scale"], r["router.per_expert_scale"])
    assert p.keys() == {"gate_up", "down", "router", "router_scale", "per_expert_scale"}


@pytest.mark.parametrize("name", ["e2b_odd_donors_sharded", "per_layer_ungated"])
def test_stored_models(name):
    assert_all_in_place(FOLDER / name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_small_models(tmp_path, kind):
    write(tmp_path, CONFIGS[kind])
    assert_all_in_place(tmp_path)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("size", [4_000, 200])
@pytest.mark.parametrize("kind", ["per_layer_inputs", "experts"])
def test_a_weight_assembled_on_the_device_is_the_same(tmp_path, kind, size, backend, monkeypatch):
    """As large weights are. The smaller the pieces, the further in a weight is cut: between
    heads, or inside them. The two backends transpose in different ways."""
    write(tmp_path, CONFIGS[kind])
    expected = load(tmp_path), load(tmp_path, dtype="bfloat16")
    monkeypatch.setattr(reading, "SMALL", 0)
    monkeypatch.setattr(reading, "PIECE", size)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert same_bits(load(tmp_path), expected[0])
    if size == 4_000:
        assert same_bits(load(tmp_path, dtype="bfloat16"), expected[1])


@pytest.mark.parametrize("name", ["e2b_odd_donors_sharded", "per_layer_ungated"])
def test_logits_of_stored_models(name):
    """What these two are there for: shards, odd donors, KV heads that per_layer_config gives."""
    expected = np.load(FOLDER / name / "expected.npz")
    ids = np.concatenate([expected["prompt_ids"], expected["continuation_ids"]])[None]
    config = GemmaConfig.from_json(FOLDER / name)
    logits, _ = step(load(FOLDER / name), config, ids.astype(np.int32), None)
    np.testing.assert_allclose(logits[0], expected["logits_all"], atol=2.5e-3, rtol=0)


# Which files and names


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_shards(tmp_path, kind, shards):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    write(tmp_path / "one", CONFIGS[kind])
    write_sharded(tmp_path / "many", CONFIGS[kind], shards)
    assert same_bits(load(tmp_path / "one"), load(tmp_path / "many"))


def test_names_of_the_whole_model_and_what_is_skipped(tmp_path):
    """The published prefix, other modalities, and the K/V weights of borrowing layers."""
    config = CONFIGS["per_layer_inputs"]
    tensors = write(tmp_path, config)
    expected = load(tmp_path)
    others = {
        "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight": np.ones(
            (3, 2), np.float32
        ),
        "model.embed_vision.embedding_projection.weight": np.ones((2,), np.float16),
        "model.audio_tower.nothing": np.ones((0, 3), np.int8),
        "model.embed_audio.x.y": np.ones((), np.float64),
        "model.vision_embedder.patch.weight": np.ones((1,), np.uint8),
        "model.language_model.layers.2.self_attn.k_proj.weight": np.ones((5, 5), np.float32),
        "model.language_model.layers.2.self_attn.v_proj.weight": np.ones((5,), np.float32),
        "model.language_model.layers.3.self_attn.k_norm.weight": np.ones((1,), np.float32),
    }
    renamed = with_prefix(tensors, "model.language_model.", tensors)
    save_file(renamed | others, tmp_path / "model.safetensors")
    assert same_bits(load(tmp_path), expected)


def test_shards_may_be_links(tmp_path):
    """As in the hub's cache, where a folder holds links into a folder of blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "folder").mkdir()
    write(tmp_path / "blobs", DENSE)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "folder" / name).symlink_to(tmp_path / "blobs" / name)
    assert same_bits(load(tmp_path / "folder"), load(tmp_path / "blobs"))


# Dtypes


@pytest.mark.parametrize("kind", CONFIGS)
def test_float32_to_bfloat16_and_back(tmp_path, kind):
    tensors = write(tmp_path, CONFIGS[kind])
    exact = load(tmp_path)
    rounded = load(tmp_path, dtype="bfloat16")
    assert same_bits(rounded, jax.tree.map(lambda x: np.asarray(x).astype(BF16), exact))
    halves = {name: values.astype(BF16) for name, values in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors")
    assert same_bits(load(tmp_path, dtype="bfloat16"), rounded)
    widened = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), rounded)
    assert same_bits(load(tmp_path), widened)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_one_weight_in_different_dtypes(tmp_path, dtype):
    tensors = write(tmp_path, DENSE)
    mixed = {
        name: values.astype(BF16) if "k_proj" in name or "gate_proj" in name else values
        for name, values in tensors.items()
    }
    as_float32 = {name: np.asarray(values, np.float32) for name, values in mixed.items()}
    save_file(as_float32, tmp_path / "model.safetensors")
    expected = load(tmp_path, dtype=dtype)
    save_file(mixed, tmp_path / "model.safetensors")
    assert same_bits(load(tmp_path, dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    tensors = write(tmp_path, DENSE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "model.norm.weight has dtype" in message and "BF16, F32" in message


# What is wrong


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_everything_that_does_not_fit_is_in_one_error(tmp_path, prefix):
    tensors = write(tmp_path, DENSE)
    tensors = with_prefix(tensors, prefix, tensors)
    for name in (
        "embed_tokens.weight",
        "layers.1.self_attn.q_proj.weight",
        "layers.0.layer_scalar",
    ):
        del tensors[prefix + name]
    tensors[prefix + "norm.weight"] = np.ones((41,), np.float32)
    tensors[prefix + "layers.0.mlp.down_proj.weight"] = np.ones((56, 40), np.float32)  # transposed
    tensors[prefix + "layers.1.input_layernorm.weight"] = np.ones((0,), np.float32)
    tensors[prefix + "layers.1.self_attn.v_proj.weight"] = np.ones((2, 2), np.float32)
    tensors[prefix + "layers.2.layer_scalar"] = np.ones((1,), np.float32)
    tensors["lm_head.weight"] = np.ones((96, 40), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "(9 problems)" in message
    for line in (
        f"missing {prefix}embed_tokens.weight [96, 40]",
        f"missing {prefix}layers.1.self_attn.q_proj.weight [144, 40]",
        f"missing {prefix}layers.0.layer_scalar [1]",
        f"{prefix}norm.weight has shape [41], the configuration gives [40]",
        f"{prefix}layers.0.mlp.down_proj.weight has shape [56, 40], the configuration gives "
        "[40, 56]",
        f"{prefix}layers.1.input_layernorm.weight has shape [0], the configuration gives [40]",
        f"unexpected {prefix}layers.1.self_attn.v_proj.weight [2, 2]",
        f"unexpected {prefix}layers.2.layer_scalar [1]",
        "unexpected lm_head.weight [96, 40]",
    ):
        assert message.count(f"\n  {line}") == 1


def test_two_prefixes_in_one_file(tmp_path):
    tensors = write(tmp_path, DENSE)
    twice = with_prefix(tensors, "model.language_model.", ["model.norm.weight"])
    save_file(tensors | twice, tmp_path / "model.safetensors")
    assert "unexpected model.language_model.norm.weight" in refusal(tmp_path)


def test_a_truncated_file(tmp_path):
    write(tmp_path, DENSE)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        assert "model.safetensors" in refusal(tmp_path)
    file.write_bytes(content + b"\0")
    assert "model.safetensors" in refusal(tmp_path)


def test_a_shape_that_lies_about_its_bytes(tmp_path):
    write(tmp_path, DENSE)
    header, data = split_file((tmp_path / "model.safetensors").read_bytes())
    header["model.norm.weight"]["shape"] = [41]
    (tmp_path / "model.safetensors").write_bytes(join_file(header, data))
    assert "model.norm.weight" in refusal(tmp_path)


OUTSIDE = "../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", ".", "", "x\0.safetensors"
NO_NAMES = None, 5, ["model-00001-of-00002.safetensors"], {"a": "b"}, True


@pytest.mark.parametrize("shard", [*OUTSIDE, "a\\b.safetensors", "model.bin", *NO_NAMES], ids=repr)
def test_an_index_that_points_elsewhere(tmp_path, shard):
    folder = tmp_path / "folder"
    folder.mkdir()
    weight_map = write_sharded(folder, DENSE)
    whole = tmp_path / "x.safetensors"  # where "../x.safetensors" is
    save_file(raw_tensors(folder), whole)
    write_index(folder, weight_map | {"model.norm.weight": shard})
    message = refusal(folder)
    assert "index.json places model.norm.weight in" in message and "same folder" in message


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"metadata": {}}', "[" * 100_000]
    + [f'{{"weight_map": {value}}}' for value in ("[]", "{}", '"a"', "null")],
    ids=lambda content: repr(content[:20]),
)
def test_an_index_that_is_none(tmp_path, content):
    write_sharded(tmp_path, DENSE)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "index.json" in refusal(tmp_path)


def test_shards_that_are_not_there(tmp_path):
    weight_map = write_sharded(tmp_path, DENSE, 3)
    for i in (1, 3):
        (tmp_path / f"model-0000{i}-of-00003.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in message
    write_index(tmp_path, dict.fromkeys(weight_map, "x" * 5_000 + ".safetensors"))
    assert "lacks the shards" in refusal(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    weight_map = write_sharded(tmp_path, DENSE)
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, shard in weight_map.items() if shard == first)
    both = load_file(tmp_path / first)
    save_file(load_file(tmp_path / second) | {moved: both[moved]}, tmp_path / second)
    for named in (weight_map, {n: s for n, s in weight_map.items() if n != moved}):
        write_index(tmp_path, named)
        message = refusal(tmp_path)
        assert moved in message and second in message


def test_a_tensor_that_its_shard_lacks(tmp_path):
    weight_map = write_sharded(tmp_path, DENSE)
    name, shard = next(iter(weight_map.items()))
    other = next(other for other in weight_map.values() if other != shard)
    write_index(tmp_path, weight_map | {name: other})
    message = refusal(tmp_path)
    assert name in message and shard in message
    write_index(tmp_path, weight_map | {"model.extra": next(iter(weight_map.values()))})
    assert "model.extra" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "y.pkl"]
)
def test_pickle_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    message = refusal(tmp_path)
    assert name in message and "pickle" in message and "safetensors" in message


@pytest.mark.parametrize("present", [[], ["config.json"], ["model-00001-of-00002.safetensors"]])
def test_folders_without_weights(tmp_path, present):
    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_params(tmp_path, GemmaConfig.from_dict(DENSE))


def test_no_folder(tmp_path):
    write(tmp_path, DENSE)
    for path in (tmp_path / "model.safetensors", tmp_path / "nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            load_params(path, GemmaConfig.from_dict(DENSE))


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    write(tmp_path, DENSE)
    read_header = loading.read_header

    def read_and_cut(file):
        infos = read_header(file)
        file.write_bytes(file.read_bytes()[:-50])
        return infos

    monkeypatch.setattr(loading, "read_header", read_and_cut)
    assert "ended early" in refusal(tmp_path)


def test_the_bar_is_silent_where_it_should_be(tmp_path, capsys):
    write(tmp_path, DENSE)
    config = GemmaConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    for progress in (True, False):  # neither writes: this is no terminal
        load_params(tmp_path, config, progress=progress)
    assert capsys.readouterr() == ("", "")
