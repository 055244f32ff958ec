"""Keys and values of past tokens: rings for sliding-window layers, slots for global ones.

Everything is a pytree of plain arrays. What a slot holds follows from `KVState.length` alone, so
forgetting tokens (a rejected proposal) is lowering `length`; nothing is erased and slots past
`length` are masked by position wherever they are read. The rings bound how far back that goes: at
most R - W + 1 of the newest tokens, and only ones that were decoded, since a prefilled chunk may
have overwritten the whole ring.

Each layer has arrays of its own, a step writes them and then reads only what it wrote, and
functions that return the state should donate the one they take: then XLA writes in place.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from carat_jax import display, sharding
from carat_jax.config import ConfigError, GemmaConfig, LayerSpec
from carat_jax.sharding import AnyMesh
from pallas_kernels import cache_slots

SLACK = 63  # spare ring slots beyond the window: at least the proposals one step may verify
_ROWS_SHOWN = 4  # of a batch, by a notebook


class RingKV(struct.PyTreeNode):
    """A sliding-window layer: position p lives in slot p mod R. k, v: [B, K, R, H]."""

    k: jax.Array
    v: jax.Array

    def __repr__(self) -> str:
        return _shown(self)


class GlobalKV(struct.PyTreeNode):
    """A global layer: position p lives in slot p.

    Attributes:
      v: [B, K, S, H].
      k: [B, K, S, H], or None where keys and values share a projection.
      k_rotated: [B, K, S, P] then: the widths of the keys that RoPE turns. The others equal
        those of v times the key norm's weight, so they are not stored.
    """

    v: jax.Array
    k: jax.Array | None = None
    k_rotated: jax.Array | None = None

    def __repr__(self) -> str:
        return _shown(self)


LayerKV = RingKV | GlobalKV


class KVState(struct.PyTreeNode):
    """Past of a batch. layers: one entry for each layer that owns keys. length: int32 [B]."""

    layers: tuple[LayerKV, ...]
    length: jax.Array

    def __repr__(self) -> str:
        length = display.values(self.length)
        shown = display.array(self.length) if length is None else length
        return f"KVState({len(self.layers)} layers, length={shown})"

    def _repr_html_(self) -> str:
        lengths = (display.values(self.length) or [])[:_ROWS_SHOWN]
        kinds: dict[str, list[LayerKV]] = {}
        for kv in self.layers:
            kinds.setdefault(repr(kv), []).append(kv)
        rows = [
            [f"{len(kvs)} × {arrays}", _bytes(kvs), *(_filled(kvs[0], n) for n in lengths)]
            for arrays, kvs in kinds.items()
        ]
        held = [f"row {row}: {n:,} positions" for row, n in enumerate(lengths)]
        return display.page(repr(self), display.table(["layers", "bytes", *held], rows))


def arrays(kv: LayerKV) -> dict[str, jax.Array]:
    """The arrays of a layer, by name."""
    held = {name: getattr(kv, name, None) for name in ("k", "v", "k_rotated")}
    return {name: x for name, x in held.items() if x is not None}


def _shown(kv: LayerKV) -> str:
    inside = ", ".join(f"{name}={display.array(x)}" for name, x in arrays(kv).items())
    return f"{type(kv).__name__}({inside})"


def _bytes(layers: list[LayerKV]) -> str:
    leaves = jax.tree.leaves(layers)
    return display.size(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves))


def _filled(kv: LayerKV, length: int) -> display.Html:
    slots = kv.v.shape[2]
    bar = display.bar((length / slots, display.NEUTRAL), width=80)
    return display.Html(f"{bar} {min(length, slots):,} of {slots:,} slots")


def round_up(n: int, multiple: int = 64) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def ring_capacity(window: int, slack: int = SLACK) -> int:
    """R, slots of a ring: the window and its slack, a multiple of 64."""
    return round_up(window + slack)


def abstract_state(
    config: GemmaConfig,
    batch: int,
    max_context: int,
    *,
    slack: int = SLACK,
    mesh: AnyMesh | None = None,
) -> KVState:
    """`init_state` as shapes, dtypes and shardings; nothing is allocated. Raises as it does."""
    if not isinstance(config, GemmaConfig):
        raise ValueError(f"config is a {type(config).__name__}: give a GemmaConfig, `gemma.config`")
    if batch < 1 or max_context < 1 or slack < 0:
        raise ValueError(
            f"batch {batch} and max_context {max_context} must be at least 1, "
            f"slack {slack} at least 0"
        )
    if max_context > config.max_position_embeddings:
        raise ConfigError(
            f"max_context {max_context:,} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings:,}: lower max_context"
        )
    dtype, shards = jnp.dtype(config.dtype), sharding.shards(mesh)
    places = KVState(layers=None, length=None)
    if mesh is not None:
        places = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs(sharding.rows(mesh, batch))
        )

    def layer(spec: LayerSpec) -> LayerKV:
        heads = spec.share(shards).num_kv_heads * shards

        def array(slots: int, width: int) -> jax.ShapeDtypeStruct:
            shape = (batch, heads, slots, width)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=places.layers)

        if spec.window is not None:
            ring = array(ring_capacity(spec.window, slack), spec.head_dim)
            return RingKV(k=ring, v=ring)
        slots = round_up(max_context)
        v = array(slots, spec.head_dim)
        if spec.shared_projection:
            return GlobalKV(v=v, k_rotated=array(slots, spec.rotated))
        return GlobalKV(v=v, k=v)

    layers = tuple(layer(spec) for spec in config.kv_layers)
    length = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=places.length)
    return KVState(layers=layers, length=length)


def specs(rows: P) -> KVState:
    """The `PartitionSpec` of every layer's arrays, and of `length`, for rows that are cut so."""
    return KVState(layers=P(*(rows or (None,)), sharding.MODEL), length=rows)


def init_state(
    config: GemmaConfig,
    batch: int,
    max_context: int,
    *,
    slack: int = SLACK,
    mesh: Mesh | None = None,
) -> KVState:
    """An empty state for `batch` sequences of up to `max_context` tokens, in config.dtype.

    Args:
      config: the model.
      batch: B.
      max_context: tokens a row may hold; global caches round it up to a multiple of 64.
      slack: ring slots beyond the window, at least (R is rounded up to a multiple of 64). A decode
        step writes its T new positions before it reads, so T is at most R - W + 1; what is longer
        is prefilled.
      mesh: what it lies on, that of the weights (`sharding.mesh_of`); None = the default device.
        There, layers with fewer KV heads than `model` devices have each of them several times.

    Raises:
      ValueError: no configuration, batch or max_context below 1, negative slack.
      ConfigError: max_context beyond the model's max_position_embeddings.
    """
    shapes = abstract_state(config, batch, max_context, slack=slack, mesh=mesh)
    leaves, structure = jax.tree.flatten(shapes)
    zeros = _zeros_at(tuple(leaf.sharding for leaf in leaves))
    return jax.tree.unflatten(structure, zeros(tuple(leaves)))


def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.Array]:
    return [jnp.zeros(s.shape, s.dtype) for s in shapes]


@functools.lru_cache
def _zeros_at(places: tuple[NamedSharding | None, ...]) -> Callable[..., list[jax.Array]]:
    """`_zeros` in one call: a large model has a hundred. Under jit, `device=` places nothing."""
    return jax.jit(_zeros, static_argnums=0, out_shardings=list(places))


def state_bytes(
    config: GemmaConfig,
    batch: int,
    max_context: int,
    *,
    slack: int = SLACK,
    mesh: AnyMesh | None = None,
) -> int:
    """Bytes of `init_state` with the same arguments, exactly; on a mesh, on each device of it."""
    return sharding.local_bytes(abstract_state(config, batch, max_context, slack=slack, mesh=mesh))


def max_decode_tokens(state: KVState, config: GemmaConfig) -> int | None:
    """New positions that one decode step may write into these rings; None without rings."""
    slacks = [
        kv.v.shape[2] - spec.window + 1
        for kv, spec in zip(state.layers, config.kv_layers, strict=True)
        if isinstance(kv, RingKV) and spec.window is not None
    ]
    return min(slacks, default=None)


def fill_ring(ring: RingKV, chunk: RingKV, length: jax.Array, new: jax.Array) -> RingKV:
    """Writes the newest positions of a chunk of any length.

    Args:
      ring: k, v [B, K, R, H].
      chunk: k, v [B, K, T, H], the chunk's first position at `length`.
      length: int32 [B], positions before the chunk.
      new: int32 [B], how many rows of the chunk are real; the rest is padding, not written.
    """
    t, R = jnp.arange(chunk.v.shape[2]), ring.v.shape[2]
    stays = (t < new[:, None]) & (t >= new[:, None] - R)
    slot = jnp.where(stays, (length[:, None] + t) % R, R + t)  # past the end: dropped
    return RingKV(
        k=cache_slots.write(ring.k, chunk.k, slot), v=cache_slots.write(ring.v, chunk.v, slot)
    )


def ring_past(ring: RingKV, length: jax.Array, past: int) -> RingKV:
    """The `past` positions before `length`, oldest first: k, v [B, K, past, H].

    Positions that never were (length < past) hold whatever their slot holds; mask them.
    """
    slot = (length[:, None] - past + jnp.arange(past)) % ring.v.shape[2]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, slot[:, None, :, None], axis=2), ring)
