"""Checkpoints on eight devices: each has its part, in every form and on every mesh."""

import jax
import numpy as np
import pytest
from fixture_models import FOLDER, NAMES, model
from jax.sharding import PartitionSpec as P
from on_mesh import on_mesh
from random_checkpoints import FULL, SLIDING, config_json, write

import carat_jax as carat
from carat_jax.checkpoint import convert, reading
from carat_jax.config import GemmaConfig
from carat_jax.model import Params
from carat_jax.params import abstract_params

# Of the sliding layer 2 KV heads, of the global layer one, for up to four devices.
SMALL = config_json(
    layer_types=[SLIDING, FULL, FULL],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    head_dim=8,
    global_head_dim=16,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=12,
)


def assert_same(got: Params, expected: Params) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert mine.device == other.device
            np.testing.assert_array_equal(mine.data, other.data)


def load(folder, config: GemmaConfig, mesh) -> Params:
    return carat.load_params(folder, config, mesh=mesh, progress=False)


@pytest.mark.parametrize("size", [None, 500])
def test_every_device_has_its_part_and_no_byte_is_read_twice(tmp_path, size, monkeypatch):
    """In pieces of 500 bytes as large weights are, else as small ones."""
    tensors = write(tmp_path, SMALL)
    config = GemmaConfig.from_dict(SMALL)
    whole, mesh = load(tmp_path, config, None), carat.mesh(data=2, model=4)
    if size:
        monkeypatch.setattr(reading, "SMALL", 0)
        monkeypatch.setattr(reading, "PIECE", size)
    count, read_box = [], reading.read_box
    monkeypatch.setattr(
        reading, "read_box", lambda *args: count.append(args[-1].nbytes) or read_box(*args)
    )
    assert_same(load(tmp_path, config, mesh), on_mesh(whole, mesh))
    if not size:  # pieces of one size overlap
        assert sum(count) == sum(values.nbytes for values in tensors.values())


def test_every_copy_of_a_kv_head_is_that_head(tmp_path):
    """Query heads in their order, on four devices, beside the one key of a global layer."""
    raw = {name.removeprefix("model."): x for name, x in write(tmp_path, SMALL).items()}
    config = GemmaConfig.from_dict(SMALL)
    attention = load(tmp_path, config, carat.mesh(model=4))["layers_1"]["attention"]
    q, k, o = (raw[f"layers.1.self_attn.{name}_proj.weight"] for name in "qko")
    for device in range(4):
        head = slice(16 * device, 16 * (device + 1))
        mine = attention["qkv"].addressable_shards[device].data
        np.testing.assert_array_equal(mine[:, 0, 0], q[head].T)
        np.testing.assert_array_equal(mine[:, 0, 1], k.T)
        np.testing.assert_array_equal(
            attention["o"].addressable_shards[device].data[0, 0], o[:, head].T
        )


def test_what_one_mesh_wrote_another_reads(tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", SMALL)
    config = GemmaConfig.from_dict(SMALL)
    convert(tmp_path / "source", tmp_path / "made", mesh=carat.mesh(model=4), progress=False)
    for mesh in (None, carat.mesh(model=2), carat.mesh(data=2, model=4)):
        assert_same(load(tmp_path / "made", config, mesh), load(tmp_path / "source", config, mesh))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "dense_31b_like" else pytest.mark.slow)
    for name in NAMES
])  # fmt: skip
@pytest.mark.parametrize("axes", [(2, 4), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_the_estimate_is_what_each_device_holds(name, axes):
    config, mesh = model(name).config, carat.mesh(data=axes[0], model=axes[1])
    params = load(FOLDER / name, config, mesh)
    shapes = abstract_params(config, mesh)
    for leaf, shape in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
        assert leaf.shape == shape.shape and leaf.sharding == shape.sharding
    state = carat.init_state(config, 4, 100, mesh=mesh)
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves((params, state)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {carat.memory_estimate(config, 4, 100, mesh=mesh)}


@pytest.mark.parametrize("rows", [1, 4])  # of which two groups of devices share four only
@pytest.mark.parametrize("axes", [(2, 4), (2, 1)])
def test_an_empty_state_lies_where_it_was_planned(axes, rows):
    config, mesh = GemmaConfig.from_dict(SMALL), carat.mesh(data=axes[0], model=axes[1])
    state = carat.init_state(config, rows, 100, mesh=mesh)
    cut = ("data",) if rows == 4 else ()
    assert state.length.sharding.spec == P(*cut)
    for x in jax.tree.leaves(state.layers):
        assert x.sharding.spec == P(*(cut or (None,)), "model")
        assert x.sharding.mesh == mesh and not x.any()


@pytest.mark.slow
def test_random_weights_are_those_of_one_device():
    config, mesh = GemmaConfig.from_dict(SMALL), carat.mesh(model=4)
    alone = carat.init_params(config, jax.random.key(1))
    assert_same(carat.init_params(config, jax.random.key(1), mesh), on_mesh(alone, mesh))


def test_no_weights_for_more_devices_than_heads():
    with pytest.raises(carat.ConfigError, match="model = 8 does not divide the model's num_attent"):
        load(FOLDER / "e2b_like", model("e2b_like").config, carat.mesh(model=8))
    with pytest.raises(ValueError, match="takes 16 devices, and there are 8"):
        carat.mesh(model=16)
