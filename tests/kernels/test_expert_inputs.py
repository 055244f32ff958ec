"""expert_inputs against float64; its kernel in the interpreter, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Unsupported, dispatch, expert_inputs, row_norm, summed
from pallas_kernels.expert_inputs import IMPLEMENTATIONS, mosaic, xla

EPS = 1e-6
D, E = 2816, 128  # of 26B-A4B
# On a GPU XLA leaves out the roundings in between, and it is XLA that the interpreter runs on.
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")


def inputs(M: int, D: int, E: int = 64, dtype: str = "bfloat16") -> list[jax.Array]:
    """h, w, scale, router."""
    rng = np.random.default_rng(7)
    shapes = ((M, D), (D,), (D,), (D, E))
    return [jnp.asarray(rng.standard_normal(shape) + 0.1, dtype) for shape in shapes]


def expected(h, w, scale, router):
    """float64, rounded where the contract rounds; and the sums of the logits' absolute addends."""
    dtype = h.dtype
    h, w, scale, router = (np.asarray(x, np.float64) for x in (h, w, scale, router))
    normed = h / np.sqrt((h * h).mean(-1, keepdims=True) + EPS)
    r = normed * scale * h.shape[-1] ** -0.5
    r = np.asarray(jnp.asarray(r, dtype), np.float64)
    return normed * w, r @ router, np.abs(r) @ np.abs(router)


def assert_right(actual, arrays):
    """x within a unit in its last place; what of r falls on the other side of a rounding is off by
    as much, and is few of the addends of a logit."""
    (x, logits), (wanted, products, scale) = actual, expected(*arrays)
    logits = summed(logits)
    assert (x.dtype, logits.dtype) == (arrays[0].dtype, jnp.float32)
    unit, few = (2.0**-8, 1e-4) if x.dtype == jnp.bfloat16 else (2.0**-20, 1e-6)
    x = np.asarray(x, np.float64)
    assert (np.abs(x - wanted) <= unit * np.abs(wanted) * 1.01).all()
    assert (np.abs(logits - products) <= few * scale).all(), (
        np.abs(logits - products) / scale
    ).max()


def simulated(h, w, scale, router, blocks=40, eps=EPS):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return mosaic.expert_inputs(h, w, scale, router, eps=eps, blocks=blocks, interpret=interpret)


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("M", [1, 5, 17])
def test_none_against_float64(dtype, M):
    arrays = inputs(M, 192, 10, dtype)
    assert_right(expert_inputs(*arrays, eps=EPS), arrays)


# One warpgroup whose widths are two tiles; two that meet, for three rows one after another; a
# row to a group of blocks.
@on_a_cpu
@pytest.mark.parametrize(
    ("M", "E", "parts", "blocks"), [(1, 64, 1, 1), (3, 128, 8, 1), (3, 128, 8, 40)]
)
def test_mosaic_interpreted(monkeypatch, M, E, parts, blocks):
    monkeypatch.setattr(row_norm, "MOST_PARTS", parts)
    arrays = inputs(M, 512, E)
    x, logits = simulated(*arrays, blocks)
    assert logits.parts.shape == (4, M, E)
    assert_right((x, logits), arrays)


@on_a_cpu
def test_a_row_has_the_same_bits_among_others():
    """However many share its blocks, and beside a row of NaN, which keeps to itself."""
    h, *weights = inputs(16, 256)
    together = simulated(h, *weights, blocks=6)
    for M in (1, 2, 5, 8):
        some = simulated(h[:M], *weights, blocks=6)
        same_bits(some, (together[0][:M], together[1].replace(parts=together[1].parts[:, :M])))
    x, logits = simulated(h.at[3].set(jnp.nan), *weights, blocks=6)
    for got, wanted in ((x, together[0]), (logits.parts, together[1].parts)):
        nan = np.isnan(np.asarray(got, np.float32)).reshape(-1, 16, got.shape[-1])
        assert nan[:, 3].all()
        assert not np.delete(nan, 3, 1).any()
        np.testing.assert_array_equal(np.delete(got, 3, -2), np.delete(wanted, 3, -2))


@on_a_cpu
def test_the_gradient_is_that_of_the_reference():
    """Also through logits in pieces."""
    arrays = inputs(2, 256)
    by_x, by_logits = (
        np.random.default_rng(i).standard_normal((2, n)) for i, n in ((0, 256), (1, 64))
    )

    def loss(implementation):
        def of(*arrays):
            implementations = {"mosaic": simulated, "xla": xla.expert_inputs}
            x, logits = dispatch.run(implementations, implementation, *arrays, eps=EPS)
            return (x * by_x).sum() + (summed(logits) * by_logits).sum()

        return jax.grad(of, (0, 1, 2, 3))

    wanted = loss("xla")(*arrays)
    same_bits(loss("mosaic")(*arrays), wanted)
    assert all(jnp.abs(x).max() > 0 for x in wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("D", "E"), [(D, E), (1024, 64), (5376, 256)])
def test_mosaic_on_a_gpu(D, E, M):
    run = jax.jit(lambda *arrays: expert_inputs(*arrays, eps=EPS, implementation="mosaic"))
    h, *weights = inputs(M, D, E)
    together = run(h, *weights)
    assert_right(together, [h, *weights])
    for i in {0, M // 2, M - 1}:
        alone = run(h[i : i + 1], *weights)
        same_bits(alone, jax.tree.map(lambda x, i=i: x[..., i : i + 1, :], together))
    for _ in range(20):  # what races does not do so every time
        same_bits(run(h, *weights), together)


def lowered(M: int, D: int, E: int, implementation: str | None) -> str:
    def run(*arrays):
        return expert_inputs(*arrays, eps=EPS, implementation=implementation)

    shapes = ((M, D), (D,), (D,), (D, E))
    return lower_for_h200(run, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))


@pytest.mark.parametrize("M", [1, 5, 16])
def test_lowers_for_an_h200_at_the_published_shape(M):
    text = lowered(M, D, E, "mosaic")
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "dot_general" not in text


@pytest.mark.parametrize(("M", "E"), [(17, 128), (1, 10)])
def test_what_the_kernel_refuses_is_left_to_xla(M, E):
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]
    text = lowered(M, 512, E, None)
    assert "mosaic_gpu" not in text
    assert "dot_general" in text


@pytest.mark.parametrize(
    ("M", "D", "E", "dtype", "named"),
    [
        (17, 512, 64, "bfloat16", "17 rows: takes up to 16"),
        (1, 384, 64, "bfloat16", "D % 256"),
        (1, 512, 96, "bfloat16", r"router \(512, 96\): takes E a multiple of 64"),
        (1, 512, 64, "float32", "float32"),
    ],
)
def test_what_the_kernel_cannot_take_is_unsupported(M, D, E, dtype, named):
    with pytest.raises(Unsupported, match=named):
        simulated(*inputs(M, D, E, dtype))


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (64,), r"h \(64,\) must be \[M, D\]"),
        (1, (63,), r"w \(63,\)"),
        (2, (63,), r"scale \(63,\)"),
        (3, (63, 8), r"router \(63, 8\) must be \[D, E\], D = 64"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, message):
    arrays = inputs(1, 64, 8)
    arrays[place] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        expert_inputs(*arrays, eps=EPS)
