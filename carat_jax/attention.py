"""The attention module of one decoder layer: projections, norms, RoPE, cache, output."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from carat_jax import kv_state, rope
from carat_jax.config import GemmaConfig, LayerSpec
from carat_jax.kv_state import GlobalKV, KVState, LayerKV, RingKV
from carat_jax.layers import linear, linear_share, rms_norm, weight
from pallas_kernels import PartialSums, global_attention, prefill_attention, ring_attention

MAX_DECODE_TOKENS = 16  # new positions a step may verify; longer inputs are prefilled


class Step(struct.PyTreeNode):
    """Where the T new positions of a forward pass sit. The same for every layer.

    Attributes:
      length: int32 [B], positions before the new ones.
      new: int32 [B], how many of the T are real; the rest is padding.
      decode: write the cache, then read it (a few positions); else prefill.
      implementation: of the attention ops; None = the best.
    """

    length: jax.Array
    new: jax.Array
    decode: bool = struct.field(pytree_node=False)
    implementation: str | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(
        cls,
        config: GemmaConfig,
        state: KVState | None,
        tokens: jax.Array,
        new: jax.Array | None,
        implementation: str | None,
    ) -> "Step":
        """The step that feeds tokens [B, T] to a model in this state (None: no past).

        Raises:
          ValueError: state or new of another batch size.
        """
        B, T = tokens.shape
        for name, array in (("state.length", state and state.length), ("new", new)):
            if array is not None and array.shape != (B,):
                raise ValueError(
                    f"tokens {tokens.shape} [B, T] and {name} {array.shape} disagree in B"
                )
        new = jnp.full((B,), T, jnp.int32) if new is None else new.astype(jnp.int32)
        if state is None:
            length, decode = jnp.zeros((B,), jnp.int32), False
        else:
            length = state.length
            fits = kv_state.max_decode_tokens(state, config)
            decode = T <= min(MAX_DECODE_TOKENS, MAX_DECODE_TOKENS if fits is None else fits)
        return cls(length=length, new=new, decode=decode, implementation=implementation)

    def positions(self, T: int) -> jax.Array:
        """int32 [B, T]."""
        return self.length[:, None] + jnp.arange(T)


class Keys(NamedTuple):
    """What the queries of a layer attend to; a borrowing layer gets its donor's.

    Attributes:
      v: [B, K, S, H].
      k: [B, K, S, H], or None in the compact form, then:
      k_rotated: [B, K, S, P] the widths of the keys that RoPE turns, and
      k_norm: [H] the weight that makes the other widths of a key from those of its value.
    """

    v: jax.Array
    k: jax.Array | None = None
    k_rotated: jax.Array | None = None
    k_norm: jax.Array | None = None


class Attention(nn.Module):
    """Grouped-query attention over a ring or a global cache.

    Weights (letters of `pallas_kernels`; x = G + 2, or G + 1 where keys and values share a
    projection, or G where both are borrowed):
      qkv [D, K, x, H]: the G query heads of a KV head, then its key, then its value, so that a
        cut along K never splits a group.
      o [K, G, H, D], q_norm [H], k_norm [H].

    On a mesh a device has `spec.share` of the heads, and its output is a share of the sum.
    """

    config: GemmaConfig
    spec: LayerSpec
    shards: int = 1

    def setup(self) -> None:
        c, s = self.config, self.spec
        D, K, G, H = c.hidden_size, s.num_kv_heads, s.group, s.head_dim
        own = (1 if s.shared_projection else 2) if s.owns_kv else 0
        self.qkv = weight(self, "qkv", (D, K, G + own, H), c)
        self.o = weight(self, "o", (K, G, H, D), c)
        self.q_norm = weight(self, "q_norm", (H,), c)
        if s.owns_kv:
            self.k_norm = weight(self, "k_norm", (H,), c)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        step: Step,
        kv: LayerKV | None,
        lent: Keys | None,
    ) -> tuple[jax.Array | PartialSums, LayerKV | None, Keys]:
        """Attends with x [B, T, D].

        Args:
          x: normed residual.
          angles: cosine and sine from `rope.angles` for this layer's type.
          step: where the T positions sit.
          kv: this layer's own cache, or None (no state, or a borrowing layer).
          lent: the keys and values that a borrowing layer reads, as its donor returned them.

        Returns:
          output [B, T, D], for `total`; the updated cache (None where none was given); the keys
          and values attended to.
        """
        c, s = self.config, self.spec
        B, T, D = x.shape
        K, G, H = s.num_kv_heads, s.group, s.head_dim
        o = self.o.reshape(K * G * H, D)
        y = linear(x, self.qkv)
        unit = rms_norm(y, None, c.rms_norm_eps)  # one pass for all heads; float32 until RoPE
        q = (unit[:, :, :, :G] * self.q_norm.astype(jnp.float32)).reshape(B, T, K * G, H)
        if s.owns_kv:
            new = self._keys(unit[:, :, :, G], unit[:, :, :, -1], self.k_norm, angles)
            keys, kv = self._store(new, step, kv)
        else:
            keys = lent
        out = self._attend(q, keys, angles, step).reshape(B, T, K * G * H)
        return linear_share(out, o, self.shards), kv, keys

    def _keys(self, k: jax.Array, v: jax.Array, k_norm: jax.Array, angles: tuple) -> Keys:
        """Turns the new positions' keys: normed k, v [B, T, K, H] to [B, K, T, width] each."""
        s, dtype = self.spec, k_norm.dtype

        def cached(rows: jax.Array) -> jax.Array:
            return rows.astype(dtype).transpose(0, 2, 1, 3)

        k = k * k_norm.astype(jnp.float32)
        if s.shared_projection:
            turned = rope.rotate(rope.rotated_widths(k, s.rotated), *angles)
            return Keys(v=cached(v), k_rotated=cached(turned), k_norm=k_norm)
        return Keys(v=cached(v), k=cached(rope.rotate_head(k, *angles)))

    def _store(self, new: Keys, step: Step, kv: LayerKV | None) -> tuple[Keys, LayerKV | None]:
        """Writes the new positions into the cache; returns what to attend to, and the cache."""
        if kv is None:
            return new, None
        # Padding is stored as zeros: a masked slot has weight zero, and zero times NaN is NaN.
        real = (jnp.arange(new.v.shape[2]) < step.new[:, None])[:, None, :, None]
        k, v, k_rotated = (
            x if x is None else jnp.where(real, x, 0) for x in (new.k, new.v, new.k_rotated)
        )
        new = new._replace(k=k, v=v, k_rotated=k_rotated)
        if isinstance(kv, GlobalKV):
            kv = kv_state.append(kv, step.length, k=new.k, v=new.v, k_rotated=new.k_rotated)
            return new._replace(k=kv.k, v=kv.v, k_rotated=kv.k_rotated), kv
        if step.decode:
            kv = kv_state.append(kv, step.length, k=new.k, v=new.v)
            return Keys(k=kv.k, v=kv.v), kv
        # A chunk may be longer than the ring: attend to the past and the chunk, then store. The
        # barriers keep XLA from gathering every layer's past at the start and storing every
        # layer's chunk at the end, which would hold them all in memory at once.
        chunk, kv = lax.optimization_barrier((RingKV(k=new.k, v=new.v), kv))
        past = kv_state.ring_past(kv, step.length, kv_state.round_up(self.spec.window - 1))
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), past, chunk)
        kv = kv_state.fill_ring(kv, chunk, step.length, step.new)
        both, kv = lax.optimization_barrier((both, kv))
        return Keys(k=both.k, v=both.v), kv

    def _attend(self, q: jax.Array, keys: Keys, angles: tuple, step: Step) -> jax.Array:
        """Turns float32 queries [B, T, N, H] and runs the op that fits: [B, T, N, H]."""
        s, dtype = self.spec, keys.v.dtype
        compact = {}
        if keys.k is None:
            turned = rope.rotate(rope.rotated_widths(q, s.rotated), *angles)
            compact = {"q_rotated": turned.astype(dtype), "k_rotated": keys.k_rotated}
            q = rope.without_rotated_widths(q * keys.k_norm.astype(jnp.float32), s.rotated)
        else:
            q = rope.rotate_head(q, *angles)
        arguments = (q.astype(dtype), keys.k, keys.v, step.length)
        choice = {"implementation": step.implementation}
        if not step.decode:
            return prefill_attention(*arguments, window=s.window, **compact, **choice)
        choice["prefetch"] = self.o  # read next
        if s.window is None:
            return global_attention(*arguments, **compact, **choice)
        return ring_attention(*arguments, window=s.window, **choice)
