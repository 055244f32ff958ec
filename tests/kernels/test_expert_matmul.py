"""expert_matmul, every implementation, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DTYPES, jitted, on_hopper, require_gpu, rounded
from float64_reference import gelu
from jax.test_util import check_grads

from pallas_kernels import Unsupported
from pallas_kernels.expert_matmul import IMPLEMENTATIONS, expert_matmul
from pallas_kernels.expert_matmul.tiles import cut, tile_height

D, F = 128, 64

op = jitted(expert_matmul)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
both_forms = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def sorted_choice(n: int, E: int) -> np.ndarray:
    return np.sort(np.random.default_rng(n).integers(0, E, n))


INDICES = {
    "one row": (5, [3]),
    "fewer rows than a tile": (5, [4, 0, 2]),
    "one token": (9, [7, 0, 3, 8, 1, 6, 2, 5]),
    "one expert twice in a tile": (9, [7, 0, 3, 8, 8, 6, 2, 5]),
    "together but not in order": (6, [3] * 5 + [0] * 9 + [5] * 2 + [2] * 8),
    "all to the first": (3, [0] * 20),
    "all to the last, more rows than a tile": (4, [3] * 40),
    "most experts unvisited": (100, [0] * 17 + [50] * 3 + [99] * 4),
    "one expert": (1, [0] * 11),
    "every expert": (40, list(range(40))),
    "more rows than tiles": (4, [0] * 3 + [1] * 12 + [3] * 14),
    "decode of a batch": (16, sorted_choice(64, 16)),
    "prefill": (4, sorted_choice(200, 4)),
    "prefill, all to one": (2, [1] * 130),
    "prefill, borders on tiles": (3, [0] * 64 + [1] * 128 + [2] * 8),
}


def inputs(index, E: int, dtype: str, gated: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [n, D], w and index; values rounded to dtype and held in float32."""
    rng = np.random.default_rng(len(index))
    x = rounded(rng.standard_normal((len(index), D)), dtype)
    shape = (E, D, 2, F) if gated else (E, D, F)
    return x, rounded(rng.standard_normal(shape) * D**-0.5, dtype), np.asarray(index)


def run(
    implementation: str,
    x: np.ndarray,
    w: np.ndarray | jax.Array,
    index: np.ndarray,
    dtype: str,
    absent: bool = False,
    must_run: bool = False,
) -> np.ndarray:
    """In float32; skips where the implementation refuses the inputs, unless it must take them."""
    arguments = jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(index, jnp.int32)
    try:
        out = op(*arguments, absent=absent, implementation=implementation)
    except Unsupported as refusal:
        if must_run or implementation == "xla":
            raise
        pytest.skip(f"{implementation}: {refusal}")
    assert out.dtype == dtype
    assert out.shape == (len(index), w.shape[-1])
    return np.asarray(out, np.float32)


def expected(
    x: np.ndarray, w: np.ndarray | jax.Array, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n, F], and what a relative error of the sums of absolute values behind each element
    comes to in it: GELU has a slope of 1.13 at most."""
    x, F = x.astype(np.float64), w.shape[-1]
    y = np.empty((len(x), np.prod(w.shape[2:])))
    scale = np.empty_like(y)
    for e in np.unique(index):
        here, matrix = index == e, np.asarray(w[e], np.float64).reshape(w.shape[1], -1)
        y[here], scale[here] = x[here] @ matrix, abs(x[here]) @ abs(matrix)
    if w.ndim == 3:
        return y, scale
    (gate, up), (gate_scale, up_scale) = ((a[:, :F], a[:, F:]) for a in (y, scale))
    return gelu(gate) * up, 1.13 * gate_scale * abs(up) + abs(gelu(gate)) * up_scale


def assert_accurate(actual: np.ndarray, wanted: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    """Sums of 128 float32 products are off by 1e-6 of their scale, longer ones by no more, as
    their errors are partly opposed; bfloat16 rounds once."""
    out, scale = wanted
    limit = 2e-6 * scale + (2.0**-8 * abs(out) if dtype == "bfloat16" else 0)
    assert (abs(actual - out) <= limit).all(), f"off by {(abs(actual - out) / limit).max()} limits"


@every_implementation
@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", INDICES)
def test_each_row_meets_its_own_matrix(implementation, case, dtype, gated):
    E, index = INDICES[case]
    x, w, index = inputs(index, E, dtype, gated)
    assert_accurate(run(implementation, x, w, index, dtype), expected(x, w, index), dtype)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["decode of a batch", "prefill"])
def test_other_rows_and_matrices_do_not_change_a_bit(implementation, case, dtype):
    E, index = INDICES[case]
    x, w, index = inputs(index, E, dtype, gated=True)
    before = run(implementation, x, w, index, dtype)
    kept = np.random.default_rng(0).random(len(index)) < 0.3
    x[~kept] = np.nan
    w[np.setdiff1d(np.arange(E), index[kept])] = np.nan
    after = run(implementation, x, w, index, dtype)
    np.testing.assert_array_equal(after[kept], before[kept])


WITHOUT_A_MATRIX = ("one token", "more rows than tiles", "prefill")


@every_implementation
@pytest.mark.parametrize("case", WITHOUT_A_MATRIX)
def test_rows_without_a_matrix_leave_the_others_alone(implementation, case):
    """Those that name the last of E matrices, where there are E - 1."""
    E, index = INDICES[case]
    x, w, index = inputs(index, E, "bfloat16", gated=True)
    there = index < E - 1
    assert not there.all()
    x[~there] = np.nan
    out = run(implementation, x, w[:-1], index, "bfloat16", absent=True)
    assert_accurate(out[there], expected(x[there], w, index[there]), "bfloat16")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA keeps bits on a CPU only")
@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_for_any_number_of_rows(dtype, gated):
    """Of the reference on CPU. The kernel's own test is in `test_expert_matmul_mosaic`."""
    x, w, index = inputs(np.repeat(np.arange(12), 8), 12, dtype, gated)
    all_rows = run("xla", x, w, index, dtype)
    for some in ([5], [0, 13, 95], range(1, 96, 8), range(40), [*range(10, 30), *range(60, 75)]):
        some = list(some)
        out = run("xla", x[some], w, index[some], dtype)
        np.testing.assert_array_equal(out, all_rows[some])


@both_forms
def test_gradients(gated):
    """Of the reference: a small mixture can be trained."""
    x, w, index = inputs(sorted_choice(20, 3), 3, "float32", gated)

    @jax.jit
    def f(x, w):
        return expert_matmul(x, w, jnp.asarray(index), implementation="xla")

    check_grads(f, (x[:, :8], w[:, :8]), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("case", INDICES)
def test_tiles_hold_every_row_once(case):
    E, index = INDICES[case]
    n, height = len(index), tile_height(len(index), E)
    tiles = jax.jit(cut, static_argnums=(1, 2))(jnp.asarray(index), height, E)
    tiles = [np.asarray(x) for x in tiles]
    rows = []
    for tile, (first, count) in enumerate(zip(*tiles[:2], strict=True)):
        here = range(first, first + count)
        assert len({index[row] for row in here}) <= 1
        assert len({row // height for row in here}) <= 1
        assert all(tiles[2][row] == tile for row in here)
        rows += here
    assert sorted(rows) == list(range(n))
    assert 0 <= tiles[0].min() <= tiles[0].max() < n


@pytest.mark.parametrize("case", WITHOUT_A_MATRIX)
def test_no_tile_holds_rows_without_a_matrix(case):
    E, index = INDICES[case]
    tiles = cut(jnp.asarray(index), tile_height(len(index), E - 1), E - 1, absent=True)
    held = [row for first, n in zip(*tiles[:2], strict=True) for row in range(first, first + n)]
    assert sorted(held) == np.flatnonzero(np.asarray(index) < E - 1).tolist()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": (6, 7)}, ["x (6, 7)", "w (4, 8, 16)"]),
        ({"x": (6, 1, 8)}, ["x (6, 1, 8)"]),
        ({"x": (0, 8), "index": (0,)}, ["x (0, 8)", "at least 1"]),
        ({"w": (8, 16)}, ["w (8, 16)"]),
        ({"w": (4, 8, 3, 16)}, ["w (4, 8, 3, 16)", "2 matrices"]),
        ({"w_dtype": jnp.bfloat16}, ["float32", "bfloat16"]),
        ({"index": (5,)}, ["index (5,)", "x (6, 8)"]),
        ({"index": (6, 1)}, ["index (6, 1)", "x (6, 8)"]),
        ({"x": (1, 8), "index": (6, 1)}, ["index (6, 1)", "[n], n >= 1", "x (1, 8)"]),
        ({"x": (1, 8), "index": (0,)}, ["index (0,)", "[n], n >= 1", "x (1, 8)"]),
        ({"index_dtype": jnp.float32}, ["float32", "must be integer"]),
        ({"implementation": "nope"}, ["'nope' does not exist: take 'mosaic', 'xla'"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, named):
    given = {"x": (6, 8), "w": (4, 8, 16), "index": (6,), "implementation": None} | changes
    arrays = [
        jax.ShapeDtypeStruct(given["x"], jnp.float32),
        jax.ShapeDtypeStruct(given["w"], given.get("w_dtype", jnp.float32)),
        jax.ShapeDtypeStruct(given["index"], given.get("index_dtype", jnp.int32)),
    ]
    with pytest.raises(ValueError) as error:
        jax.eval_shape(
            lambda *a: expert_matmul(*a, implementation=given["implementation"]), *arrays
        )
    assert all(name in str(error.value) for name in named), str(error.value)


# --- On a GPU: the experts of 26B-A4B, which its kernel is for ------------------------------------

EACH = 8  # experts of a token
MOST = 160  # tokens; their rows go by tiles of 64, those of up to 128 tokens by tiles of 8
PUBLISHED = {"gate_up": (128, 2816, 2, 704), "down": (128, 704, 2816)}

of_26b_a4b = pytest.mark.parametrize("product", PUBLISHED)


@functools.lru_cache(maxsize=1)
def published(product: str) -> tuple[np.ndarray, jax.Array, np.ndarray]:
    """x [MOST, EACH, D], w on the GPU, and index [MOST, EACH]: other experts for each token."""
    require_gpu()
    E, D, *_ = shape = PUBLISHED[product]
    w = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * D**-0.5
    rng = np.random.default_rng(0)
    x = rounded(rng.standard_normal((MOST, EACH, D)), "bfloat16")
    return x, w, np.stack([rng.permutation(E)[:EACH] for _ in range(MOST)])


def of_tokens(product: str, tokens: np.ndarray) -> np.ndarray:
    """[tokens, EACH, F] by the kernel, which gets their rows as the model gives them: sorted by
    expert, but for a token alone."""
    x, w, index = published(product)
    index = index[tokens].reshape(-1)
    order = np.argsort(index, kind="stable") if len(tokens) > 1 else np.arange(EACH)
    rows = x[tokens].reshape(-1, x.shape[-1])[order]
    out = run("mosaic", rows, w, index[order], "bfloat16", must_run=on_hopper())
    return out[np.argsort(order)].reshape(len(tokens), EACH, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 5, 64, MOST])
@of_26b_a4b
def test_the_published_experts(product, n):
    x, w, index = published(product)
    out = of_tokens(product, np.arange(n))
    wanted = expected(x[:n].reshape(n * EACH, -1), w, index[:n].reshape(-1))
    assert_accurate(out.reshape(n * EACH, -1), wanted, "bfloat16")


@pytest.mark.gpu
@of_26b_a4b
def test_one_row_for_all_its_matrices_has_the_bits_of_many(product):
    x, w, index = published(product)
    for token in (0, 7, MOST - 1):
        one = x[token, :1]
        out = run("mosaic", one, w, index[token], "bfloat16", must_run=on_hopper())
        rows = np.repeat(one, EACH, 0)
        np.testing.assert_array_equal(out, run("mosaic", rows, w, index[token], "bfloat16"))


@pytest.mark.gpu
@of_26b_a4b
def test_a_token_of_the_kernel_has_the_same_bits_among_any_number(product):
    most = of_tokens(product, np.arange(MOST))
    for first, n in [(0, 1), (MOST - 1, 1), (0, 2), (3, 5), (5, 8), (77, 16), (90, 64)]:
        tokens = np.arange(first, first + n)
        np.testing.assert_array_equal(of_tokens(product, tokens), most[tokens])
