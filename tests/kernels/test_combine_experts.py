"""combine_experts against float64; its kernel in the interpreter, and lowered for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, combine_experts, dispatch, row_norm
from pallas_kernels.combine_experts import IMPLEMENTATIONS, mosaic, xla

EPS = 1e-6
BF16 = jnp.dtype(jnp.bfloat16)
D, EXPERTS, PIECES = 2816, 8, 4  # of 26B-A4B; pieces of y on 132 multiprocessors
# On a GPU XLA leaves out the roundings in between, and it is XLA that the interpreter runs on.
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")

simulated = functools.partial(
    mosaic.combine_experts, interpret=plgpu.InterpretGPUParams(detect_races=True)
)


def inputs(M: int, D: int, k: int, pieces: int = 1, dtype: str = "bfloat16") -> list:
    """y, w, rows, place, share, experts_w."""
    rng = np.random.default_rng(11)

    def draw(*shape):
        return rng.standard_normal(shape) + 0.1

    y = jnp.asarray(draw(M, D), dtype)
    if pieces > 1:
        y = PartialSums(jnp.asarray(draw(pieces, M, D), jnp.float32), jnp.dtype(dtype))
    place = jnp.asarray(rng.permutation(M * k).reshape(M, k), jnp.int32)
    w, rows, experts_w = (jnp.asarray(draw(*s), dtype) for s in ((D,), (M * k, D), (D,)))
    return [y, w, rows, place, jnp.asarray(draw(M, k), jnp.float32), experts_w]


def of_rows(arrays: list, chosen: slice) -> list:
    """The same call for some tokens only, whose rows now lie together."""
    y, w, rows, place, share, experts_w = arrays
    rows = rows[place[chosen].reshape(-1)]
    y = jax.tree.map(lambda x: x[..., chosen, :], y)
    return [y, w, rows, None, share[chosen], experts_w]


def expected(y, w, rows, place, share, experts_w):
    """float64, rounded where the contract rounds; and what the two norms come to, for the limit."""
    dtype = y.dtype

    def rounded(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    y = rounded(np.asarray(y.parts, np.float64).sum(0)) if isinstance(y, PartialSums) else y
    y, w, rows, share, experts_w = (
        np.asarray(x, np.float64) for x in (y, w, rows, share, experts_w)
    )
    place = np.arange(share.size).reshape(share.shape) if place is None else np.asarray(place)

    def norm(x, w):
        return rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w)

    m = rounded((rows[place] * share[..., None]).sum(1))
    normed = norm(y, w), norm(m, experts_w)
    return sum(normed), sum(map(np.abs, normed))


def assert_right(actual, arrays):
    """y, m, both norms and the sum may each fall on the other side of a rounding."""
    wanted, size = expected(*arrays)
    assert actual.dtype == arrays[0].dtype
    unit, least = (2.0**-7, 0.05) if actual.dtype == jnp.bfloat16 else (2.0**-20, 1.0)
    error = np.abs(np.asarray(actual, np.float64) - wanted)
    assert (error <= 1.5 * unit * (size + least)).all(), (error / (size + least)).max()


def assert_rounded_as_told(actual, arrays):
    """All but a few that lie near the middle between two numbers; XLA may leave out a rounding."""
    wanted = jnp.asarray(expected(*arrays)[0], actual.dtype)
    assert (actual == wanted).mean() > 0.98


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "k", "pieces"), [(1, 1, 1), (1, 4, 1), (5, 3, 3), (20, 2, 1)])
def test_none_against_float64(dtype, M, k, pieces):
    arrays = inputs(M, 96, k, pieces, dtype)
    assert_right(combine_experts(*arrays, eps=EPS), arrays)


@pytest.mark.parametrize(("M", "k"), [(0, 2), (2, 0)])
def test_of_nothing(M, k):
    """No tokens; tokens without experts, whose sums are zeros."""
    arrays = inputs(M, 96, k, dtype="float32")
    assert_right(combine_experts(*arrays, eps=EPS), arrays)


# One warpgroup a half, and two that meet; rows that lie in order, and anywhere.
@on_a_cpu
@pytest.mark.parametrize(("M", "k", "pieces", "parts"), [(1, 3, 1, 2), (3, 2, 2, 8)])
@pytest.mark.parametrize("ordered", [False, True])
def test_mosaic_interpreted(monkeypatch, M, k, pieces, parts, ordered):
    monkeypatch.setattr(row_norm, "MOST_PARTS", parts)
    arrays = inputs(M, 512, k, pieces)
    arrays[3] = None if ordered else arrays[3]
    out = simulated(*arrays, eps=EPS)
    assert_right(out, arrays)
    assert_rounded_as_told(out, arrays)


@on_a_cpu
def test_a_row_has_the_same_bits_among_others():
    """Wherever its experts' rows lie, and beside a row of NaN, which keeps to itself."""
    arrays = inputs(16, 256, 2, 3)
    together = simulated(*arrays, eps=EPS)
    for M in (1, 2, 5, 8):
        some = simulated(*of_rows(arrays, slice(16 - M, 16)), eps=EPS)
        np.testing.assert_array_equal(some, together[16 - M :])
    y, w, rows, place, share, experts_w = arrays
    for spoilt in (
        [y.replace(parts=y.parts.at[1, 3].set(jnp.nan)), w, rows, place, share, experts_w],
        [y, w, rows.at[place[3, 1]].set(jnp.nan), place, share, experts_w],
        [y, w, rows, place, share.at[3].set(jnp.nan), experts_w],
    ):
        out = np.asarray(simulated(*spoilt, eps=EPS), np.float32)
        assert np.isnan(out[3]).all()
        np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(together, 3, 0))


@on_a_cpu
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_gradient_is_that_of_the_reference(pieces):
    y, w, rows, place, share, experts_w = inputs(2, 256, 2, pieces)
    weights = np.random.default_rng(0).standard_normal((2, 256))

    def gradient(implementation):
        def of(y, w, rows, share, experts_w):
            implementations = {"mosaic": simulated, "xla": xla.combine_experts}
            arrays = y, w, rows, place, share, experts_w
            return (dispatch.run(implementations, implementation, *arrays, eps=EPS) * weights).sum()

        return jax.grad(of, range(5))(y, w, rows, share, experts_w)

    wanted = gradient("xla")
    jax.tree.map(np.testing.assert_array_equal, gradient("mosaic"), wanted)
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("D", "k", "pieces"), [(D, EXPERTS, PIECES), (1024, 2, 1)])
def test_mosaic_on_a_gpu(D, k, pieces, M):
    run = jax.jit(lambda *arrays: combine_experts(*arrays, eps=EPS, implementation="mosaic"))
    arrays = inputs(M, D, k, pieces)
    together = run(*arrays)
    assert_right(together, arrays)
    assert_rounded_as_told(together, arrays)
    for i in {0, M // 2, M - 1}:
        alone = run(*of_rows(arrays, slice(i, i + 1)))
        np.testing.assert_array_equal(alone, together[i : i + 1])
    for _ in range(20):  # what races does not do so every time
        np.testing.assert_array_equal(run(*arrays), together)


def lowered(M: int, D: int, k: int, implementation: str | None) -> str:
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(y, w, rows, place, share, experts_w):
        arrays = PartialSums(y, BF16), w, rows, place, share, experts_w
        return combine_experts(*arrays, eps=EPS, implementation=implementation)

    place = struct(M, k, dtype=jnp.int32) if M > 1 else None
    share = struct(M, k, dtype=jnp.float32)
    y = struct(PIECES, M, D, dtype=jnp.float32)
    return lower_for_h200(run, y, struct(D), struct(M * k, D), place, share, struct(D))


@pytest.mark.parametrize("M", [1, 5, 16])
def test_lowers_for_an_h200_at_the_published_shape(M):
    text = lowered(M, D, EXPERTS, "mosaic")
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "gather" not in text


def test_what_the_kernel_refuses_is_left_to_xla():
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]
    assert "mosaic_gpu" not in lowered(17, 512, 2, None)


@pytest.mark.parametrize(
    ("M", "D", "k", "dtype", "named"),
    [
        (17, 512, 2, "bfloat16", "17 rows of 2 experts: takes up to 16 rows"),
        (1, 512, 17, "bfloat16", "1 rows of 17 experts: .* 16 experts"),
        (1, 384, 2, "bfloat16", r"rows \(2, 384\): takes D % 256"),
        (1, 2048, 2, "bfloat16", "up to 4 warpgroups"),
        (1, 512, 2, "float32", "rows is float32"),
    ],
)
def test_what_the_kernel_cannot_take_is_unsupported(M, D, k, dtype, named):
    with pytest.raises(Unsupported, match=named):
        simulated(*inputs(M, D, k, dtype=dtype), eps=EPS)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (0, jnp.zeros(64), r"y \(64,\) must be \[M, D\]"),
        (1, jnp.zeros(63), r"w \(63,\)"),
        (2, jnp.zeros((5, 64)), r"rows \(5, 64\) must be \[M · k, D\] = \(6, 64\)"),
        (3, jnp.zeros((3, 2), jnp.int32), r"place \(3, 2\) int32 must be int32 \(2, 3\)"),
        (3, jnp.zeros((2, 3)), r"place \(2, 3\) float32"),
        (4, jnp.zeros((3, 2)), r"share \(3, 2\) float32 must be float32 \[M, k\], M = 2"),
        (4, jnp.zeros((2, 3), jnp.bfloat16), "bfloat16 must be float32"),
        (5, jnp.zeros(63), r"experts_w \(63,\)"),
    ],
)
def test_what_does_not_fit_is_refused(argument, value, message):
    arrays = inputs(2, 64, 3)
    arrays[argument] = value
    with pytest.raises(ValueError, match=message):
        combine_experts(*arrays, eps=EPS)
