"""choose_experts against float64; the Mosaic kernel interpreted, and lowered for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, choose_experts, dispatch
from pallas_kernels.choose_experts import IMPLEMENTATIONS, mosaic, xla

on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")
each = pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=on_a_cpu)])

simulated = functools.partial(mosaic.choose_experts, interpret=plgpu.InterpretGPUParams())
OPS = {"xla": functools.partial(choose_experts, implementation="xla"), "mosaic": simulated}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape) * 4


def inputs(E: int) -> tuple[jax.Array, jax.Array]:
    """Rows of every kind, and scales of both signs."""
    usual = draw(3, E)
    rows = [
        *usual,
        np.round(usual[0]),  # many ties
        np.zeros(E),
        np.where(np.arange(E) == E // 2, 1e4, usual[1]),
        np.where(np.arange(E) % 4 == 3, usual[2], -np.inf),
        np.where(np.arange(E) == 5, 3.5, -np.inf),  # fewer than k with any share
        np.r_[8, np.arange(1, E) * 1e-9],  # but for the first, one probability
        np.arange(E) * -50.0,  # probabilities below the least float32
    ]
    return jnp.asarray(rows, jnp.float32), jnp.asarray(1 + draw(E), jnp.bfloat16)


def expected(logits: jax.Array, scale: jax.Array, k: int) -> tuple[np.ndarray, np.ndarray]:
    logits, scale = np.asarray(logits, np.float64), np.asarray(scale, np.float64)
    index = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), index, -1)
    return index, p / p.sum(-1, keepdims=True) * scale[index]


def assert_right(actual, logits, scale, k):
    (index, share), (wanted_index, wanted) = actual, expected(logits, scale, k)
    assert (index.dtype, share.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(index, wanted_index)
    # A difference of logits of some 20 is rounded by up to 2^-20, and so is its exponential.
    np.testing.assert_allclose(share, wanted, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize(("E", "k"), [(10, 3), (128, 8), (256, 1)])
def test_xla_against_float64(E, k):
    logits, scale = inputs(E)
    assert_right(OPS["xla"](logits, scale, k=k), logits, scale, k)


@on_a_cpu
@pytest.mark.parametrize(("E", "k"), [(128, 1), (128, 8), (256, 2)])
def test_mosaic_interpreted(E, k):
    logits, scale = inputs(E)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = mosaic.choose_experts(logits, scale, k=k, interpret=interpret)
    assert_right(out, logits, scale, k)


@each
def test_logits_in_pieces(implementation):
    """Of rows whose pieces and sums float32 holds exactly, as it does their order and ties."""
    logits, scale = inputs(128)
    logits = jnp.round(logits[jnp.asarray([0, 1, 3, 4, 5])])
    parts = jnp.asarray(np.round(draw(2, *logits.shape)), jnp.float32)
    parts = jnp.stack([*parts, logits - parts.sum(0)])
    pieces = PartialSums(parts, jnp.dtype(jnp.float32))
    assert_right(OPS[implementation](pieces, scale, k=8), logits, scale, 8)


@each
def test_a_nan_makes_the_shares_of_its_row_nan_and_no_index_wild(implementation):
    logits, scale = inputs(128)
    logits = np.array(logits)
    logits[0, 7], logits[1, 9], logits[2], logits[3, ::2] = np.nan, -np.nan, np.nan, -np.nan
    index, share = OPS[implementation](jnp.asarray(logits), scale, k=8)
    assert np.isnan(share[:4]).all()
    assert (index >= 0).all()
    assert (index < 128).all()
    assert_right((index[4:], share[4:]), logits[4:], scale, 8)


@each
def test_the_gradient_is_that_of_a_softmax(implementation):
    """Also through the kernel, which has none of its own."""
    logits, scale = inputs(128)
    logits, weights = logits[:2], draw(2, 2)
    implementations = {"mosaic": simulated, "xla": xla.choose_experts}

    def loss(logits, scale):
        _, share = dispatch.run(implementations, implementation, logits, scale, k=2)
        return (share * weights).sum()

    by_logits, by_scale = jax.grad(loss, (0, 1))(logits, scale.astype(jnp.float32))
    wanted_logits, wanted_scale = np.zeros((2, 128)), np.zeros(128)
    index, share = expected(logits, np.ones(128), 2)
    for row, (i, p) in enumerate(zip(index, share, strict=True)):
        value = weights[row] * np.asarray(scale, np.float64)[i]
        wanted_logits[row, i] = p * (value - (p * value).sum())
        wanted_scale[i] += p * weights[row]
    np.testing.assert_allclose(by_logits, wanted_logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_scale, wanted_scale, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("E", "k"), [(128, 8), (128, 1), (256, 2), (384, 16), (512, 8)])
def test_mosaic_on_a_gpu(E, k):
    logits, scale = inputs(E)
    out = choose_experts(logits, scale, k=k, implementation="mosaic")
    assert_right(out, logits, scale, k)
    nan = choose_experts(logits.at[:, 3].set(jnp.nan), scale, k=k, implementation="mosaic")
    assert ((nan[0] >= 0) & (nan[0] < E)).all()
    assert jnp.isnan(nan[1]).all()
    for _ in range(20):  # what races does not do so every time
        again = choose_experts(logits, scale, k=k, implementation="mosaic")
        assert all((a == b).all() for a, b in zip(out, again, strict=True))


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company():
    logits, scale = jnp.asarray(draw(2048, 128), jnp.float32), inputs(128)[1]
    together = choose_experts(logits, scale, k=8, implementation="mosaic")
    for M in (1, 2, 3, 8, 64, 133):
        for start in (0, 1000):
            rows = slice(start, start + M)
            out = choose_experts(logits[rows], scale, k=8, implementation="mosaic")
            assert all((a == b[rows]).all() for a, b in zip(out, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 22])
def test_pieces_have_the_bits_of_their_sum_on_a_gpu(pieces):
    parts, scale = jnp.asarray(draw(pieces, 16, 128), jnp.float32), inputs(128)[1]
    total = np.asarray(parts[0])
    for part in np.asarray(parts[1:]):
        total = total + part
    run = functools.partial(choose_experts, k=8, implementation="mosaic")
    out = run(PartialSums(parts, jnp.dtype(jnp.float32)), scale)
    wanted = run(jnp.asarray(total), scale)
    assert all((a == b).all() for a, b in zip(out, wanted, strict=True))


@pytest.mark.parametrize(("M", "pieces"), [(1, 22), (16, 22), (2048, None)])
def test_the_published_shape_lowers_to_one_kernel(M, pieces):
    run = functools.partial(choose_experts, k=8, implementation="mosaic")
    logits = jax.ShapeDtypeStruct((M, 128), jnp.float32)
    if pieces:
        parts = jax.ShapeDtypeStruct((pieces, M, 128), jnp.float32)
        logits = PartialSums(parts, jnp.dtype(jnp.float32))
    text = lower_for_h200(run, logits, jax.ShapeDtypeStruct((128,), jnp.bfloat16))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "sort" not in text


@pytest.mark.parametrize("E", [10, 192, 640])
def test_what_the_kernel_cannot_take(E):
    with pytest.raises(Unsupported, match=f"{E} experts: takes multiples of 128 up to 512"):
        simulated(jnp.ones((1, E)), jnp.ones(E), k=2)


@pytest.mark.parametrize(
    ("logits", "scale", "k", "message"),
    [
        (jnp.ones(8), jnp.ones(8), 2, r"logits \(8,\) float32 must be float32 \[M, E\]"),
        (jnp.ones((1, 8), jnp.bfloat16), jnp.ones(8), 2, "bfloat16 must be float32"),
        (jnp.ones((1, 8)), jnp.ones(7), 2, r"scale \(7,\) \[E\]"),
        (jnp.ones((1, 8)), jnp.ones(8), 9, "k = 9 must be between 1 and the 8 experts"),
        (jnp.ones((1, 8)), jnp.ones(8), 0, "k = 0 must be"),
    ],
)
def test_what_does_not_fit(logits, scale, k, message):
    with pytest.raises(ValueError, match=message):
        choose_experts(logits, scale, k=k)


@on_a_cpu
def test_none_falls_back_where_there_is_no_hopper():
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]

    def program(implementation):
        run = functools.partial(choose_experts, k=8, implementation=implementation)
        return str(jax.make_jaxpr(run)(*inputs(128)))

    assert program(None) == program("xla")
