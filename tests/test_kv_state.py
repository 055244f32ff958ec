"""Rings and global caches against a dictionary from slot to value, written position by position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carat_jax import kv_state
from carat_jax.config import FULL, SLIDING, ConfigError, GemmaConfig
from carat_jax.kv_state import GlobalKV, LayerKV, RingKV
from pallas_kernels import cache_slots

B, K, H = 3, 2, 4
W, R = 65, 128

fill_ring = jax.jit(kv_state.fill_ring)
ring_past = jax.jit(kv_state.ring_past, static_argnames="past")


@jax.jit
def append(kv: LayerKV, length: jax.Array, **new: jax.Array | None) -> LayerKV:
    """What a decode step does with each array of a layer."""
    ring = isinstance(kv, RingKV)
    written = {
        name: cache_slots.append(getattr(kv, name), rows, length, ring=ring)
        for name, rows in new.items()
        if rows is not None
    }
    return kv.replace(**written)


def int32(values: list[int]) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def numbered(shape: tuple[int, ...], start: int) -> np.ndarray:
    """Distinct values, exact in float32."""
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


def ring_of(slots: int = R) -> RingKV:
    shape = (B, K, slots, H)
    return RingKV(k=jnp.asarray(numbered(shape, 0)), v=jnp.asarray(-numbered(shape, 1)))


def rows_of(T: int) -> RingKV:
    shape = (B, K, T, H)
    return RingKV(k=jnp.asarray(numbered(shape, 10**5)), v=jnp.asarray(-numbered(shape, 10**5)))


def assert_holds(array: jax.Array, before: jax.Array, written: list[dict[int, np.ndarray]]) -> None:
    """`array` is `before` with written[b][slot] = [K, H] in it, and nothing else changed."""
    expected = np.array(before)
    for b, slots in enumerate(written):
        for slot, row in slots.items():
            expected[b, :, slot] = row
    np.testing.assert_array_equal(array, expected)


# --- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "slack", "slots"),
    [(1024, 63, 1088), (512, 63, 576), (1, 63, 64), (2, 63, 128), (16, 63, 128), (65, 63, 128),
     (66, 63, 192), (1024, 0, 1024), (1000, 24, 1024), (1000, 25, 1088)],
)  # fmt: skip
def test_a_ring_has_room_for_the_window_and_its_slack(window, slack, slots):
    assert kv_state.ring_capacity(window, slack) == slots


# Bytes in bfloat16: of a token in the global layers, and of the rings' windows in units of 0.1 MB.
PUBLISHED = {
    "e2b": (6_144, 63, 12),
    "e4b": (16_384, 210, 20),
    "12b": (10_240, 3_355, 40),
    "26b-a4b": (12_800, 2_097, 25),
    "31b": (51_200, 8_389, 50),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_sizes_take_the_bytes_they_should(name):
    per_token, windows, rings = PUBLISHED[name]
    config = GemmaConfig.preset(name)
    state = kv_state.abstract_state(config, 1, 131_072)
    nbytes = {RingKV: 0, GlobalKV: 0}
    for layer in state.layers:
        nbytes[type(layer)] += sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer)
        )
    assert nbytes[GlobalKV] == per_token * 131_072
    window = config.sliding_window
    assert round(nbytes[RingKV] * window / (window + 64) / 1e5) == windows
    assert sum(isinstance(layer, RingKV) for layer in state.layers) == rings
    assert kv_state.state_bytes(config, 1, 131_072) == sum(nbytes.values()) + 4


TINY = GemmaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=8,
    global_head_dim=16, sliding_window=20, max_position_embeddings=1000, dtype="float32",
    layer_types=(SLIDING, FULL, SLIDING, FULL, FULL),
    attention_k_eq_v=True, num_kv_shared_layers=1,
)  # fmt: skip


def test_a_state_has_an_entry_for_each_layer_that_owns_keys():
    state = kv_state.init_state(TINY, 2, 100)
    shapes = [jax.tree.map(jnp.shape, layer) for layer in state.layers]
    ring = RingKV(k=(2, 2, 128, 8), v=(2, 2, 128, 8))
    compact = GlobalKV(v=(2, 1, 128, 16), k_rotated=(2, 1, 128, 4))
    assert shapes == [ring, compact, ring, compact]
    assert state.length.tolist() == [0, 0]
    assert state.length.dtype == jnp.int32


@pytest.mark.parametrize("arguments", [{}, {"slack": 0}, {"slack": 200}, {"batch": 5}])
@pytest.mark.parametrize("max_context", [1, 64, 65, 1000])
def test_state_bytes_are_those_of_the_real_arrays(arguments, max_context):
    arguments = {"batch": 2, "max_context": max_context} | arguments
    state = kv_state.init_state(TINY, **arguments)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert kv_state.state_bytes(TINY, **arguments) == total
    assert all(leaf.shape[2] % 64 == 0 for leaf in jax.tree.leaves(state.layers))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch 0"),
        ({"batch": -1}, "batch -1"),
        ({"max_context": 0}, "max_context 0"),
        ({"slack": -1}, "slack -1"),
        ({"max_context": 1001}, r"max_context 1,001 exceeds .* 1,000: lower"),
    ],
)
@pytest.mark.parametrize(
    "function", [kv_state.init_state, kv_state.abstract_state, kv_state.state_bytes]
)
def test_bad_sizes_are_refused(function, arguments, message):
    error = ConfigError if arguments.get("max_context", 0) > 1000 else ValueError
    with pytest.raises(error, match=message):
        function(TINY, **{"batch": 1, "max_context": 64} | arguments)
    with pytest.raises(ValueError, match=r"config is a dict: give a GemmaConfig, `gemma\.config`"):
        function({}, 1, 64)


@pytest.mark.parametrize(("slack", "most"), [(0, 45), (63, 109), (1, 45)])
def test_a_step_may_write_as_many_positions_as_a_ring_has_to_spare(slack, most):
    """R = 64 or 128 slots for a window of 20: R - 19 positions leave every key in sight."""
    state = kv_state.init_state(TINY, 1, 64, slack=slack)
    assert kv_state.max_decode_tokens(state, TINY) == most


def test_without_rings_a_step_has_no_limit():
    config = dataclasses.replace(TINY, layer_types=(FULL,) * 5)
    assert kv_state.max_decode_tokens(kv_state.init_state(config, 1, 64), config) is None


# --- Writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 16, R])
@pytest.mark.parametrize(
    "length", [[0, 1, 63], [64, 65, 127], [128, 129, 255], [126, 10_000, 3 * R - 1]]
)
def test_a_ring_is_written_at_the_position_modulo_its_size(length, T):
    ring, rows = ring_of(), rows_of(T)
    out = append(ring, int32(length), k=rows.k, v=rows.v)
    for name in "kv":
        new = np.asarray(getattr(rows, name))
        written = [{(n + t) % R: new[b, :, t] for t in range(T)} for b, n in enumerate(length)]
        assert_holds(getattr(out, name), getattr(ring, name), written)


@pytest.mark.parametrize("form", ["plain", "compact"])
@pytest.mark.parametrize("T", [1, 16, 80])
@pytest.mark.parametrize("length", [[0, 1, 63], [48, 49, 112], [127, 128, 500]])
def test_a_global_cache_drops_what_lies_past_its_end(form, length, T):
    S = 128
    ring, rows = ring_of(S), rows_of(T)
    if form == "plain":
        cache, new = GlobalKV(v=ring.v, k=ring.k), {"v": rows.v, "k": rows.k, "k_rotated": None}
    else:
        cache = GlobalKV(v=ring.v, k_rotated=ring.k[..., :2])
        new = {"v": rows.v, "k": None, "k_rotated": rows.k[..., :2]}
    out = append(cache, int32(length), **new)
    for name, given_rows in new.items():
        if given_rows is None:
            assert getattr(out, name) is None
            continue
        values = np.asarray(given_rows)
        written = [
            {n + t: values[b, :, t] for t in range(T) if n + t < S} for b, n in enumerate(length)
        ]
        assert_holds(getattr(out, name), getattr(cache, name), written)


def test_rows_are_written_in_the_dtype_of_the_cache():
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ring_of())
    rows = RingKV(k=jnp.full((B, K, 1, H), 1.00390625), v=jnp.full((B, K, 1, H), 3.0))
    out = append(cache, int32([0, 1, 2]), k=rows.k, v=rows.v)
    assert out.k.dtype == out.v.dtype == jnp.bfloat16
    assert out.k[1, 0, 1].tolist() == [1.0] * H
    out = fill_ring(cache, rows, int32([0, 1, 2]), int32([1, 1, 1]))
    assert out.k.dtype == jnp.bfloat16


@functools.cache
def chunk(T: int) -> RingKV:
    return rows_of(T)


@settings(max_examples=60)
@given(
    T=st.sampled_from([1, 17, 64, R - 1, R, R + 1, 2 * R + 5]),
    rows=st.lists(
        st.tuples(st.integers(0, 5 * R), st.floats(0, 1)), min_size=B, max_size=B
    ),
)  # fmt: skip
def test_a_chunk_of_any_length_leaves_its_newest_positions(T, rows):
    """As if its real positions were written one by one; padding is not written at all."""
    length = [n for n, _ in rows]
    new = [round(share * T) for _, share in rows]
    ring, given_rows = ring_of(), chunk(T)
    out = fill_ring(ring, given_rows, int32(length), int32(new))
    for name in "kv":
        values = np.asarray(getattr(given_rows, name))
        written = [
            {(n + t) % R: values[b, :, t] for t in range(count)}
            for b, (n, count) in enumerate(zip(length, new, strict=True))
        ]
        assert_holds(getattr(out, name), getattr(ring, name), written)


@pytest.mark.parametrize("past", [0, 1, 64, R])
@pytest.mark.parametrize("length", [[0, 1, 63], [64, 65, 128], [129, 300, 5 * R]])
def test_the_past_of_a_ring_comes_oldest_first(length, past):
    ring = ring_of()
    out = ring_past(ring, int32(length), past=past)
    for name in "kv":
        array, slots = (
            np.asarray(getattr(ring, name)),
            [[p % R for p in range(n - past, n)] for n in length],
        )
        expected = np.stack([array[b][:, rows] for b, rows in enumerate(slots)])
        np.testing.assert_array_equal(getattr(out, name), expected.reshape(B, K, past, H))


# --- A whole life --------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.sampled_from([1, 4, 16]), st.floats(0, 1)),
        st.tuples(st.just("prefill"), st.sampled_from([17, 200]), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40)
@given(steps=STEPS, start=st.integers(0, 2 * R))
def test_after_any_steps_and_rollbacks_the_window_is_there(steps, start):
    """Each position in sight lies in its slot, with the value that was accepted for it.

    A decode step writes T positions, of which a share is accepted; the rest is rolled back by
    lowering the length. A prefill chunk has a share of real positions, then padding.
    """
    ring = ring_of()
    length, accepted = 0, {}
    first = [("prefill", 200, n / 200) for n in (min(start, 200), max(start - 200, 0))]
    for number, (kind, T, share) in enumerate([*first, *steps]):
        rows = numbered((1, 1, T, 1), 1000 * (number + 1))
        both = RingKV(*(jnp.broadcast_to(jnp.asarray(rows), (B, K, T, H)) for _ in "kv"))
        count = round(share * T)
        if kind == "decode":
            ring = append(ring, int32([length] * B), k=both.k, v=both.v)
        else:
            ring = fill_ring(ring, both, int32([length] * B), int32([count] * B))
        accepted |= {length + t: rows[0, 0, t, 0] for t in range(count)}
        length += count
        in_sight = range(max(0, length - (W - 1)), length)  # by the next query
        slots = np.asarray(ring.k)[0, 0, [p % R for p in in_sight], 0]
        np.testing.assert_array_equal(slots, [accepted[p] for p in in_sight])
        past = np.asarray(ring_past(ring, int32([length] * B), past=W - 1).v)[-1, -1, :, -1]
        np.testing.assert_array_equal(past[W - 1 - len(in_sight) :], slots)
