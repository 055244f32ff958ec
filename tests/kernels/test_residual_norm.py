"""residual_norm against float64; the Mosaic kernel in the interpreter, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, residual_norm
from pallas_kernels.residual_norm import IMPLEMENTATIONS, mosaic, xla

EPS = 1e-6
# On a GPU XLA leaves out the roundings in between, and it is XLA that the interpreter runs on.
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")


def inputs(rows: tuple[int, ...], D: int, dtype: str = "bfloat16", seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    shapes = ((*rows, D), (*rows, D), (D,), (D,), (1,))
    return [jnp.asarray(rng.standard_normal(s) + 0.1, dtype) for s in shapes]


def expected(h, y, w, next_w, scale, dtype):
    """float64, rounded where the contract rounds."""
    y, next_w = (np.asarray(x, np.float64) for x in (y, next_w))

    def rounded(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    def norm(x, w):
        return rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w)

    if h is None:
        h = rounded(y)
    else:
        h, w = (np.asarray(x, np.float64) for x in (h, w))
        h = rounded(h + norm(y, w))
    if scale is not None:
        h = rounded(h * float(scale[0]))
    return h, norm(h, next_w)


def assert_close(actual, wanted, dtype):
    """Two units in the last place: a sum may fall on the other side of a rounding."""
    unit, least = (2.0**-7, 0.05) if dtype == "bfloat16" else (2.0**-20, 1.0)
    for a, w in zip(actual, wanted, strict=True):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all()
        assert (np.abs(a - w) <= unit * (np.abs(w) + least)).all(), np.abs(a - w).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [(1, 1), (2, 3), (5,)], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_xla_against_float64(rows, dtype, scaled):
    *arrays, scale = inputs(rows, 96, dtype)
    scale = scale if scaled else None
    out = residual_norm(*arrays, eps=EPS, scale=scale, implementation="xla")
    assert [x.dtype for x in out] == [dtype] * 2
    assert_close(out, expected(*arrays, scale, dtype), dtype)


@on_a_cpu
@pytest.mark.parametrize("D", [256, 512, 1536], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_mosaic_interpreted(D, scaled):
    *arrays, scale = inputs((2,), D)
    scale = scale if scaled else None
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = mosaic.residual_norm(*arrays, eps=EPS, scale=scale, interpret=interpret)
    assert_close(out, expected(*arrays, scale, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=on_a_cpu)])
def test_a_product_in_pieces(implementation):
    h, y, w, next_w, _ = inputs((2,), 256)
    pieces = np.random.default_rng(1).standard_normal((2, *y.shape))
    pieces = np.stack([*pieces, np.asarray(y, np.float64) - pieces.sum(0)])
    whole = PartialSums(jnp.asarray(pieces, jnp.float32), jnp.bfloat16)
    op, more = xla.residual_norm, {}
    if implementation == "mosaic":
        op, more = mosaic.residual_norm, {"interpret": plgpu.InterpretGPUParams()}
    out = op(h, whole, w, next_w, eps=EPS, **more)
    assert_close(out, expected(h, y, w, next_w, None, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=on_a_cpu)])
@pytest.mark.parametrize("scaled", [False, True])
def test_where_the_residual_begins(implementation, scaled):
    _, y, _, next_w, scale = inputs((2,), 1024)
    scale = scale if scaled else None
    pieces = np.random.default_rng(1).standard_normal((16, *y.shape))
    whole = PartialSums(jnp.asarray(pieces, jnp.float32), jnp.dtype(jnp.bfloat16))
    op, more = xla.residual_norm, {}
    if implementation == "mosaic":
        op, more = mosaic.residual_norm, {"interpret": plgpu.InterpretGPUParams(detect_races=True)}
    out = op(None, whole, None, next_w, eps=EPS, scale=scale, **more)
    assert [x.dtype for x in out] == ["bfloat16"] * 2
    assert_close(out, expected(None, pieces.sum(0), None, next_w, scale, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("begins", [True, False])
def test_a_scale_of_another_dtype_leaves_the_residual_its_own(begins):
    """As the kernel does: what follows would refuse a residual that has become float32."""
    h, y, w, next_w, scale = inputs((2,), 96)
    h, w = (None, None) if begins else (h, w)
    given, wanted = (
        residual_norm(h, y, w, next_w, eps=EPS, scale=s, implementation="xla")
        for s in (scale.astype(jnp.float32), scale)
    )
    for a, b in zip(given, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4, 64])
def test_where_the_residual_begins_on_a_gpu(M):
    _, _, _, next_w, _ = inputs((M,), 1024)
    pieces = np.random.default_rng(1).standard_normal((16, M, 1024))
    whole = PartialSums(jnp.asarray(pieces, jnp.float32), jnp.dtype(jnp.bfloat16))
    out = residual_norm(None, whole, None, next_w, eps=EPS, implementation="mosaic")
    assert_close(out, expected(None, pieces.sum(0), None, next_w, None, "bfloat16"), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [5376, 3840, 2816, 2560, 1536])
@pytest.mark.parametrize("M", [1, 4, 64])
def test_mosaic_on_a_gpu(M, D):
    *arrays, scale = inputs((M,), D)
    out = residual_norm(*arrays, eps=EPS, scale=scale, implementation="mosaic")
    assert_close(out, expected(*arrays, scale, "bfloat16"), "bfloat16")
    for _ in range(20):  # warpgroups that race for memory do not do so every time
        again = residual_norm(*arrays, eps=EPS, scale=scale, implementation="mosaic")
        assert all((a == b).all() for a, b in zip(out, again, strict=True))


@pytest.mark.parametrize("D", [5376, 3840, 2816, 2560, 1536])
def test_lowers_for_an_h200_at_the_published_widths(D):
    def run(*args):
        *arrays, scale = args
        return residual_norm(*arrays, eps=EPS, scale=scale, implementation="mosaic")

    assert "mosaic_gpu" in lower_for_h200(run, *inputs((1, 1), D))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": jnp.ones((2, 512))}, "float32"),
        ({"D": 384}, "D % 256"),
        ({"rows": (65,)}, "65 rows"),
    ],
)
def test_what_the_kernel_cannot_take(change, message):
    h, y, w, next_w, _ = inputs(change.get("rows", (2,)), change.get("D", 512))
    h = change.get("h", h)
    with pytest.raises(Unsupported, match=message):
        mosaic.residual_norm(h, y, w, next_w, eps=EPS, interpret=plgpu.InterpretGPUParams())


def test_shapes_that_do_not_fit():
    h, y, w, next_w, _ = inputs((2,), 64)
    with pytest.raises(ValueError, match=r"y \(1, 64\)|must be alike"):
        residual_norm(h, y[:1], w, next_w, eps=EPS)
    with pytest.raises(ValueError, match=r"next_w \(63,\)"):
        residual_norm(h, y, w, next_w[:-1], eps=EPS)
    with pytest.raises(ValueError, match="h and w come together"):
        residual_norm(None, y, w, next_w, eps=EPS)
    with pytest.raises(ValueError, match=r"scale \(2,\) must be \[1\]"):
        residual_norm(h, y, w, next_w, eps=EPS, scale=jnp.ones(2))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a device that is no Hopper")
def test_none_falls_back_where_there_is_no_hopper():
    *arrays, _ = inputs((1,), 256)
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]
    a = residual_norm(*arrays, eps=EPS)
    b = xla.residual_norm(*arrays, eps=EPS)
    assert all((x == y).all() for x, y in zip(a, b, strict=True))
