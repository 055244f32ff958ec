"""prefill_attention, every implementation, global and windowed, against float64."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DTYPES,
    PUBLISHED_GLOBAL,
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
)

from pallas_kernels import prefill_attention
from pallas_kernels.prefill_attention import IMPLEMENTATIONS
from pallas_kernels.prefill_attention.xla import KEY_BLOCK, QUERY_BLOCK

COMPACT, PLAIN = Heads("compact", 1, 2, 16, P=4), Heads("plain", 2, 1, 16)
SLIDING = Heads("sliding", 1, 2, 16)

op = jitted(prefill_attention)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def whole(h: History, S: int, fill: Fill = garbage):
    """Arguments over a global cache: key s at position s, `fill` after the chunk."""
    filled = {}
    for name in ("k", "v", "k_rotated"):
        rows = getattr(h, name)
        filled[name] = fill((*rows.shape[:2], S, rows.shape[3]))
        for b, length in enumerate(h.length):
            filled[name][b, :, : length + h.T] = rows[b, :, : length + h.T]
    return h.forms(**filled)


def spans(h: History, past: int, window: int, fill: Fill = garbage):
    """Arguments over (past, chunk): `fill` before position 0 and where no query may look."""
    B, K, _, H = h.v.shape
    span = {name: fill((B, K, past + h.T, H)) for name in "kv"}
    for b, length in enumerate(h.length):
        first = max(0, length - past, length - window + 1)
        for name, array in span.items():
            kept = getattr(h, name)[b, :, first : length + h.T]
            array[b, :, past - (length - first) :] = kept
    k, v = (jnp.asarray(span[name], h.dtype) for name in "kv")
    return [h.queries(), k, v, h.lengths()], {"window": window}


def spread(T: int, S: int) -> list[int]:
    """Lengths from an empty cache to a full one, block borders among them."""
    some = {0, 1, KEY_BLOCK - T, KEY_BLOCK - T + 1, S - T}
    return sorted(n for n in some if 0 <= n <= S - T)


@every_implementation
@pytest.mark.parametrize("heads", [COMPACT, PLAIN], ids=str)
@pytest.mark.parametrize(
    ("T", "S"),
    [
        (1, KEY_BLOCK + 64),
        (63, KEY_BLOCK),
        (64, KEY_BLOCK + 1),
        (65, 2 * KEY_BLOCK + 192),
        (512, 2 * KEY_BLOCK),
        (513, KEY_BLOCK),
        (513, KEY_BLOCK + 576),
    ],
)
def test_a_chunk_over_a_global_cache(implementation, heads, T, S):
    h = history(heads, "float32", spread(T, S), T)
    assert_accurate(call(op, implementation, whole(h, S)), h.expected(), "float32")


@every_implementation
@pytest.mark.parametrize(("T", "S"), [(64, KEY_BLOCK), (65, 2 * KEY_BLOCK + 192)])
def test_a_chunk_over_a_global_cache_in_bfloat16(implementation, T, S):
    h = history(COMPACT, "bfloat16", spread(T, S), T)
    assert_accurate(call(op, implementation, whole(h, S)), h.expected(), "bfloat16")


def check_window(implementation: str, dtype: str, T: int, past: int, window: int) -> None:
    h = history(SLIDING, dtype, sorted({0, 1, window - 1, window, past + 1}), T)
    out = call(op, implementation, spans(h, past, window))
    assert_accurate(out, h.expected(window=window, oldest=past), dtype)


@every_implementation
@pytest.mark.parametrize(
    ("T", "past", "window"),
    [
        (1, 64, 64),
        (63, 64, 64),
        (64, 63, 64),  # no key to spare
        (65, 70, 64),  # a past that is no multiple of 64
        (513, 128, 100),
        (513, 0, 64),  # no past
        (40, 10, 64),  # a past shorter than the window: the rest is not in sight
        (QUERY_BLOCK + 90, 640, 600),  # a window longer than a block of queries
        (2 * QUERY_BLOCK + 3, 21, 17),
        (65, 0, 1),
    ],
)
def test_a_chunk_through_a_window(implementation, T, past, window):
    check_window(implementation, "float32", T, past, window)


@every_implementation
@pytest.mark.parametrize(("T", "past", "window"), [(65, 70, 64), (513, 128, 100)])
def test_a_chunk_through_a_window_in_bfloat16(implementation, T, past, window):
    check_window(implementation, "bfloat16", T, past, window)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_chunk_may_not_read_does_not_change_a_bit(implementation, dtype):
    h = history(COMPACT, dtype, [0, 1, 700, 1500], T=65)
    clean, huge = (
        call(op, implementation, whole(h, 2 * KEY_BLOCK + 192, fill)) for fill in (blank, garbage)
    )
    np.testing.assert_array_equal(huge, clean)
    h = history(SLIDING, dtype, [0, 1, 63, 64, 200], T=65)
    clean, huge = (call(op, implementation, spans(h, 70, 64, fill)) for fill in (blank, garbage))
    np.testing.assert_array_equal(huge, clean)


@every_implementation
def test_a_long_row_does_not_change_a_short_one(implementation):
    """The longest row decides how many blocks are walked; the others get the same bits."""
    h = history(COMPACT, "float32", [5, 100, 1500], T=65)
    arguments, keywords = whole(h, 2 * KEY_BLOCK + 192)
    together = call(op, implementation, (arguments, keywords))
    rows = np.array([0, 1, 1])
    short = call(op, implementation, jax.tree.map(lambda x: x[rows], (arguments, keywords)))
    np.testing.assert_array_equal(short, together[rows])


@every_implementation
@pytest.mark.parametrize("distance", [64, 63])
def test_the_window_has_one_edge(implementation, distance):
    """A new key at distance W leaves a query as it was, one at distance W - 1 does not."""
    h = history(SLIDING, "float32", [0, 1, 100], T=130)
    (q, k, v, length), keywords = spans(h, past=64, window=64, fill=blank)
    before = call(op, implementation, ([q, k, v, length], keywords))
    for t in (0, 63, 64, 100, 129):
        index = 64 + t - distance
        for changed in ([q, k.at[:, :, index].set(0.5), v], [q, k, v.at[:, :, index].set(0.5)]):
            after = call(op, implementation, ([*changed, length], keywords))
            for row in np.flatnonzero(h.length + t >= distance):
                same = np.array_equal(after[row, t], before[row, t])
                assert same == (distance == 64), (row, t)


def refused(*, window=None, implementation=None, **changes: tuple[int, ...] | None) -> str:
    """What the op says about a plain chunk with these shapes changed; None = not given."""
    shapes = {"q": (2, 8, 6, 8), "k": (2, 3, 64, 8), "v": (2, 3, 64, 8), "length": (2,)} | changes
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if name == "length" else jnp.float32)
        for name, shape in shapes.items()
        if shape is not None
    }
    chosen = {"window": window, "implementation": implementation}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(
            lambda k=None, **others: prefill_attention(k=k, **others, **chosen), **arrays
        )
    return str(error.value)


def test_shapes_that_do_not_fit_are_refused_by_name():
    assert "k (2, 3, 63, 8) and v (2, 3, 64, 8)" in refused(k=(2, 3, 63, 8))
    assert "q (2, 8, 7, 8)" in refused(q=(2, 8, 7, 8))
    assert "length (3,)" in refused(length=(3,))
    assert "window 0 over 64 keys for 8 queries" in refused(window=0)
    fewer = (2, 3, 7, 8)
    assert "window 4 over 7 keys for 8 queries" in refused(k=fewer, v=fewer, window=4)
    assert "'nope' does not exist: take" in refused(implementation="nope")


def test_a_window_takes_plain_keys_only():
    rotated = {"q_rotated": (2, 8, 6, 4), "k_rotated": (2, 3, 64, 4)}
    assert "plain keys" in refused(k=None, window=4, **rotated)
    assert "either k (plain cache)" in refused(k=None)


def test_rotated_queries_that_do_not_fit_are_refused_by_name():
    message = refused(k=None, q_rotated=(2, 1, 3, 4), k_rotated=(2, 3, 64, 4))
    assert "q_rotated (2, 1, 3, 4)" in message
    assert "q (2, 8, 6, 8)" in message


# --- On a GPU: the published heads, which its kernel is for ---------------------------------------

PAST = 2048
# Positions of the chunk; those before it in each of two sequences. The first fills a global cache
# beside the first chunk of a prompt; the others begin inside tiles, some with less behind them
# than a window.
CHUNKS = {
    "after 2048 and 0": (1024, (PAST, 0)),
    "after 1999 and 77": (1024, (1999, 77)),
    "one block": (64, (3, 1999)),
}

published_heads = pytest.mark.parametrize(
    "heads",
    PUBLISHED_LOCAL + PUBLISHED_GLOBAL,
    ids=lambda heads: f"{heads}-{'local' if heads.W else 'global'}",
)


def chunk(heads: Heads, dtype: str, length: Sequence[int], T: int) -> History:
    """As `history`, but for the widths of q that RoPE turns, which are 0 in the compact form."""
    h = history(heads, dtype, length, T)
    h.q[..., np.arange(heads.H) % (heads.H // 2) < heads.P // 2] = 0
    return h


def sample(T: int) -> list[int]:
    """Queries of every block of 64, each elsewhere in its own, and both ends of the first."""
    return sorted({t for t in (0, 1, 62, 63, 64, T - 1, *range(37, T, 61)) if t < T})


@functools.lru_cache(maxsize=1)  # both implementations in turn
def published(heads: Heads, name: str) -> tuple[tuple[list, dict], tuple[np.ndarray, np.ndarray]]:
    """The arguments, on the GPU, and what must come out for the queries of `sample`."""
    require_gpu()
    T, length = CHUNKS[name]
    h = chunk(heads, "bfloat16", length, T)
    arguments = whole(h, PAST + T) if heads.W is None else spans(h, heads.W, heads.W)
    return arguments, h.expected(heads.W, heads.W, sample(T))


@pytest.mark.gpu
@every_implementation
@pytest.mark.parametrize("name", CHUNKS)
@published_heads
def test_the_published_heads(implementation, name, heads):
    arguments, expected = published(heads, name)
    out = call(op, implementation, arguments, must_run=on_hopper())
    assert np.isfinite(out).all()
    assert_accurate(out[:, sample(out.shape[1])], expected, "bfloat16")


@pytest.mark.gpu
@published_heads
def test_a_row_of_the_kernel_has_the_same_bits_in_every_call(heads):
    """Beside another, the same two again, and alone."""
    run = functools.partial(call, op, "mosaic", must_run=on_hopper())
    (arrays, keywords), _ = published(heads, "after 1999 and 77")
    both = run((arrays, keywords))
    np.testing.assert_array_equal(run((arrays, keywords)), both)
    for b in range(len(both)):
        alone = [None if x is None else x[b : b + 1] for x in arrays]
        rotated = {name: x if name == "window" else x[b : b + 1] for name, x in keywords.items()}
        np.testing.assert_array_equal(run((alone, rotated)), both[b : b + 1])
