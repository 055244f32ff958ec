"""gated_gelu against float64; the Mosaic kernel in the interpreter, and lowered for an H200."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, gated_gelu
from pallas_kernels.gated_gelu import mosaic, xla


def draw(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 2, dtype)


def expected(y) -> np.ndarray:
    gate, up = np.moveaxis(np.asarray(y, np.float64), -2, 0)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def assert_close(actual, wanted, dtype):
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    actual = np.asarray(actual, np.float64)
    # 1 + tanh(x) loses what is below 2^-24 of 1, times gate and up
    limit = unit * np.abs(wanted) + 1e-5
    assert (np.abs(actual - wanted) <= limit).all(), np.abs(actual - wanted).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(2, 40), (3, 2, 40), (2, 3, 2, 7)], ids=str)
def test_xla_against_float64(shape, dtype):
    y = draw(shape, dtype)
    out = gated_gelu(y, implementation="xla")
    assert out.dtype == dtype
    assert_close(out, expected(y), dtype)


@pytest.mark.parametrize("F", [768, 832])
def test_mosaic_interpreted(F):
    """Of 832, two blocks write 192 columns: the same numbers, but for a race all the same."""
    y = draw((2, 3, 2, F))
    interpret = plgpu.InterpretGPUParams(detect_races=F % mosaic.COLUMNS == 0)
    out = mosaic.gated_gelu(y, interpret=interpret)
    assert out.shape == (2, 3, F)
    assert_close(out, expected(y), "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_product_in_pieces(implementation):
    y = draw((3, 2, 256))
    pieces = np.random.default_rng(1).standard_normal((2, *y.shape))
    pieces = np.stack([*pieces, np.asarray(y, np.float64) - pieces.sum(0)])
    whole = PartialSums(jnp.asarray(pieces, jnp.float32), jnp.bfloat16)
    op, more = xla.gated_gelu, {}
    if implementation == "mosaic":
        op, more = mosaic.gated_gelu, {"interpret": plgpu.InterpretGPUParams()}
    assert_close(op(whole, **more), expected(y), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("F", [21504, 15360, 10240, 6144, 2112])
@pytest.mark.parametrize("M", [1, 4, 64])
def test_mosaic_on_a_gpu(M, F):
    y = draw((M, 2, F))
    out = gated_gelu(y, implementation="mosaic")
    assert_close(out, expected(y), "bfloat16")


@pytest.mark.parametrize("F", [21504, 15360, 12288, 10240, 6144, 2112])
def test_lowers_for_an_h200_at_the_published_widths(F):
    y = jax.ShapeDtypeStruct((1, 1, 2, F), jnp.bfloat16)
    run = functools.partial(gated_gelu, implementation="mosaic")
    assert "mosaic_gpu" in lower_for_h200(run, y)


def test_what_the_kernel_cannot_take():
    interpret = plgpu.InterpretGPUParams()
    for y, message in (
        (draw((2, 256), "float32"), "float32"),
        (draw((2, 352)), "multiple of 64"),
        (draw((2, 192)), "from 256 on"),
        (draw((65, 2, 256)), "64 rows"),
    ):
        with pytest.raises(Unsupported, match=message):
            mosaic.gated_gelu(y, interpret=interpret)


def test_two_halves_are_needed():
    with pytest.raises(ValueError, match=r"y \(3, 8\) must be"):
        gated_gelu(draw((3, 8)))
