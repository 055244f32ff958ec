"""The attention module of one decoder layer: projections, norms, RoPE, cache, output."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from carat_jax import kv_state
from carat_jax.config import GemmaConfig, LayerSpec
from carat_jax.kv_state import KVState, LayerKV, RingKV
from carat_jax.layers import linear_share, weight
from pallas_kernels import (
    AttentionInputs,
    PartialSums,
    attention_inputs,
    global_attention,
    prefill_attention,
    ring_attention,
)

MAX_DECODE_TOKENS = 16  # new positions a step may verify; longer inputs are prefilled


class Step(struct.PyTreeNode):
    """Where the T new positions of a forward pass sit. The same for every layer.

    Attributes:
      length: int32 [B], positions before the new ones.
      new: int32 [B], how many of the T are real; the rest is padding.
      decode: write the cache, then read it (a few positions); else prefill.
      implementation: of the attention ops, and in decode of `attention_inputs`; None = the best.
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
        cut along K never splits a group. The product with it is taken where the residual is
        formed, see `layers.Entry`.
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
        y: jax.Array | PartialSums,
        angles: tuple[jax.Array, jax.Array],
        step: Step,
        kv: LayerKV | None,
        lent: Keys | None,
    ) -> tuple[jax.Array | PartialSums, LayerKV | None, Keys]:
        """Attends with the queries of T positions, and gives them keys and values.

        Args:
          y: [B, T, K, x, H], product of the normed residual with `qkv`.
          angles: cosine and sine from `rope.angles` for this layer's type.
          step: where the T positions sit.
          kv: this layer's own cache, or None (no state, or a borrowing layer).
          lent: the keys and values that a borrowing layer reads, as its donor returned them.

        Returns:
          output [B, T, D], for `total`; the updated cache (None where none was given); the keys
          and values attended to.
        """
        c, s = self.config, self.spec
        B, T = y.shape[:2]
        K, G, H = s.num_kv_heads, s.group, s.head_dim
        o = self.o.reshape(K * G * H, c.hidden_size)
        # A chunk may be longer than a ring, which is therefore read before it is written.
        chunk = isinstance(kv, RingKV) and not step.decode
        inputs = attention_inputs(
            y,
            self.q_norm,
            self.k_norm if s.owns_kv else lent.k_norm,
            *angles,
            step.length,
            step.new,
            group=G,
            eps=c.rms_norm_eps,
            ring=s.window is not None,
            **({} if kv is None or chunk else kv_state.arrays(kv)),
            # The kernel is for a few positions.
            implementation=step.implementation if step.decode else "xla",
        )
        keys = lent
        if s.owns_kv:
            k_norm = self.k_norm if s.shared_projection else None
            keys = Keys(v=inputs.v, k=inputs.k, k_rotated=inputs.k_rotated, k_norm=k_norm)
        if chunk:
            keys, kv = self._through_the_ring(keys, step, kv)
        elif kv is not None:
            kv = kv.replace(**{name: getattr(keys, name) for name in kv_state.arrays(kv)})
        out = self._attend(inputs, keys, step).reshape(B, T, K * G * H)
        return linear_share(out, o, self.shards), kv, keys

    def _through_the_ring(self, new: Keys, step: Step, kv: RingKV) -> tuple[Keys, RingKV]:
        """What a chunk attends to, which is the past and itself; and the ring with it stored."""
        # The barriers keep XLA from gathering every layer's past at the start and storing every
        # layer's chunk at the end, which would hold them all in memory at once.
        chunk, kv = lax.optimization_barrier((RingKV(k=new.k, v=new.v), kv))
        past = kv_state.ring_past(kv, step.length, kv_state.round_up(self.spec.window - 1))
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), past, chunk)
        kv = kv_state.fill_ring(kv, chunk, step.length, step.new)
        both, kv = lax.optimization_barrier((both, kv))
        return Keys(k=both.k, v=both.v), kv

    def _attend(self, inputs: AttentionInputs, keys: Keys, step: Step) -> jax.Array:
        """Runs the op that fits: [B, T, N, H]."""
        s = self.spec
        compact = {}
        if keys.k is None:
            compact = {"q_rotated": inputs.q_rotated, "k_rotated": keys.k_rotated}
        arguments = (inputs.q, keys.k, keys.v, step.length)
        choice = {"implementation": step.implementation}
        if not step.decode:
            return prefill_attention(*arguments, window=s.window, **compact, **choice)
        # What one layer is lent another soon reads as well: it may stay in L2.
        choice["reread"] = not s.owns_kv
        if s.window is None:
            return global_attention(*arguments, **compact, **choice)
        return ring_attention(*arguments, window=s.window, **choice)
