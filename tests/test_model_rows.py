"""A row's result does not depend on padding, neighbours, rejected tokens or keys out of sight."""

import functools

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture_models import (
    CHUNK,
    LENGTHS,
    LOGITS,
    Model,
    each_model,
    empty,
    model,
    quick_for,
    record,
    run,
    step,
)

from carat_jax.kv_state import KVState, RingKV

B = len(LENGTHS)  # one batch size: the programs compiled for one test serve the others
W, R = 16, 64


def ids_of(m: Model, seed: int, rows: int = B, columns: int = 110) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, m.config.vocab_size, (rows, columns))


@functools.cache
def exact_row(name: str, seed: int, row: int) -> np.ndarray:
    m = model(name)
    return float64_reference.run(m.raw, m.tensors, ids_of(m, seed)[row]).logits


def readable(state: KVState, lengths: np.ndarray) -> list[np.ndarray]:
    """Every array of the state, with the slots that no later query may read set to zero."""
    out = []
    for layer in state.layers:
        for leaf in jax.tree.leaves(layer):
            array = np.array(leaf)
            for b, n in enumerate(lengths):
                live = np.zeros(array.shape[2], bool)
                if isinstance(layer, RingKV):
                    live[[p % array.shape[2] for p in range(max(0, n - (W - 1)), n)]] = True
                else:
                    live[:n] = True
                array[b][:, ~live] = 0
            out.append(array)
    return [*out, np.asarray(state.length)]


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


# --- Unequal prompts -----------------------------------------------------------------------------


@quick_for("dense_31b_like", "e2b_like")
def test_each_row_of_unequal_prompts_gets_what_it_gets_alone(name):
    """Prompts of 16 lengths and contents; what each gets alone is float64's answer to it alone."""
    m, lengths = model(name), np.array(LENGTHS)
    ids = ids_of(m, seed=1)
    prompt, state = run(m, ids, lengths, CHUNK, empty(m, B))
    rest, _ = run(m, ids, lengths + 4, 1, state)
    for row in (6, 8, 14, 15):  # 31, 33, 64, 65 tokens
        n = lengths[row]
        logits = np.concatenate([prompt[row, :n], rest[row, n : n + 4]])
        assert np.isfinite(logits).all()
        expected = exact_row(name, 1, row)[: n + 4]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2 * LOGITS[name])


@each_model
def test_neighbours_padding_and_place_do_not_change_a_bit(name):
    m, lengths = model(name), np.array(LENGTHS)
    ids = ids_of(m, seed=1)

    def fed(ids: np.ndarray, lengths: np.ndarray, padding: int) -> np.ndarray:
        prompt, state = run(m, ids, lengths, CHUNK, empty(m, B), padding)
        rest, _ = run(m, ids, lengths + 4, 1, state, padding)
        return np.where(np.isnan(prompt), rest, prompt)

    before = fed(ids, lengths, padding=0)
    order = np.roll(np.arange(B), 3)
    others, longer = ids_of(m, seed=2), lengths.copy()
    kept = order[:6]  # the other ten rows get another prompt of another length
    others[:6], longer[:6] = ids[kept], lengths[kept]
    after = fed(others, longer, padding=77)
    np.testing.assert_array_equal(after[:6], before[kept])


@each_model
def test_a_row_without_new_tokens_keeps_its_state(name):
    """A chunk for some rows of a batch leaves the others as they were; so does a decode step."""
    m, lengths = model(name), np.array(LENGTHS)
    ids = ids_of(m, seed=1)
    _, state = run(m, ids, lengths, CHUNK, empty(m, B))
    before = readable(state, lengths)
    resting = np.arange(B) % 2 == 0
    end = np.where(resting, lengths, lengths + CHUNK)
    _, state = run(m, ids, end, CHUNK, state, padding=9)
    for _ in range(3):
        _, state = step(
            m.params, m.config, jnp.full((B, 1), 5, jnp.int32), state, new=jnp.zeros(B, jnp.int32)
        )
    after = readable(state, end)
    assert_same([x[resting] for x in after], [x[resting] for x in before])
    assert (after[-1][~resting] == lengths[~resting] + CHUNK).all()


# --- Rollback ------------------------------------------------------------------------------------

T = 16
# Around the window, the ring, and both after a wrap.
ROLLBACK = np.array([1, 14, 15, 16, 17, 31, 32, 33, 48, 49, 62, 63, 64, 65, 79, 80])


@each_model
def test_after_a_rollback_the_rejected_tokens_were_never_there(name):
    """Bit for bit: row b accepts b of 16 tokens, then all of a second step are rejected.

    The comparison never sees the rejected tokens: there the first step has padding after the
    accepted ones, and there is no second step.
    """
    m, accepted = model(name), np.arange(B)
    ids, proposals = ids_of(m, seed=3), ids_of(m, seed=4)
    right = np.take_along_axis(ids, ROLLBACK[:, None] + np.arange(T), axis=1)
    kept = np.arange(T) < accepted[:, None]

    def after(tokens: np.ndarray, state: KVState, new: np.ndarray, length: np.ndarray) -> KVState:
        """One step of T tokens, of which the length is lowered to what was accepted."""
        tokens, new = jnp.asarray(tokens, jnp.int32), jnp.asarray(new, jnp.int32)
        _, state = step(m.params, m.config, tokens, state, new=new)
        return state.replace(length=jnp.asarray(length, jnp.int32))

    length, everything = ROLLBACK + accepted, np.full(B, T)
    _, state = run(m, ids, ROLLBACK, CHUNK, empty(m, B))
    state = after(np.where(kept, right, proposals[:, :T]), state, everything, length)
    state = after(proposals[:, T : 2 * T], state, everything, length)
    _, clean = run(m, ids, ROLLBACK, CHUNK, empty(m, B))
    clean = after(np.where(kept, right, 0), clean, accepted, length)
    assert_same(readable(state, length), readable(clean, length))

    for tokens, at_once in ((3, 1), (12, CHUNK)):  # decoded on, then prefilled on
        out, state = run(m, ids, length + tokens, at_once, state)
        expected, clean = run(m, ids, length + tokens, at_once, clean)
        np.testing.assert_array_equal(out, expected)
        assert np.isfinite(out[np.arange(B), length + tokens - 1]).all()


# --- The edge of the window ----------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("distance", [W, W - 1])
def test_a_token_at_distance_w_is_out_of_sight_of_a_local_layer(name, distance):
    """The residual after the first layer, which is local, with one earlier token changed."""
    m = model(name)
    (before, after) = (
        np.asarray(record(m.params, m.config, ids[None])[2]["hidden_states"][1])[0]
        for ids in (m.ids, np.where(np.arange(90) == 20, (m.ids + 1) % 256, m.ids))
    )
    changed = (before != after).any(axis=-1)
    assert changed[20 + distance] == (distance == W - 1)
    assert np.flatnonzero(changed).tolist() == list(range(20, 20 + W))


@each_model
@pytest.mark.parametrize("tokens", [1, CHUNK])
def test_a_ring_is_read_up_to_distance_w_minus_1(name, tokens):
    """Another key or value in all rings of a state, at either side of the next query's window."""
    m = model(name)
    ids, lengths = ids_of(m, seed=1), np.maximum(np.array(LENGTHS), W)

    def next_logits(distance: int | None) -> np.ndarray:
        _, state = run(m, ids, lengths, CHUNK, empty(m, B))
        if distance is not None:
            slot = jnp.asarray((lengths - distance) % R)
            layers = tuple(
                jax.tree.map(lambda x: x.at[jnp.arange(B), :, slot].set(0.5), layer)
                if isinstance(layer, RingKV)
                else layer
                for layer in state.layers
            )
            state = state.replace(layers=layers)
        out, _ = run(m, ids, lengths + tokens, tokens, state)
        return out[np.arange(B), lengths]

    before = next_logits(None)
    np.testing.assert_array_equal(next_logits(W), before)
    assert (next_logits(W - 1) != before).any(axis=-1).all()
