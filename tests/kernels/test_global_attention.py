"""global_attention, every implementation and both forms of cache, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DTYPES,
    GARBAGE,
    GLOBAL,
    PUBLISHED_GLOBAL,
    Fill,
    Heads,
    History,
    assert_accurate,
    blank,
    call,
    garbage,
    history,
    jitted,
    on_hopper,
    require_gpu,
)

from pallas_kernels import global_attention
from pallas_kernels.global_attention import IMPLEMENTATIONS

S = 320
COMPACT, PLAIN = GLOBAL[0], GLOBAL[-1]

op = jitted(global_attention)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
both_forms = pytest.mark.parametrize("heads", [COMPACT, PLAIN], ids=["compact", "plain"])


def edges(T: int, S: int = S) -> list[int]:
    """Lengths around multiples of 64, and those that fill the cache to its last slots."""
    return sorted({0, 1, 63, 64, 65, 127, 128, 129, 192, S - T - 1, S - T})


def caches(h: History, S: int = S, fill: Fill = garbage):
    """The arguments of the op: slots past the newest position hold `fill`. New positions past the
    end of the cache are dropped."""
    filled = {}
    for name in ("k", "v", "k_rotated"):
        rows = getattr(h, name)
        filled[name] = fill((*rows.shape[:2], S, rows.shape[3]))
        for b, length in enumerate(h.length):
            end = min(length + h.T, S)
            filled[name][b, :, :end] = rows[b, :, :end]
    return h.forms(**filled)


def check(implementation, heads, dtype, T, S=S):
    h = history(heads, dtype, edges(T, S), T)
    assert_accurate(call(op, implementation, caches(h, S)), h.expected(), dtype)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", GLOBAL, ids=str)
@pytest.mark.parametrize("T", [1, 4, 16])
def test_all_lengths_at_the_head_groups_of_the_published_sizes(implementation, heads, dtype, T):
    check(implementation, heads, dtype, T)


@every_implementation
@pytest.mark.parametrize("T", [2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
def test_every_number_of_new_positions(implementation, T):
    check(implementation, COMPACT, "float32", T)


@every_implementation
@pytest.mark.parametrize("heads", [PUBLISHED_GLOBAL[1], PUBLISHED_GLOBAL[-1]], ids=str)
def test_small_caches_of_the_published_widths(implementation, heads):
    check(implementation, heads, "bfloat16", T=4)


@every_implementation
@both_forms
def test_a_cache_that_is_no_multiple_of_64(implementation, heads):
    check(implementation, heads, "float32", T=3, S=301)


@every_implementation
@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 4])
def test_slots_past_the_newest_position_do_not_change_a_bit(implementation, heads, dtype, T):
    h = history(heads, dtype, edges(T), T)
    clean, huge = (call(op, implementation, caches(h, fill=fill)) for fill in (blank, garbage))
    np.testing.assert_array_equal(huge, clean)


@every_implementation
@both_forms
def test_later_proposals_do_not_change_earlier_positions(implementation, heads):
    """Position t of a verify step reads nothing of the proposals after it."""
    h = history(heads, "float32", edges(4), T=4)
    arguments, keywords = caches(h)
    before = call(op, implementation, (arguments, keywords))
    q, k, v, length = arguments
    b = np.arange(len(h.length))
    k, v = (None if x is None else x.at[b, :, length + 2].set(0.5) for x in (k, v))
    after = call(op, implementation, ([q, k, v, length], keywords))
    np.testing.assert_array_equal(after[:, :2], before[:, :2])
    assert (after[:, 2:] != before[:, 2:]).any(axis=(1, 2, 3)).all()


@every_implementation
@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_beside_other_rows(implementation, heads, dtype):
    """For one batch size: XLA's products on CPU add up in another order for another one."""
    h = history(heads, dtype, edges(4), T=4)
    arguments, keywords = caches(h)
    out = call(op, implementation, (arguments, keywords))

    def taken(rows: np.ndarray) -> np.ndarray:
        return call(op, implementation, jax.tree.map(lambda x: x[rows], (arguments, keywords)))

    order = np.roll(np.arange(len(h.length)), 5)
    np.testing.assert_array_equal(taken(order), out[order])
    same = np.full(len(h.length), 7)
    np.testing.assert_array_equal(taken(same), out[same])


SHAPES = {
    "q": (2, 4, 6, 8),
    "k": (2, 3, 64, 8),
    "v": (2, 3, 64, 8),
    "q_rotated": (2, 4, 6, 4),
    "k_rotated": (2, 3, 64, 4),
}
LENGTH = jax.ShapeDtypeStruct((2,), jnp.int32)
IN_PLAIN, IN_COMPACT = ("q", "k", "v"), ("q", "v", "q_rotated", "k_rotated")


def refused(given: tuple[str, ...], **changes: tuple[int, ...]) -> str:
    """What the op says about arrays of SHAPES with these changes, only those `given`."""
    shapes = SHAPES | changes
    arrays = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in given}
    positional = [arrays.pop(name, None) for name in ("q", "k", "v")]
    with pytest.raises(ValueError) as error:
        jax.eval_shape(global_attention, *positional, LENGTH, **arrays)
    return str(error.value)


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        (IN_PLAIN, {"k": (2, 3, 63, 8)}, ["k (2, 3, 63, 8)", "v (2, 3, 64, 8)"]),
        (IN_PLAIN, {"k": (2, 3, 64, 10)}, ["k (2, 3, 64, 10)"]),
        (IN_PLAIN, {"v": (2, 4, 64, 8)}, ["q (2, 4, 6, 8)", "v (2, 4, 64, 8)"]),
        (IN_PLAIN, {"v": (2, 3, 64)}, ["q (2, 4, 6, 8)", "v (2, 3, 64)"]),
        (IN_COMPACT, {"k_rotated": (2, 3, 65, 4)}, ["k_rotated (2, 3, 65, 4)", "v (2, 3, 64, 8)"]),
        (IN_COMPACT, {"k_rotated": (2, 3, 64, 6)}, ["q_rotated", "k_rotated (2, 3, 64, 6)"]),
        (IN_COMPACT, {"q_rotated": (2, 4, 3, 4)}, ["q_rotated (2, 4, 3, 4)", "q (2, 4, 6, 8)"]),
        (IN_COMPACT, {"q_rotated": (2, 1, 3, 4)}, ["q_rotated (2, 1, 3, 4)", "q (2, 4, 6, 8)"]),
        (IN_COMPACT, {"q_rotated": (1, 4, 6, 4)}, ["q_rotated (1, 4, 6, 4)", "q (2, 4, 6, 8)"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(form, changes, named):
    message = refused(form, **changes)
    assert all(name in message for name in named), message


@pytest.mark.parametrize(
    "given",
    [
        ("q", "v"),
        ("q", "k", "v", "q_rotated", "k_rotated"),
        ("q", "v", "q_rotated"),
        ("q", "v", "k_rotated"),
        ("q", "k", "v", "q_rotated"),
        ("q", "k", "v", "k_rotated"),
    ],
)
def test_anything_but_one_form_of_cache_is_refused(given):
    assert "either k (plain cache), or q_rotated and k_rotated" in refused(given)


# --- On a GPU: the published shapes, which its kernels are for -----------------------------------

MOST = 16  # new positions


@functools.cache
def published(heads: Heads) -> tuple[History, tuple[np.ndarray, np.ndarray], tuple[list, dict]]:
    """Rows at the edges of tiles, where the kernel's splits grow by a tile (within the new
    positions of some), and where the cache ends; what must come out; the arguments, on the GPU.

    MOST new positions in each. In the last rows some of them do not fit: see `step`.
    """
    require_gpu()
    grow = 64 * (getattr(jax.devices()[0], "core_count", 132) // heads.K)
    S = grow + 128
    lengths = {0, 1, 63, 64, 65} | {grow - n for n in (16, 15, 7, 3, 1, 0)}
    lengths |= {S - n for n in (16, 8, 4, 2, 1)}
    h = history(heads, "bfloat16", sorted(lengths), MOST)
    return h, h.expected(), caches(h, S)


def step(heads: Heads, T: int, kept: int | None = None, fill: float = GARBAGE):
    """The arguments with T new positions, in the rows that have room for them.

    Slots past the first `kept` (T) of the new positions hold `fill`.
    """
    h, _, ((q, k, v, length), keywords) = published(heads)
    rows = slice(0, int((h.length + T <= v.shape[2]).sum()))
    kept = T if kept is None else kept

    def cached(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else overwritten(x[rows], length[rows], kept, fill)

    k, v = cached(k), cached(v)
    if keywords:
        rotated = cached(keywords["k_rotated"])
        keywords = {"q_rotated": keywords["q_rotated"][rows, :T], "k_rotated": rotated}
    return [q[rows, :T], k, v, length[rows]], keywords


@jax.jit
def overwritten(cache: jax.Array, length: jax.Array, kept: int, fill: float) -> jax.Array:
    """`fill` in the slots of all new positions but the first `kept`, and after them."""
    changed = jnp.arange(cache.shape[2]) >= length[:, None] + kept
    return jnp.where(changed[:, None, :, None], jnp.asarray(fill, cache.dtype), cache)


@pytest.mark.gpu
@every_implementation
@pytest.mark.parametrize("T", [1, 2, 4, 5, 8, MOST])
@pytest.mark.parametrize("heads", PUBLISHED_GLOBAL, ids=str)
def test_the_published_shapes(implementation, heads, T):
    out = call(op, implementation, step(heads, T), must_run=on_hopper())
    expected = [x[: len(out), :T] for x in published(heads)[1]]
    assert_accurate(out, expected, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", PUBLISHED_GLOBAL, ids=str)
def test_a_row_of_the_kernel_has_the_same_bits_in_every_call(heads):
    """Whatever T, the batch and the later proposals are, and where splits change their size."""
    run = functools.partial(call, op, "mosaic", must_run=on_hopper())
    verified = run(step(heads, MOST))
    B = len(verified)
    every = heads == PUBLISHED_GLOBAL[0]
    # With 4 query heads on a KV head, 3, 5 and 9 give rows that are no multiple of 8.
    for T in range(1, MOST) if every else (1, 2, 3, 4, 5, 8, 9):
        np.testing.assert_array_equal(run(step(heads, T))[:B], verified[:, :T])
    changed = run(step(heads, MOST, kept=2, fill=0.5))
    np.testing.assert_array_equal(changed[:, :2], verified[:, :2])
    assert (changed[:, 2:] != verified[:, 2:]).any(axis=(1, 2, 3)).all()
    arguments = step(heads, 1)
    for b in range(B):
        alone = run(jax.tree.map(lambda x, b=b: x[b : b + 1], arguments))
        np.testing.assert_array_equal(alone, verified[b : b + 1, :1])
    eight = slice(B - 8, B)
    some = run(jax.tree.map(lambda x: x[eight], arguments))
    np.testing.assert_array_equal(some, verified[eight, :1])
