"""The feed-forward half of a decoder layer: the dense MLP and the mixture of experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from carat_jax.config import GemmaConfig
from carat_jax.layers import gelu, linear, rms_norm, weight


class MLP(nn.Module):
    """Gated MLP. Weights: gate_up [D, 2, F] (gate, then up), down [F, D]."""

    config: GemmaConfig
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        D = x.shape[-1]
        y = linear(x, weight(self, "gate_up", (D, 2, self.width), self.config))
        h = gelu(y[:, :, 0]) * y[:, :, 1]
        return linear(h, weight(self, "down", (self.width, D), self.config))


class Experts(nn.Module):
    """Mixture of experts: a float32 router and E gated MLPs, of which each token visits k.

    Weights: router [D, E], router_scale [D], per_expert_scale [E], gate_up [E, D, 2, F],
    down [E, F, D].
    """

    config: GemmaConfig

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Runs x [B, T, D] through the experts that `residual` [B, T, D] chooses.

        The router reads the residual under a norm without weight, the experts read x.
        """
        c = self.config
        B, T, D = x.shape
        E, F = c.num_experts, c.moe_intermediate_size
        index, share = self._route(residual.reshape(B * T, D))
        gate_up = weight(self, "gate_up", (E, D, 2, F), c)
        down = weight(self, "down", (E, F, D), c)
        self.sow("intermediates", "router", (index, share))
        # Reading the chosen experts only pays while they are fewer than all of them.
        run = _chosen_experts if B * T * c.top_k_experts <= E else _every_expert
        y = run(x.reshape(B * T, D), index, share, gate_up, down)
        return y.astype(x.dtype).reshape(B, T, D)

    def _route(self, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For [M, D]: expert ids int32 [M, k] and their weights float32 [M, k]."""
        c = self.config
        D, E = residual.shape[-1], c.num_experts
        r = rms_norm(residual, None, c.rms_norm_eps) * weight(self, "router_scale", (D,), c)
        logits = linear(r * D**-0.5, weight(self, "router", (D, E), c), jnp.float32)
        share, index = lax.top_k(jax.nn.softmax(logits, axis=-1), c.top_k_experts)
        share = share / share.sum(-1, keepdims=True)
        scale = weight(self, "per_expert_scale", (E,), c).astype(jnp.float32)
        return index, share * scale[index]


def _chosen_experts(x, index, share, gate_up, down):
    """[M, D] -> float32 [M, D], gathering the k experts of each token: M·k products of one row."""
    M, k = index.shape
    visits = jnp.repeat(x, k, axis=0)[:, None]  # [M·k, 1, D]
    w_gate_up, w_down = gate_up[index.reshape(-1)], down[index.reshape(-1)]
    y = _batched(visits, w_gate_up.reshape(M * k, x.shape[-1], -1), x.dtype)
    gate, up = jnp.split(y, 2, axis=-1)
    out = _batched((gelu(gate) * up).astype(x.dtype), w_down, jnp.float32)
    return (out.reshape(M, k, -1) * share[..., None]).sum(1)


def _batched(a: jax.Array, b: jax.Array, out: DTypeLike) -> jax.Array:
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=out)


def _every_expert(x, index, share, gate_up, down):
    """[M, D] -> float32 [M, D], one expert after another over all tokens."""

    def add(e, total):
        y = linear(x, gate_up[e])
        h = gelu(y[:, 0]) * y[:, 1]
        weight_of_e = jnp.where(index == e, share, 0.0).sum(-1, keepdims=True)
        return total + linear(h, down[e], jnp.float32) * weight_of_e

    return lax.fori_loop(0, gate_up.shape[0], add, jnp.zeros(x.shape, jnp.float32))
