"""Copies of what is read once: that the kernels which stream mark theirs."""

import jax
import jax.numpy as jnp
import pytest
from h200_lowering import lower_for_h200
from jax._src.lib.mlir.dialects import nvvm

from pallas_kernels import (
    global_attention,
    read_once,
    residual_norm_matmul,
    ring_attention,
    skinny_matmul,
)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


D, F, H = 2048 + 512, 4096, 256
LENGTH = struct(1, dtype=jnp.int32)
CACHE = struct(1, 4, 1088, H)
VECTOR = struct(D)

OPS = {
    "skinny_matmul": (skinny_matmul, {"out": jnp.bfloat16}, [struct(5, D), struct(D, F)]),
    "residual_norm_matmul": (
        residual_norm_matmul,
        {"out": jnp.bfloat16, "eps": 1e-6},
        [struct(1, D), struct(1, D), VECTOR, VECTOR, struct(D, F)],
    ),
    "ring_attention": (
        ring_attention,
        {"window": 1024},
        [struct(1, 5, 8, H), CACHE, CACHE, LENGTH],
    ),
    "global_attention": (global_attention, {}, [struct(1, 5, 8, H), CACHE, CACHE, LENGTH]),
}


def copies(monkeypatch, op, more, arguments):
    """How often the policy is asked for as `op` is lowered, and the policies of all copies."""
    asked, hints = [], []
    ask, copy = read_once._evict_first, nvvm.cp_async_bulk_tensor_shared_cluster_global

    def counted_ask():
        asked.append(op)
        ask()

    def counted_copy(*args, **kwargs):
        hints.append(kwargs.get("l2_cache_hint"))
        return copy(*args, **kwargs)

    monkeypatch.setattr(read_once, "_evict_first", counted_ask)
    monkeypatch.setattr(nvvm, "cp_async_bulk_tensor_shared_cluster_global", counted_copy)
    jax.clear_caches()  # what has been traced already is not traced again
    lower_for_h200(lambda *x: op(*x, **more, implementation="mosaic"), *arguments)
    return len(asked), hints


@pytest.mark.parametrize("name", OPS)
def test_every_tile_is_copied_with_the_policy(monkeypatch, name):
    asked, hints = copies(monkeypatch, *OPS[name])
    marked = [hint for hint in hints if hint is not None]
    assert asked and len(marked) == asked
    # Each copy is made twice, without and then with a policy; the others are of rows and queries.
    assert len(hints) >= 2 * asked


@pytest.mark.parametrize("name", ["ring_attention", "global_attention"])
def test_keys_and_values_that_are_read_again_have_none(monkeypatch, name):
    op, more, arguments = OPS[name]
    asked, hints = copies(monkeypatch, op, more | {"reread": True}, arguments)
    assert not asked and hints == [None] * len(hints) != []
