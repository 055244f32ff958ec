"""residual_norm_matmul against float64, and to the bit against the two ops that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    PartialSums,
    Unsupported,
    residual_norm,
    residual_norm_matmul,
    skinny_matmul,
    summed,
)
from pallas_kernels.residual_norm import mosaic as norm_kernel
from pallas_kernels.residual_norm_matmul import mosaic
from pallas_kernels.skinny_matmul import mosaic as product_kernel
from pallas_kernels.streamed_product import geometry

EPS = 1e-6
BF16 = jnp.dtype(jnp.bfloat16)
# On a GPU XLA leaves out the roundings in between, and it is XLA that the interpreter runs on.
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")

# D, F, pieces of y: gate and up, and query, key and value, of 31B, 12B, E4B, E2B and 26B-A4B; y
# as the product before leaves it on 132 multiprocessors, in the most pieces where there are two.
PUBLISHED = [
    (5376, 43008, 3),
    (5376, 16384, 3),
    (5376, 18432, 3),
    (3840, 30720, 5),
    (3840, 8704, 5),
    (2560, 20480, 7),
    (2560, 3072, 1),
    (1536, 24576, 8),
    (1536, 2560, 1),
    (2816, 4224, 6),
    (2816, 9216, 1),
]


def inputs(M: int, D: int, F: int, pieces: int = 1, dtype: str = "bfloat16") -> tuple[list, dict]:
    """h, y, w, next_w, matrix; and the scale."""
    rng = np.random.default_rng(3)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) + 0.1, dtype)

    shapes = ((M, D), (M, D), (D,), (D,), (D, F), (1,))
    h, y, w, next_w, matrix, scale = (draw(*shape) for shape in shapes)
    if pieces > 1:
        parts = rng.standard_normal((pieces, M, D))
        y = PartialSums(jnp.asarray(parts, jnp.float32), jnp.dtype(dtype))
    return [h, y, w, next_w, matrix], {"scale": scale}


def expected(h, y, w, next_w, matrix, scale=None):
    """float64, rounded where the contract rounds."""
    dtype = y.dtype

    def rounded(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    def norm(x, w):
        return rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w)

    y = rounded(np.asarray(y.parts, np.float64).sum(0)) if isinstance(y, PartialSums) else y
    y, next_w, matrix = (np.asarray(x, np.float64) for x in (y, next_w, matrix))
    if h is None:
        h = y
    else:
        h, w = (np.asarray(x, np.float64) for x in (h, w))
        h = rounded(h + norm(y, w))
    if scale is not None:
        h = rounded(h * float(scale[0]))
    return h, norm(h, next_w) @ matrix


def assert_close(actual, wanted, dtype):
    """A norm may fall on the other side of a rounding: that is one of D addends of a product."""
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-18
    for a, w in zip(actual, wanted, strict=True):
        a = np.asarray(a, np.float64)
        assert a.shape == w.shape
        np.testing.assert_allclose(a, w, rtol=0, atol=unit * np.abs(w).max())


def whole(y):
    return jax.tree.leaves(y)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "pieces", "scaled"), [(1, 1, True), (5, 3, False)])
def test_none_against_float64(dtype, M, pieces, scaled):
    arrays, more = inputs(M, 192, 320, pieces, dtype)
    more = more if scaled else {}
    h, product = residual_norm_matmul(*arrays, eps=EPS, out="float32", **more)
    assert h.dtype == dtype and product.dtype == jnp.float32
    assert_close((h, product), expected(*arrays, **more), dtype)


# The first product of a layer of Google's drafters for 31B and 12B behind that before it.
BEGINNINGS = [(1024, 8192, 16), (1024, 4096, 16)]


def beginning(arrays: list) -> list:
    """The same without a residual before y."""
    _, y, _, next_w, matrix = arrays
    return [None, y, None, next_w, matrix]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "pieces"), [(1, 1), (5, 3)])
def test_where_the_residual_begins(dtype, M, pieces):
    arrays = beginning(inputs(M, 192, 320, pieces, dtype)[0])
    h, product = residual_norm_matmul(*arrays, eps=EPS, out="float32")
    assert h.dtype == dtype and product.dtype == jnp.float32
    assert_close((h, product), expected(*arrays), dtype)


# One, two and six warpgroups that norm; blocks with whole tiles, with shares of one, with both.
@on_a_cpu
@pytest.mark.parametrize(
    ("D", "F", "blocks", "pieces", "scaled", "begins"),
    [
        (256, 256, 2, 1, True, False),
        (512, 384, 5, 3, False, False),
        (1536, 256, 3, 2, True, False),
        (1024, 256, 3, 4, False, True),
        (256, 256, 2, 1, True, True),
    ],
)
def test_mosaic_interpreted(monkeypatch, D, F, blocks, pieces, scaled, begins):
    monkeypatch.setattr(geometry, "LEAST_STEPS", 1)
    arrays, more = inputs(1, D, F, pieces)
    arrays = beginning(arrays) if begins else arrays
    more = more if scaled else {}
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    device = {"blocks": blocks, "interpret": interpret}
    h, product = mosaic.residual_norm_matmul(*arrays, eps=EPS, out=BF16, **more, **device)
    *of_norm, matrix = arrays
    apart, x = norm_kernel.residual_norm(*of_norm, eps=EPS, interpret=interpret, **more)
    y = product_kernel.skinny_matmul(x, matrix, out=BF16, **device)
    np.testing.assert_array_equal(h, apart)
    np.testing.assert_array_equal(whole(product), whole(y))
    assert jax.tree.structure(product) == jax.tree.structure(y)
    product = whole(product).sum(0) if isinstance(product, PartialSums) else product
    assert_close((h, product), expected(*arrays, **more), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "begins"), [(s, False) for s in PUBLISHED] + [(s, True) for s in BEGINNINGS], ids=str
)
def test_mosaic_on_a_gpu_to_the_bit(shape, begins):
    """The two kernels' bits, which for a row among others, as of a verify pass, are the same."""
    arrays, more = inputs(5, *shape)
    if begins:
        arrays, more = beginning(arrays), {}
    h, y, *weights = arrays
    more |= {"eps": EPS, "implementation": "mosaic"}
    alone = jax.tree.map(lambda x: x[..., 3:4, :], (h, y))

    @jax.jit
    def together(h, y, w, next_w, matrix):
        return residual_norm_matmul(h, y, w, next_w, matrix, out=BF16, partial=True, **more)

    @jax.jit
    def apart(h, y, w, next_w, matrix):
        h, x = residual_norm(h, y, w, next_w, **more)
        product = skinny_matmul(x, matrix, out=BF16, partial=True, implementation="mosaic")
        return h, product

    wanted = apart(*alone, *weights)
    among = jax.tree.map(lambda x: x[..., 3:4, :], apart(h, y, *weights))
    jax.tree.map(np.testing.assert_array_equal, among, wanted)
    for _ in range(20):  # warpgroups that race for memory do not do so every time
        jax.tree.map(np.testing.assert_array_equal, together(*alone, *weights), wanted)


def lowered(M: int, D: int, F: int, pieces: int, implementation: str | None) -> str:
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(h, y, w, next_w, matrix, scale):
        more = {"partial": True, "implementation": implementation}
        y = PartialSums(y, BF16) if pieces > 1 else y[0].astype(BF16)
        return residual_norm_matmul(h, y, w, next_w, matrix, eps=EPS, out=BF16, scale=scale, **more)

    y = struct(pieces, M, D, dtype=jnp.float32)
    return lower_for_h200(run, struct(M, D), y, struct(D), struct(D), struct(D, F), struct(1))


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_lowers_for_an_h200_at_the_published_shapes(shape):
    assert lowered(1, *shape, "mosaic").count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("M", [1, 5])
def test_a_gradient_lowers_for_an_h200(M):
    """The two ops leave their product in pieces, too, in the gradient's forward pass."""
    D, F, _ = PUBLISHED[-1]

    def loss(h, y, w, next_w, matrix):
        more = {"eps": EPS, "out": jnp.float32, "partial": True}
        h, product = residual_norm_matmul(h, y, w, next_w, matrix, **more)
        return h.astype(jnp.float32).sum() + summed(product).sum()

    shapes = (M, D), (M, D), (D,), (D,), (D, F)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = lower_for_h200(jax.grad(loss, range(5)), *arrays)
    assert "custom_call @mosaic_gpu" in text
    assert "dot_general" in text  # the gradient's products, which XLA computes


@pytest.mark.parametrize("shape", BEGINNINGS, ids=str)
@pytest.mark.parametrize(("M", "kernels"), [(1, 1), (5, 2)])
def test_a_residual_that_begins_lowers_for_an_h200(M, kernels, shape):
    D, F, pieces = shape

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(parts, next_w, matrix):
        y = PartialSums(parts, BF16)
        return residual_norm_matmul(None, y, None, next_w, matrix, eps=EPS, out=BF16, partial=True)

    parts = struct(pieces, M, D, dtype=jnp.float32)
    text = lower_for_h200(run, parts, struct(D), struct(D, F))
    assert text.count("custom_call @mosaic_gpu") == kernels
    assert "stablehlo.rsqrt" not in text


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("begins", [True, False])
def test_the_gradient_of_one_row_lowers_for_an_h200(begins, partial):
    """The two ops, whose gradient it is, leave their product in pieces too, there."""
    D, F, _ = BEGINNINGS[0]

    def loss(h, y, w, next_w, matrix):
        arrays = [h, y, w, next_w, matrix]
        arrays = beginning(arrays) if begins else arrays
        h, x = residual_norm_matmul(*arrays, eps=EPS, out=BF16, partial=partial)
        return sum(x.astype(jnp.float32).sum() for x in (h, summed(x)))

    shapes = (1, D), (1, D), (D,), (D,), (D, F)
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    text = lower_for_h200(jax.value_and_grad(loss, range(5)), *arrays)
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(("M", "F", "kernels"), [(1, 3072, 1), (2, 3072, 2), (1, 256, 1)])
def test_what_the_kernel_refuses_falls_to_the_two_ops(M, F, kernels):
    """Where the matrix is small one of them is a kernel, and the product XLA's."""
    text = lowered(M, 2560, F, 1, None)
    assert text.count("custom_call @mosaic_gpu") == kernels
    assert ("dot_general" in text) == (F == 256)


@pytest.mark.parametrize(
    ("M", "D", "F", "dtype", "named"),
    [
        (2, 512, 256, "bfloat16", "2 rows: takes one"),
        (1, 384, 256, "bfloat16", "D % 256"),
        (1, 512, 192, "bfloat16", "F of 128"),
        (1, 2048, 128, "bfloat16", "no warpgroup"),
        (1, 512, 256, "float32", "float32"),
    ],
)
def test_what_the_kernel_cannot_take_is_unsupported(M, D, F, dtype, named):
    arrays, _ = inputs(M, D, F, dtype=dtype)
    interpret = plgpu.InterpretGPUParams()
    with pytest.raises(Unsupported, match=named):
        mosaic.residual_norm_matmul(*arrays, eps=EPS, out=BF16, blocks=2, interpret=interpret)


def test_a_small_matrix_is_left_to_others():
    with pytest.raises(Unsupported, match="512, 1024"):
        lowered(1, 512, 1024, 1, "mosaic")


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (64,), "must be alike"),
        (1, (2, 64), r"y \(2, 64\)"),
        (3, (63,), r"next_w \(63,\)"),
        (4, (63, 8), r"matrix \(63, 8\) float32"),
        (4, (64,), r"matrix \(64,\) float32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, message):
    arrays, more = inputs(1, 64, 8, dtype="float32")
    arrays[place] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        residual_norm_matmul(*arrays, eps=EPS, out="float32", **more)


def test_another_dtype_or_scale_is_refused():
    arrays, _ = inputs(1, 64, 8, dtype="float32")
    with pytest.raises(ValueError, match=r"scale \(2,\) must be \[1\]"):
        residual_norm_matmul(*arrays, eps=EPS, out="float32", scale=jnp.ones(2))
    arrays[4] = arrays[4].astype(BF16)
    with pytest.raises(ValueError, match="bfloat16 must be"):
        residual_norm_matmul(*arrays, eps=EPS, out="float32")
