"""Rows grouped by KV head, and the masked softmax over them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouping


@pytest.mark.parametrize(
    ("B", "T", "K", "G", "H"), [(2, 3, 2, 4, 5), (1, 1, 1, 8, 2), (3, 4, 5, 1, 2)]
)
def test_row_g_t_of_head_k_is_query_head_kg_at_position_t(B, T, K, G, H):
    q = np.arange(B * T * K * G * H).reshape(B, T, K * G, H)
    rows = np.asarray(grouping.to_rows(jnp.asarray(q), K))
    assert rows.shape == (B, K, G * T, H)
    for b, k, g, t in np.ndindex(B, K, G, T):
        np.testing.assert_array_equal(rows[b, k, g * T + t], q[b, t, k * G + g])
    np.testing.assert_array_equal(grouping.from_rows(jnp.asarray(rows), T), q)


def test_a_mask_over_positions_falls_on_the_same_rows():
    mask = np.random.default_rng(0).random((2, 3, 7)) < 0.5
    rows = np.asarray(grouping.mask_rows(jnp.asarray(mask), 4))
    assert rows.shape == (2, 1, 12, 7)
    for b, g, t in np.ndindex(2, 4, 3):
        np.testing.assert_array_equal(rows[b, 0, g * 3 + t], mask[b, t])


def test_a_row_that_sees_nothing_is_finite():
    scores, v = jnp.full((1, 1, 2, 4), 3.0), jnp.ones((1, 1, 4, 5), jnp.bfloat16)
    mask = jnp.array([[[[False] * 4, [True, False, False, False]]]])
    out = grouping.attend(scores, mask, v)
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_products_of_bfloat16_accumulate_in_float32():
    """256 + 1 + … + 1 is 512 in float32; a bfloat16 sum of them stays at 256."""
    ones = jnp.ones((1, 257), jnp.bfloat16)
    a = ones.at[0, 0].set(256)
    assert grouping.product("ij,ij->i", a, ones).tolist() == [512.0]
