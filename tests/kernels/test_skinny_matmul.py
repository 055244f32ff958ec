"""skinny_matmul, every implementation, against float64; and how it deals a matrix out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PartialSums, Unsupported, skinny_matmul, summed
from pallas_kernels.skinny_matmul import mosaic
from pallas_kernels.streamed_product import geometry
from pallas_kernels.streamed_product.geometry import Cut

BF16 = jnp.bfloat16

# D, F of the published sizes: 31B, 12B, E4B, E2B, 26B-A4B.
PUBLISHED = [
    (5376, 16384),
    (5376, 18432),
    (8192, 5376),
    (16384, 5376),
    (5376, 43008),
    (21504, 5376),
    (3840, 30720),
    (15360, 3840),
    (2560, 20480),
    (10240, 2560),
    (2560, 3072),
    (1536, 12288),
    (6144, 1536),
    (2816, 8192),
]


def draw(M: int, D: int, F: int, dtype: str = "bfloat16") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    arrays = (rng.standard_normal((M, D)), rng.standard_normal((D, F)))
    return tuple(np.asarray(jnp.asarray(a, dtype).astype(jnp.float32)) for a in arrays)


def assert_close(y, x, w, dtype):
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    tolerance = 2.0**-8 if jnp.dtype(dtype) == BF16 else 2e-6
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0, atol=tolerance * scale)


def interpreted(x, w, *, blocks, out=jnp.float32, transposed=False):
    w = w.T if transposed else w
    return mosaic.skinny_matmul(
        jnp.asarray(x, BF16),
        jnp.asarray(w, BF16),
        out=out,
        transposed=transposed,
        blocks=blocks,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )


@pytest.mark.parametrize("shape", [*PUBLISHED, (5376, 262144), (256, 384), (64, 128)], ids=str)
@pytest.mark.parametrize("cores", [132, 5])
def test_every_step_falls_to_one_block_and_parts_are_numbered_without_gaps(shape, cores):
    cut = Cut.of(*shape, cores)
    counts = [cut.count(b) for b in range(cut.blocks)]
    assert 1 <= cut.blocks <= cores
    assert max(counts) - min(counts) <= 1
    block = np.repeat(np.arange(cut.blocks), counts)
    order = np.concatenate([np.arange(n) for n in counts])
    tile, step = (np.asarray(x) for x in cut.place(jnp.asarray(block), jnp.asarray(order)))
    places, times = np.unique(tile * cut.steps + step, return_counts=True)
    assert (times == 1).all() and len(places) == cut.tiles * cut.steps
    part, parts = (np.asarray(x) for x in cut.part(jnp.asarray(block), jnp.asarray(tile)))
    assert parts.max() == cut.parts
    held = {}
    for key in set(zip(tile.tolist(), part.tolist(), block.tolist(), strict=True)):
        held.setdefault(key[0], []).append(key[1])
    count = dict(zip(tile.tolist(), parts.tolist(), strict=True))
    assert all(sorted(numbers) == list(range(count[t])) for t, numbers in held.items())


# Blocks with whole tiles, with shares of one, with both, and with fewer parts than others.
@pytest.mark.parametrize(
    ("M", "D", "F", "blocks", "transposed"),
    [
        (1, 128, 256, 2, True),
        (3, 256, 384, 5, False),
        (9, 512, 256, 6, False),
        (8, 256, 896, 3, False),
    ],
)
def test_mosaic_interpreted(monkeypatch, M, D, F, blocks, transposed):
    monkeypatch.setattr(geometry, "LEAST_STEPS", 1)
    x, w = draw(M, D, F)
    y = interpreted(x, w, blocks=blocks, transposed=transposed)
    assert_close(summed(y), x, w, "float32")


def test_a_row_has_the_same_bits_among_any_number(monkeypatch):
    monkeypatch.setattr(geometry, "LEAST_STEPS", 1)
    x, w = draw(8, 256, 384)  # no more: a CPU adds up 16 rows in another order than 8
    several = np.asarray(summed(interpreted(x, w, blocks=5)))
    for rows in (slice(0, 1), slice(7, 8), slice(2, 6)):
        np.testing.assert_array_equal(summed(interpreted(x[rows], w, blocks=5)), several[rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("M", [1, 5, 8, 70])
@pytest.mark.parametrize("transposed", [False, True])
def test_xla(dtype, M, transposed):
    x, w = draw(M, 192, 320, dtype)
    given = jnp.asarray(w.T if transposed else w, dtype)
    y = skinny_matmul(jnp.asarray(x, dtype), given, out="float32", transposed=transposed)
    assert y.shape == (M, 320) and y.dtype == jnp.float32
    assert_close(y, x, w, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_mosaic_on_a_gpu(shape):
    D, F = shape
    x, w = draw(64, D, F)
    given, weights = jnp.asarray(x, BF16), jnp.asarray(w, BF16)
    run = jax.jit(functools.partial(skinny_matmul, out=BF16, implementation="mosaic"))
    every = run(given, weights)
    assert_close(every.astype(jnp.float32), x, w, BF16)
    # 1, 5, 9, 15 and 20 rows: fewer than 8, and no multiples of it.
    for rows in (slice(0, 1), slice(3, 8), slice(10, 19), slice(5, 20), slice(41, 61)):
        np.testing.assert_array_equal(run(given[rows], weights), every[rows])


@pytest.mark.parametrize(
    ("M", "shape"),
    [(5, s) for s in PUBLISHED] + [(1, PUBLISHED[0]), (15, PUBLISHED[0]), (64, PUBLISHED[1])],
    ids=str,
)
def test_lowers_for_an_h200_at_the_published_shapes(M, shape):
    D, F = shape
    x, w = jax.ShapeDtypeStruct((M, D), BF16), jax.ShapeDtypeStruct((D, F), BF16)
    run = functools.partial(skinny_matmul, out=BF16, implementation="mosaic")
    text = lower_for_h200(run, x, w)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text  # a kernel of its own


def test_the_head_lowers_for_an_h200():
    x, table = (jax.ShapeDtypeStruct(s, BF16) for s in ((5, 5376), (262144, 5376)))
    run = functools.partial(
        skinny_matmul, out=jnp.float32, transposed=True, implementation="mosaic"
    )
    assert "custom_call @mosaic_gpu" in lower_for_h200(run, x, table)


def test_parts_are_added_in_their_order():
    # In float32, from left to right: (1 + 2^24) - 2^24 = 0, in any other order 1.
    parts = jnp.asarray([[1.0], [2.0**24], [-(2.0**24)]])
    assert summed(PartialSums(parts, jnp.float32)).tolist() == [0.0]


@pytest.mark.parametrize(
    ("x", "w", "dtype", "named"),
    [
        ((1, 128), (128, 256), "float32", "float32"),
        ((1, 96), (96, 256), "bfloat16", "D a multiple of 64"),
        ((1, 128), (128, 192), "bfloat16", "F of 128"),
        ((65, 128), (128, 256), "bfloat16", "takes 1 to 64 rows"),
    ],
)
def test_what_the_kernel_cannot_take_is_unsupported(x, w, dtype, named):
    x, w = jnp.zeros(x, dtype), jnp.zeros(w, dtype)
    with pytest.raises(Unsupported, match=named):
        mosaic.skinny_matmul(x, w, out=dtype, blocks=2, interpret=plgpu.InterpretGPUParams())


def test_a_small_matrix_is_left_to_others():
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((1, 1024), (1024, 1024))]
    run = functools.partial(skinny_matmul, out=BF16, implementation="mosaic")
    with pytest.raises(Unsupported, match="1024, 1024"):
        lower_for_h200(run, *shapes)


@pytest.mark.parametrize(
    ("x", "w", "transposed"),
    [((2, 64), (65, 8), False), ((2, 64), (64, 8), True), ((64,), (64, 8), False)],
)
def test_shapes_that_do_not_fit_are_refused(x, w, transposed):
    with pytest.raises(ValueError, match="must be"):
        skinny_matmul(jnp.zeros(x), jnp.zeros(w), out="float32", transposed=transposed)
