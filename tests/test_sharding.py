"""Models on meshes: in processes that have several devices, and what needs none."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import H200
from jax.sharding import AbstractMesh, AxisType

import carat_jax as carat
from carat_jax import sharding
from carat_jax.config import FULL, PRESETS, SLIDING, ConfigError
from carat_jax.kv_state import abstract_state
from carat_jax.model import forward
from carat_jax.params import abstract_params

HERE = Path(__file__).parent
DENSE = HERE / "fixtures" / "dense_31b_like"


# --- In processes of their own -------------------------------------------------------------------


def test_on_eight_devices(request):
    """Runs `tests/sharding`; with the same markers as this run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sharding"]
    markers = request.config.option.markexpr
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [*command, "-m", markers],
        cwd=HERE.parent,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


# On a real network it takes a device of each process for the other's.
@pytest.mark.parametrize(
    ("data", "cut", "new"),
    [(2, 2, 1), pytest.param(1, 4, 12, marks=pytest.mark.slow)],
)
def test_two_processes_run_one_model(data, cut, new):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [sys.executable, str(HERE / "sharding" / "one_of_two.py")]
    running = [
        subprocess.Popen(
            [*script, str(port), str(process), str(data), str(cut), str(new)],
            cwd=HERE.parent,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        ends = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    expected = np.load(DENSE / "expected.npz")["continuation_ids"][:new].tolist()
    for process, (out, err) in zip(running, ends, strict=True):
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == [expected] * 2


# --- Meshes that cannot be -----------------------------------------------------------------------


def test_sizes_that_do_not_divide_are_named():
    message = (
        r"model = 3 does not divide the model's num_attention_heads 32, vocab_size 262,144, "
        r"num_key_value_heads 16, num_global_key_value_heads 4: take model = 1 or 2$"
    )
    with pytest.raises(ConfigError, match=message):
        sharding.check(PRESETS["31b"], sharding.planned(3))
    with pytest.raises(ValueError, match="0 devices: it must be at least 1"):
        sharding.planned(0)
    with pytest.raises(ValueError, match="data = 0, model = 1: each must be at least 1"):
        carat.mesh(data=0)
    with pytest.raises(ValueError, match=r"takes 512 devices, and there are \d+"):
        carat.mesh(data=2, model=256)
    other = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"axes \('x',\): make it with carat\.mesh"):
        carat.load(DENSE, mesh=other, progress=False)


# --- Kernels -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "left_out"),
    [("31b", 2, 0), ("31b", 4, 0), ("31b", 8, 1), ("26b-a4b", 4, 2), ("e4b", 4, 5)],
)
def test_a_step_is_lowered_with_its_kernels_for_several_h200s(name, devices, left_out):
    """One layer of each kind. Products that become too small for a kernel are left to XLA."""
    kinds = (SLIDING, FULL)
    shared = kinds if PRESETS[name].num_kv_shared_layers else ()
    config = dataclasses.replace(
        PRESETS[name],
        num_hidden_layers=len(kinds + shared),
        layer_types=kinds + shared,
        num_kv_shared_layers=len(shared),
    )

    def lowered(devices: int) -> str:
        mesh = AbstractMesh(
            (1, devices),
            ("data", "model"),
            axis_types=(AxisType.Auto,) * 2,
            abstract_device=H200.abstract_device,
        )
        params, state = abstract_params(config, mesh), abstract_state(config, 1, 8192, mesh=mesh)
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        traced = jax.jit(forward, static_argnames="config").trace(params, config, token, state)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    text, kernels = lowered(devices), "custom_call @mosaic_gpu"
    assert text.count("stablehlo.all_reduce") == 2 * config.num_hidden_layers + 1
    assert text.count(kernels) == lowered(1).count(kernels) - left_out
