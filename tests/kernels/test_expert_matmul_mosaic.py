"""expert_matmul's kernel for Hopper: interpreted on CPU, and lowered for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_expert_matmul import INDICES, assert_accurate, both_forms, expected, inputs

from pallas_kernels import Unsupported
from pallas_kernels.expert_matmul import expert_matmul, mosaic

BF16 = jnp.bfloat16

# Interpreting takes seconds: the cases that differ for the kernel. On a GPU
# `test_expert_matmul` runs it through all of them.
INTERPRETED = (
    "one row",
    "one token",
    "together but not in order",
    "more rows than tiles",
    "decode of a batch",
    "prefill",
)


@functools.partial(jax.jit, static_argnames="absent")
def interpreted(x: jax.Array, w: jax.Array, index: jax.Array, absent: bool) -> jax.Array:
    params = plgpu.InterpretGPUParams()
    return mosaic.expert_matmul(x, w, index, absent=absent, interpret=params)


def run(x: np.ndarray, w: np.ndarray, index: np.ndarray, absent: bool = False) -> np.ndarray:
    arguments = jnp.asarray(x, BF16), jnp.asarray(w, BF16), jnp.asarray(index, jnp.int32)
    out = interpreted(*arguments, absent=absent)
    return np.asarray(out, np.float32)


@both_forms
@pytest.mark.parametrize("case", INTERPRETED)
def test_each_row_meets_its_own_matrix(case, gated):
    E, index = INDICES[case]
    x, w, index = inputs(index, E, "bfloat16", gated)
    assert_accurate(run(x, w, index), expected(x, w, index), "bfloat16")


def test_rows_without_a_matrix_leave_the_others_alone():
    E, index = INDICES["more rows than tiles"]
    x, w, index = inputs(index, E, "bfloat16", gated=True)
    there = index < E - 1
    x[~there] = np.nan
    out = run(x, w[:-1], index, absent=True)
    assert_accurate(out[there], expected(x[there], w, index[there]), "bfloat16")


@both_forms
def test_a_row_gets_the_same_bits_for_any_number_of_rows(gated):
    E, index = 6, np.repeat(np.arange(6), 6)
    x, w, index = inputs(index, E, "bfloat16", gated)
    all_rows = run(x, w, index)
    for some in ([5], [0, 13, 35], range(1, 36, 5), range(20)):
        some = list(some)
        np.testing.assert_array_equal(run(x[some], w, index[some]), all_rows[some])


@both_forms
@pytest.mark.parametrize("n", [1, 8, 11])
def test_one_row_for_all_matrices(n, gated):
    """With more of them than a tile has rows, too; to the bit what as many equal rows give."""
    x, w, index = inputs(np.random.default_rng(n).permutation(12)[:n], 12, "bfloat16", gated)
    out = run(x[:1], w, index)
    assert_accurate(out, expected(np.repeat(x[:1], n, 0), w, index), "bfloat16")
    np.testing.assert_array_equal(out, run(np.repeat(x[:1], n, 0), w, index))


@pytest.mark.parametrize("shape", [(128, 2816, 2, 704), (128, 2816, 704)], ids=["gated", "plain"])
def test_one_row_for_the_experts_of_a_token_is_not_copied(shape):
    text = lower_for_h200(
        functools.partial(expert_matmul, implementation="mosaic"),
        jax.ShapeDtypeStruct((1, 2816), BF16),
        jax.ShapeDtypeStruct(shape, BF16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "tensor<8x2816xbf16>" not in text


# One token to a batch of 64, and a prefill chunk, through both products of 26B-A4B.
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 64, 2048])
@pytest.mark.parametrize("shape", [(128, 2816, 2, 704), (128, 704, 2816)], ids=["gate_up", "down"])
def test_lowers_for_an_h200(tokens, shape):
    n = tokens * 8
    text = lower_for_h200(
        functools.partial(expert_matmul, implementation="mosaic"),
        jax.ShapeDtypeStruct((n, shape[1]), BF16),
        jax.ShapeDtypeStruct(shape, BF16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("x", "w", "dtype", "named"),
    [
        ((8, 128), (4, 128, 64), jnp.float32, "float32"),
        ((8, 96), (4, 96, 64), BF16, r"\(4, 96, 64\): D must be a multiple of 64"),
        ((8, 128), (4, 128, 2, 96), BF16, r"\(4, 128, 2, 96\).* F of 64"),
    ],
)
def test_what_the_kernel_cannot_take_is_unsupported(x, w, dtype, named):
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w)]
    with pytest.raises(Unsupported, match=named):
        lower_for_h200(mosaic.expert_matmul, *arrays, jax.ShapeDtypeStruct(x[:1], jnp.int32))


def test_without_a_hopper_gpu_it_is_unsupported():
    if str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9."):
        pytest.skip("there is one here")
    with pytest.raises(Unsupported, match="Hopper"):
        expert_matmul(
            jnp.zeros((8, 128), BF16),
            jnp.zeros((4, 128, 64), BF16),
            jnp.zeros(8, jnp.int32),
            implementation="mosaic",
        )
