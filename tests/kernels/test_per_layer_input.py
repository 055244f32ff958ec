"""per_layer_input against float64; its kernels in the interpreter, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, per_layer_input, row_norm
from pallas_kernels.per_layer_input import IMPLEMENTATIONS, mosaic

EPS = 1e-6
BF16 = jnp.dtype(jnp.bfloat16)
LAYERS, LAYER = 3, 1
# D, pieces of y as the product before leaves it on 132 multiprocessors: E4B, E2B.
PUBLISHED = [(2560, 7), (1536, 8)]
# On a GPU XLA leaves out the roundings in between, and it is XLA that the interpreter runs on.
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")


def inputs(M: int, D: int, pieces: int = 1, P: int = 256, dtype: str = "bfloat16") -> list:
    """h, y, w, gate, inputs, projection."""
    rng = np.random.default_rng(5)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    y = draw(M, D)
    if pieces > 1:
        parts = rng.standard_normal((pieces, M, D))
        y = PartialSums(jnp.asarray(parts, jnp.float32), jnp.dtype(dtype))
    gate, projection = draw(D, P, scale=D**-0.5), draw(P, D)
    return [draw(M, D), y, draw(D), gate, draw(M, LAYERS, P), projection]


def expected(h, y, w, gate, inputs, projection):
    """float64, rounded where the contract rounds."""
    dtype = h.dtype

    def rounded(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    y = rounded(np.asarray(y.parts, np.float64).sum(0)) if isinstance(y, PartialSums) else y
    h, y, w, gate, inputs, projection = (
        np.asarray(x, np.float64) for x in (h, y, w, gate, inputs, projection)
    )
    h = rounded(h + rounded(y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * w))
    g = rounded(h @ gate)
    g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    return h, rounded(g * inputs[:, LAYER]) @ projection


def assert_close(actual, wanted, dtype):
    """What falls on the other side of a rounding is one of many addends of what follows."""
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-18
    for a, w in zip(actual, wanted, strict=True):
        assert a.dtype == dtype and a.shape == w.shape
        a = np.asarray(a, np.float64)
        np.testing.assert_allclose(a, w, rtol=0, atol=unit * np.abs(w).max())


def simulated(arrays, blocks):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    more = {"blocks": blocks, "interpret": interpret}
    return mosaic.per_layer_input(*arrays, layer=LAYER, eps=EPS, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "pieces"), [(1, 1), (5, 3)])
def test_none_against_float64(dtype, M, pieces):
    arrays = inputs(M, 192, pieces, P=10, dtype=dtype)
    assert_close(per_layer_input(*arrays, layer=LAYER, eps=EPS), expected(*arrays), dtype)


# One warpgroup whose widths are two tiles, and two that meet, for three rows one after another.
@on_a_cpu
@pytest.mark.parametrize(("M", "pieces", "parts"), [(1, 1, 1), (3, 2, 8)])
def test_mosaic_interpreted(monkeypatch, M, pieces, parts):
    monkeypatch.setattr(row_norm, "MOST_PARTS", parts)
    arrays = inputs(M, 512, pieces)
    assert_close(simulated(arrays, blocks=9), expected(*arrays), "bfloat16")


@on_a_cpu
def test_a_row_has_the_same_bits_among_others():
    """Of three, dealt out to blocks that have two rows and blocks that have one."""
    h, y, *weights, others, projection = arrays = inputs(3, 256)
    together = simulated(arrays, blocks=10)
    assert_close(together, expected(*arrays), "bfloat16")
    alone = simulated((h[2:], y[2:], *weights, others[2:], projection), blocks=10)
    for among, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(among[2:], one)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 5, 8, 16])
@pytest.mark.parametrize(("D", "pieces"), [*PUBLISHED, (1024, 1)])
def test_mosaic_on_a_gpu(D, pieces, M):
    h, y, w, gate, of_layers, projection = arrays = inputs(M, D, pieces)

    @jax.jit
    def run(h, y, w, gate, of_layers, projection):
        more = {"layer": LAYER, "eps": EPS, "implementation": "mosaic"}
        return per_layer_input(h, y, w, gate, of_layers, projection, **more)

    together = run(*arrays)
    assert_close(together, expected(*arrays), "bfloat16")
    last = jax.tree.map(lambda x: x[..., -1:, :], (h, y))
    alone = run(*last, w, gate, of_layers[-1:], projection)
    for among, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(among[-1:], one)
    for _ in range(20):  # warpgroups that race for memory do not do so every time
        jax.tree.map(np.testing.assert_array_equal, run(*arrays), together)


def lowered(M: int, D: int, pieces: int, P: int, implementation: str | None) -> str:
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(h, y, w, gate, of_layers, projection):
        more = {"layer": LAYER, "eps": EPS, "implementation": implementation}
        return per_layer_input(h, PartialSums(y, BF16), w, gate, of_layers, projection, **more)

    y = struct(pieces, M, D, dtype=jnp.float32)
    more = struct(D, P), struct(M, LAYERS, P), struct(P, D)
    return lower_for_h200(run, struct(M, D), y, struct(D), *more)


@pytest.mark.parametrize("M", [1, 5, 8])
@pytest.mark.parametrize(("D", "pieces"), PUBLISHED)
def test_lowers_for_an_h200_at_the_published_shapes(D, pieces, M):
    text = lowered(M, D, pieces, 256, "mosaic")
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(("M", "P"), [(17, 256), (1, 128)])
def test_what_the_kernels_refuse_is_left_to_xla(M, P):
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]
    text = lowered(M, 512, 2, P, None)
    assert "mosaic_gpu" not in text and "dot_general" in text


@pytest.mark.parametrize(
    ("M", "D", "P", "dtype", "named"),
    [
        (17, 512, 256, "bfloat16", "17 rows: takes up to 16"),
        (1, 384, 256, "bfloat16", "D % 256"),
        (1, 512, 128, "bfloat16", "P = 256"),
        (1, 512, 256, "float32", "float32"),
    ],
)
def test_what_the_kernels_cannot_take_is_unsupported(M, D, P, dtype, named):
    with pytest.raises(Unsupported, match=named):
        simulated(inputs(M, D, P=P, dtype=dtype), blocks=1)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (64,), "must be alike"),
        (1, (2, 64), r"y \(2, 64\)"),
        (2, (63,), r"w \(63,\)"),
        (3, (63, 8), r"gate \(63, 8\)"),
        (4, (1, 8), r"inputs \(1, 8\)"),
        (4, (2, 3, 8), r"inputs \(2, 3, 8\)"),
        (5, (64, 8), r"projection \(64, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, message):
    arrays = inputs(1, 64, P=8, dtype="float32")
    arrays[place] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        per_layer_input(*arrays, layer=LAYER, eps=EPS)


def test_another_dtype_or_layer_is_refused():
    arrays = inputs(1, 64, P=8, dtype="float32")
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match=f"layer {layer} is none of the 3"):
            per_layer_input(*arrays, layer=layer, eps=EPS)
    arrays[5] = arrays[5].astype(BF16)
    with pytest.raises(ValueError, match="projection is bfloat16, h float32"):
        per_layer_input(*arrays, layer=LAYER, eps=EPS)
