"""RoPE against the formula in float64, at the head widths of the published sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64_reference import rope as reference

from carat_jax import rope
from carat_jax.config import FULL, SLIDING, GemmaConfig, LayerSpec
from pallas_kernels import rotation

LAYERS = GemmaConfig.preset("31b").layers
LOCAL, GLOBAL = LAYERS[0], LAYERS[5]
POSITIONS = np.array([[0, 1, 2, 63, 1023], [1024, 4095, 131_071, 262_142, 262_143]])


def partial(spec: LayerSpec) -> float:
    return spec.rotated / spec.head_dim


@functools.partial(jax.jit, static_argnames="spec")
def _turn(x: jax.Array, positions: jax.Array, spec: LayerSpec) -> jax.Array:
    return rotation.rotate_head(x, *rope.angles(positions, spec))


def turn(x: np.ndarray, positions: np.ndarray, spec: LayerSpec) -> np.ndarray:
    return np.asarray(_turn(x, positions, spec))


def heads(spec: LayerSpec, positions: np.ndarray, N: int = 3) -> np.ndarray:
    shape = (*positions.shape, N, spec.head_dim)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_the_frequencies_are_the_published_ones():
    """phase 1 position on: cosine of f_d itself."""
    cos, sin = rope.angles(jnp.ones((1, 1), jnp.int32), GLOBAL)
    assert cos.shape == sin.shape == (1, 1, 1, 64)
    assert cos.dtype == jnp.float32
    frequency = np.arctan2(sin, cos)[0, 0, 0]
    np.testing.assert_allclose(frequency[[0, 1, 63]], [1.0, 0.947464, 0.033376], rtol=2e-5)
    cos, sin = rope.angles(jnp.ones((1, 1), jnp.int32), LOCAL)
    expected = 10_000.0 ** (-2 * np.arange(128) / 256)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("spec", [LOCAL, GLOBAL], ids=[SLIDING, FULL])
def test_heads_turn_as_in_float64(spec):
    """A float32 phase of 262,143 is off by 1/64 at most, and that by its own rounding alone."""
    x = heads(spec, POSITIONS)
    out = turn(x, POSITIONS, spec)
    assert out.dtype == np.float32
    for b, positions in enumerate(POSITIONS):
        expected = reference(x[b].astype(np.float64), positions, spec.rope_theta, partial(spec))
        limit = 1e-6 + positions * 2.0**-23  # of the phase: frequency and product are rounded
        error = np.abs(out[b] - expected).max(axis=(1, 2))
        assert (error <= limit * np.abs(x[b]).max() * 1.5).all(), error


def test_the_cosines_are_those_of_the_float32_phases():
    """No loss of range reduction: at large phases the accelerator's own cosine must hold."""
    cos, sin = rope.angles(jnp.asarray(POSITIONS), GLOBAL)
    frequency = (1e6 ** (-2 * np.arange(64) / 512)).astype(np.float32)
    phase = POSITIONS[..., None, None].astype(np.float32) * frequency
    np.testing.assert_allclose(cos, np.cos(phase.astype(np.float64)), atol=3e-7)
    np.testing.assert_allclose(sin, np.sin(phase.astype(np.float64)), atol=3e-7)


def test_widths_0_to_63_and_256_to_319_of_a_global_head_turn_and_no_others():
    x = heads(GLOBAL, POSITIONS[:1])
    changed = (turn(x, POSITIONS[:1], GLOBAL) != x)[0, 1:].all(axis=(0, 1))
    assert np.flatnonzero(changed).tolist() == [*range(64), *range(256, 320)]
    untouched = ~changed
    out = turn(x, POSITIONS[:1], GLOBAL)
    np.testing.assert_array_equal(out[..., untouched], x[..., untouched])


def test_position_0_changes_nothing():
    x = heads(LOCAL, np.zeros((1, 1), int))
    np.testing.assert_array_equal(turn(x, np.zeros((1, 1), int), LOCAL), x)


@pytest.mark.parametrize("spec", [LOCAL, GLOBAL], ids=[SLIDING, FULL])
def test_a_score_depends_on_the_distance_alone(spec):
    positions = np.array([[0, 7], [500, 507], [9_000, 9_007]])
    x = np.broadcast_to(heads(spec, positions[:1]), (3, 2, 3, spec.head_dim))
    turned = turn(x, positions, spec).astype(np.float64)
    scores = (turned[:, 0] * turned[:, 1]).sum(-1)
    np.testing.assert_allclose(scores[1:], np.broadcast_to(scores[0], (2, 3)), atol=0.05)
    nearer = turn(x[:1], np.array([[0, 6]]), spec).astype(np.float64)
    assert np.abs((nearer[:, 0] * nearer[:, 1]).sum(-1) - scores[0]).max() > 0.5


@pytest.mark.parametrize(("H", "rotated"), [(24, 24), (24, 12), (24, 2), (24, 0), (6, 4)])
def test_any_share_of_a_head_can_turn(H, rotated):
    spec = dataclasses.replace(GLOBAL, head_dim=H, rotated=rotated)
    positions = np.array([[3, 50, 200]])
    x = heads(spec, positions)
    expected = reference(x[0].astype(np.float64), positions[0], spec.rope_theta, rotated / H)
    np.testing.assert_allclose(turn(x, positions, spec)[0], expected, atol=1e-4)


@pytest.mark.parametrize("spec", [LOCAL, GLOBAL], ids=[SLIDING, FULL])
def test_the_turned_widths_and_the_rest_make_up_a_head(spec):
    """The split of a score that the compact cache is read with."""
    x = heads(spec, POSITIONS)
    whole = rotation.rotate_head(x, *rope.angles(jnp.asarray(POSITIONS), spec))
    alone = rotation.rotate(rotation.rotated_widths(x, spec.rotated), *rope.angles(POSITIONS, spec))
    np.testing.assert_array_equal(alone, rotation.rotated_widths(whole, spec.rotated))
    rest = rotation.without_rotated_widths(jnp.asarray(x), spec.rotated)
    half, pairs = spec.head_dim // 2, spec.rotated // 2
    outside = np.r_[pairs:half, half + pairs : spec.head_dim]
    np.testing.assert_array_equal(rest[..., outside], x[..., outside])
    assert np.count_nonzero(rest) == np.count_nonzero(x[..., outside])


def test_bfloat16_heads_are_turned_in_float32():
    x = jnp.asarray(heads(LOCAL, POSITIONS), jnp.bfloat16)
    cos, sin = rope.angles(jnp.asarray(POSITIONS), LOCAL)
    out = rotation.rotate_head(x, cos, sin)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, rotation.rotate_head(x.astype(jnp.float32), cos, sin))
    assert jax.eval_shape(rotation.rotate_head, x, cos, sin).shape == x.shape
