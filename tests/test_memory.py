"""Bytes of weights, state and decode steps: against real arrays, and the published sizes."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import small_model
from fixture_models import each_model, model
from random_checkpoints import tensor_shapes

from carat_jax import checkpoint, sharding
from carat_jax.config import PRESETS, ConfigError
from carat_jax.gemma import load
from carat_jax.kv_state import init_state, state_bytes
from carat_jax.memory import READ_BANDWIDTH, memory_estimate, step_bytes
from carat_jax.params import param_bytes

# By preset: parameters without those that are never used; bytes that a token adds to the global
# caches; bytes of the rings when they are as long as the window. From the published table.
SIZES = {
    "e2b": (4_647_449_891 - 18_880_512, 6_144, 12 * 512 * 2 * 256 * 2),
    "e4b": (7_518_069_034 - 55_055_616, 16_384, 20 * 512 * 2 * 2 * 256 * 2),
    "12b": (11_907_350_320, 10_240, 335_544_320),
    "26b-a4b": (25_233_141_790, 12_800, 209_715_200),
    "31b": (30_697_345_340, 51_200, 838_860_800),
}
each_preset = pytest.mark.parametrize("name", SIZES)


@each_model
@pytest.mark.parametrize(("batch", "context"), [(1, 64), (3, 100), (2, 129)])
def test_the_estimate_is_the_sum_of_real_arrays(name, batch, context):
    m = model(name)
    state = init_state(m.config, batch, context)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves((m.params, state)))
    assert memory_estimate(m.config, batch, context) == real


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_counts(dtype):
    config = dataclasses.replace(small_model.CONFIG, dtype=dtype)
    weights = [
        np.dtype(np.float32).itemsize * leaf.size for leaf in jax.tree.leaves(small_model.params())
    ]
    share = {"bfloat16": 2, "float32": 1}[dtype]
    state = init_state(config, 2, 200)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory_estimate(config, 2, 200) == sum(weights) // share + real


@each_preset
def test_the_published_sizes(name):
    parameters, per_token, rings = SIZES[name]
    config = PRESETS[name]
    assert state_bytes(config, 1, 64 * 101) - state_bytes(config, 1, 64 * 100) == 64 * per_token
    lengths = 4  # int32
    assert state_bytes(config, 1, 64, slack=0) == rings + 64 * per_token + lengths
    weights = 2 * parameters
    estimate = memory_estimate(config, 4, 32_768)
    assert estimate == weights + state_bytes(config, 4, 32_768)
    # By default a ring has 64 slots more than the window.
    ring = rings + rings // config.sliding_window * 64
    assert estimate == weights + 4 * (ring + 32_768 * per_token + lengths)


@each_preset
def test_the_estimate_takes_what_a_state_takes(name):
    config = PRESETS[name]
    longest = config.max_position_embeddings
    assert memory_estimate(config, 1, longest) > memory_estimate(config, 1, longest - 64)
    assert memory_estimate(config, 1, 65) == memory_estimate(config, 1, 128)
    with pytest.raises(ConfigError, match=f"max_context {longest + 1:,} exceeds"):
        memory_estimate(config, 1, longest + 1)
    for batch, context in ((0, 64), (1, 0), (-1, 64)):
        with pytest.raises(ValueError, match="must be at least 1"):
            memory_estimate(config, batch, context)


# --- Decode steps --------------------------------------------------------------------------------


@each_preset
def test_a_step_reads_the_keys_in_sight(name):
    _, per_token, rings = SIZES[name]
    config = PRESETS[name]
    W = config.sliding_window
    assert step_bytes(config, 1, 8192).kv == rings + 8192 * per_token
    assert step_bytes(config, 3, 8192).kv == 3 * (rings + 8192 * per_token)
    assert step_bytes(config, 1, W).kv == rings + W * per_token
    assert step_bytes(config, 1, 1).kv == rings // W + per_token


def test_a_step_of_a_dense_model_reads_all_weights_once():
    for batch in (1, 8):
        read = step_bytes(PRESETS["31b"], batch, 8192)
        assert (read.weights, read.experts) == (2 * SIZES["31b"][0], 0)
        assert read.total == read.weights + read.kv
    # 13.1 ms for the weights and 0.3 ms for keys and values
    floor = step_bytes(PRESETS["31b"], 1, 8192).floor_s(READ_BANDWIDTH["NVIDIA H200"])
    assert floor == pytest.approx(13.36e-3, abs=0.02e-3)


def test_a_step_of_a_mixture_reads_the_experts_that_its_rows_visit():
    config = PRESETS["26b-a4b"]
    embedding = config.vocab_size * config.hidden_size
    active, every = 3_084_333_086, 22_837_985_280
    one = step_bytes(config, 1, 1024)
    assert one.weights + one.experts == 2 * (active + embedding)
    for batch, share in ((1, 8 / 128), (2, 16 / 128), (16, 1), (500, 1)):
        assert step_bytes(config, batch, 1024).experts == 2 * every * share
        assert step_bytes(config, batch, 1024).weights == one.weights


@pytest.mark.parametrize("name", ["e2b", "e4b"])
def test_a_step_looks_up_one_row_of_the_per_layer_table(name):
    config = PRESETS[name]
    row = config.num_hidden_layers * config.hidden_size_per_layer_input
    for batch in (1, 8):
        read = step_bytes(config, batch, 1024).weights
        assert read == 2 * (SIZES[name][0] - config.vocab_size * row + batch * row)


def test_parameters_are_those_of_the_published_tensors():
    """Counted once more, from the names and shapes of a checkpoint."""
    for name, (parameters, _, _) in SIZES.items():
        raw = json.loads((Path(__file__).parent / f"configs/{name}.json").read_text())
        text = raw.get("text_config", raw)
        shapes = tensor_shapes(text, "")
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters


# --- On a mesh -----------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_every_published_size_is_cut_for_every_number_of_devices(name, devices):
    config, plan = PRESETS[name], sharding.planned(devices)
    sharding.check(config, plan)
    share = param_bytes(config, plan) / param_bytes(config)
    # On every device: norms, routers, gates of the layers' inputs, keys that are repeated.
    assert 1 / devices <= share < 1 / devices + 0.03
    read = step_bytes(config, 1, 8192, plan)
    assert read.total < step_bytes(config, 1, 8192).total * (1 / devices + 0.06)


def test_31b_on_eight_devices():
    """Its global layers have 4 KV heads: each is on two devices, its weights too."""
    config, (parameters, per_token, rings) = PRESETS["31b"], SIZES["31b"]
    plan = sharding.planned(8)
    D, H, layers = 5376, 512, 10
    on_each = 60 * (4 * D + 1) + 50 * 2 * 256 + layers * 2 * H + D
    repeated = layers * 4 * D * H
    assert param_bytes(config, plan) == 2 * ((parameters - on_each + repeated) // 8 + on_each)
    rings += rings // 1024 * 64
    assert state_bytes(config, 1, 6400, mesh=plan) == rings // 8 + 6400 * per_token // 4 + 4
    assert memory_estimate(config, 1, 6400, mesh=plan) == param_bytes(config, plan) + state_bytes(
        config, 1, 6400, mesh=plan
    )


@pytest.mark.parametrize(
    ("gigabytes", "advice"),
    [(40, "take 2 "), (18, "take 4 "), (9, "take 8 "), (1, "choose a smaller model")],
)
def test_too_little_memory_is_refused_before_anything_is_read(
    gigabytes, advice, monkeypatch, tmp_path
):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": gigabytes * 10**9}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(checkpoint, "load_params", lambda *_, **__: pytest.fail("it was read"))
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["31b"].to_dict()))
    with pytest.raises(ValueError, match=rf"take 62\.\d\d GB on the device, which has.*{advice}"):
        load(tmp_path)
