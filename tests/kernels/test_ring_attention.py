"""ring_attention, every implementation, against float64 over the whole history."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DTYPES,
    GARBAGE,
    LOCAL,
    PUBLISHED_LOCAL,
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
    rounded,
)

from pallas_kernels import ring_attention
from pallas_kernels.ring_attention import IMPLEMENTATIONS

W, R = 64, 128  # a window and its ring, as 1024 and 1088 are in the large sizes
EDGES = sorted({0, 1, 63, 64, 65, W - 1, W, W + 1, R - 1, R, R + 1, 3 * W, 3 * W + 1, 5 * R - 1})
HEADS = LOCAL[0]

op = jitted(ring_attention)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def rings(h: History, R: int, window: int, fill: Fill = garbage, proposed: int = 0):
    """The arguments of the op: each position written to its slot in turn, as a model would.

    Slots that no query may read hold `fill`: those never written, those of positions older than
    the window of the first query, and those of `proposed` positions after the last query (which a
    rejected proposal wrote before the queries' own step).
    """
    B, K, _, H = h.v.shape
    ring = {"k": fill((B, K, R, H)), "v": fill((B, K, R, H))}
    other = {name: fill((K, H)) for name in ring}
    for b, length in enumerate(h.length):
        positions = [*range(length), *range(length + h.T, length + h.T + proposed)]
        positions += range(length, length + h.T)
        for p in positions:
            readable = length - window < p < length + h.T
            for name, array in ring.items():
                array[b, :, p % R] = getattr(h, name)[b, :, p] if readable else other[name]
    k, v = (jnp.asarray(ring[name], h.dtype) for name in "kv")
    return [h.queries(), k, v, h.lengths()], {"window": window}


def check(implementation, heads, dtype, T, W=W, R=R, lengths=EDGES):
    h = history(heads, dtype, lengths, T)
    out = call(op, implementation, rings(h, R, W))
    assert_accurate(out, h.expected(window=W), dtype)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", LOCAL, ids=str)
@pytest.mark.parametrize("T", [1, 4, 16])
def test_all_lengths_at_the_head_groups_of_the_published_sizes(implementation, heads, dtype, T):
    check(implementation, heads, dtype, T)


@every_implementation
@pytest.mark.parametrize("T", [2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
def test_every_number_of_new_positions(implementation, T):
    check(implementation, HEADS, "float32", T)


@every_implementation
@pytest.mark.parametrize(
    ("W", "R", "T"),
    [(64, 64, 1), (64, 79, 16), (1, 64, 1), (1, 2, 2), (37, 128, 5), (100, 192, 4), (113, 128, 16)],
)
def test_odd_windows_and_rings_with_no_slot_to_spare(implementation, W, R, T):
    lengths = sorted({0, 1, W - 1, W, W + 1, R - T, R - 1, R, R + 1, 3 * R + 2})
    check(implementation, HEADS, "float32", T, W, R, lengths)


@every_implementation
@pytest.mark.parametrize(("W", "R", "T"), [(64, 128, 4), (64, 64, 1), (37, 128, 5), (113, 128, 16)])
def test_small_rings_of_the_published_widths(implementation, W, R, T):
    lengths = sorted({0, 1, W - 1, W, W + 1, R - T, R - 1, R, R + 1, 3 * R + 2})
    check(implementation, PUBLISHED_LOCAL[-1], "bfloat16", T, W, R, lengths)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 4])
def test_what_a_row_may_not_read_does_not_change_a_bit(implementation, dtype, T):
    h = history(HEADS, dtype, EDGES, T)
    outs = [
        call(op, implementation, rings(h, R, W, fill, proposed))
        for fill in (blank, garbage)
        for proposed in (0, R - W - T + 1)  # as many as the ring has slots for
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@every_implementation
@pytest.mark.parametrize("distance", [W, W - 1])
def test_the_window_has_one_edge(implementation, distance):
    """A new key at distance W leaves the query as it was, one at distance W - 1 does not."""
    h = history(HEADS, "float32", [W - 1, W, W + 1, R - 1, R, R + 1, 3 * W], T=1)
    (q, k, v, length), keywords = rings(h, R, W)
    before = call(op, implementation, ([q, k, v, length], keywords))
    b, slot = jnp.arange(len(h.length)), (length - distance) % R
    for changed in ([q, k.at[b, :, slot].set(0.5), v], [q, k, v.at[b, :, slot].set(0.5)]):
        after = call(op, implementation, ([*changed, length], keywords))
        for row in np.flatnonzero(h.length >= distance):
            assert np.array_equal(after[row], before[row]) == (distance == W)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_beside_other_rows(implementation, dtype):
    """For one batch size: XLA's products on CPU add up in another order for another one."""
    arguments, keywords = rings(history(HEADS, dtype, EDGES, T=4), R, W)
    out = call(op, implementation, (arguments, keywords))
    order = np.roll(np.arange(len(EDGES)), 5)
    moved = call(op, implementation, ([x[order] for x in arguments], keywords))
    np.testing.assert_array_equal(moved, out[order])
    same = np.full(len(EDGES), 7)
    repeated = call(op, implementation, ([x[same] for x in arguments], keywords))
    np.testing.assert_array_equal(repeated, out[same])


def refused(
    *, window=32, implementation=None, length_dtype=jnp.int32, **changes: tuple[int, ...]
) -> str:
    """What the op says about a step of 4 positions over 64 slots with these shapes changed."""
    shapes = {"q": (2, 4, 6, 8), "k": (2, 3, 64, 8), "v": (2, 3, 64, 8), "length": (2,)} | changes
    arrays = {
        name: jax.ShapeDtypeStruct(shape, length_dtype if name == "length" else jnp.float32)
        for name, shape in shapes.items()
    }
    chosen = {"window": window, "implementation": implementation}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda **given: ring_attention(**given, **chosen), **arrays)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q": (2, 4, 8)}, ["q (2, 4, 8)", "v (2, 3, 64, 8)"]),
        ({"q": (1, 4, 6, 8)}, ["q (1, 4, 6, 8)", "v (2, 3, 64, 8)"]),
        ({"q": (2, 4, 6, 16)}, ["q (2, 4, 6, 16)", "v (2, 3, 64, 8)"]),
        ({"q": (2, 4, 7, 8)}, ["q (2, 4, 7, 8)", "K must divide N"]),
        ({"q": (2, 0, 6, 8)}, ["q (2, 0, 6, 8)", "T must be at least 1"]),
        ({"k": (2, 3, 63, 8)}, ["k (2, 3, 63, 8)", "v (2, 3, 64, 8)"]),
        ({"k": (2, 1, 64, 8)}, ["k (2, 1, 64, 8)", "v (2, 3, 64, 8)"]),
        ({"k": (2, 3, 64, 6)}, ["k (2, 3, 64, 6)"]),
        ({"length": (1,)}, ["length (1,)", "[2]"]),
        ({"length": ()}, ["length ()", "[2]"]),
        ({"length_dtype": jnp.float32}, ["length (2,) float32", "must be integer"]),
        ({"window": 0}, ["window 0"]),
        ({"window": 62}, ["64 slots", "window 62 and 4 new positions", "R >= 65"]),
        ({"window": 1000}, ["64 slots", "window 1000 and 4 new positions", "R >= 1003"]),
        ({"implementation": "nope"}, ["'nope' does not exist: take 'mosaic', 'xla'"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, named):
    message = refused(**changes)
    assert all(name in message for name in named), message


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2e-5), ("bfloat16", 2**-6)])
def test_the_yardstick_catches_one_wrong_element(dtype, share):
    out, scale = history(HEADS, dtype, [5], T=1).expected(window=W)
    right = rounded(out, dtype)
    assert_accurate(right, (out, scale), dtype)
    right[0, 0, 1, 7] += share * scale[0, 0, 1, 7]
    with pytest.raises(AssertionError, match=r"rms error|off by"):
        assert_accurate(right, (out, scale), dtype)


# --- On a GPU: the published shapes, which its kernels are for -----------------------------------

MOST = 16  # new positions


@functools.cache
def published(heads: Heads) -> tuple[History, tuple[np.ndarray, np.ndarray], tuple[list, dict]]:
    """A row for each edge of the window and the ring, MOST new positions in each; what must come
    out; the arguments, on the GPU."""
    require_gpu()
    W, R = heads.W, heads.W + 64
    lengths = sorted({0, 1, 63, 64, 65, W - 1, W, W + 1, R - 1, R, R + 1, 3 * W})
    h = history(heads, "bfloat16", lengths, MOST)
    return h, h.expected(window=W), rings(h, R, W)


def step(heads: Heads, T: int, kept: int | None = None, fill: float = GARBAGE):
    """The arguments with T new positions, of which those from `kept` (T) on are `fill`."""
    (q, k, v, length), keywords = published(heads)[2]
    kept = T if kept is None else kept
    k, v = (overwritten(x, length, kept, fill) for x in (k, v))
    return [q[:, :T], k, v, length], keywords


@jax.jit
def overwritten(ring: jax.Array, length: jax.Array, kept: int, fill: float) -> jax.Array:
    """`fill` in the slots of all new positions but the first `kept`."""
    R = ring.shape[2]
    t = (jnp.arange(R) - length[:, None]) % R
    changed = (t >= kept) & (t < MOST)
    return jnp.where(changed[:, None, :, None], jnp.asarray(fill, ring.dtype), ring)


@pytest.mark.gpu
@every_implementation
@pytest.mark.parametrize("T", [1, 2, 4, 5, 8, MOST])
@pytest.mark.parametrize("heads", PUBLISHED_LOCAL, ids=str)
def test_the_published_shapes(implementation, heads, T):
    expected = [x[:, :T] for x in published(heads)[1]]
    out = call(op, implementation, step(heads, T), must_run=on_hopper())
    assert_accurate(out, expected, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", PUBLISHED_LOCAL, ids=str)
def test_a_row_of_the_kernel_has_the_same_bits_in_every_call(heads):
    """Whatever T, the batch and the later proposals are."""
    run = functools.partial(call, op, "mosaic", must_run=on_hopper())
    verified = run(step(heads, MOST))
    every = heads == PUBLISHED_LOCAL[-1]
    # With 2 and 4 query heads on a KV head, 3, 5, 6 and 9 give rows that are no multiple of 8.
    for T in range(1, MOST) if every else (1, 2, 3, 4, 5, 6, 8, 9):
        np.testing.assert_array_equal(run(step(heads, T)), verified[:, :T])
    changed = run(step(heads, MOST, kept=2, fill=0.5))
    np.testing.assert_array_equal(changed[:, :2], verified[:, :2])
    assert (changed[:, 2:] != verified[:, 2:]).any(axis=(1, 2, 3)).all()
    arguments, keywords = step(heads, 1)
    for b in range(len(verified)):
        alone = run(([x[b : b + 1] for x in arguments], keywords))
        np.testing.assert_array_equal(alone, verified[b : b + 1, :1])
    eight = slice(1, 9)
    some = run(([x[eight] for x in arguments], keywords))
    np.testing.assert_array_equal(some, verified[eight, :1])
