"""The feed-forward half of a decoder layer: the dense MLP and the mixture of experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.config import GemmaConfig
from carat_jax.layers import gelu, linear, linear_f32, rms_norm, weight


class MLP(nn.Module):
    """Gated MLP. Weights: gate_up [D, 2, F] (gate, then up), down [F, D]."""

    config: GemmaConfig
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        D = x.shape[-1]
        y = linear("btd,dcf->btcf", x, weight(self, "gate_up", (D, 2, self.width), self.config))
        h = gelu(y[:, :, 0]) * y[:, :, 1]
        return linear("btf,fd->btd", h, weight(self, "down", (self.width, D), self.config))


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
        logits = linear_f32("md,de->me", r * D**-0.5, weight(self, "router", (D, E), c))
        share, index = lax.top_k(jax.nn.softmax(logits, axis=-1), c.top_k_experts)
        share = share / share.sum(-1, keepdims=True)
        scale = weight(self, "per_expert_scale", (E,), c).astype(jnp.float32)
        return index, share * scale[index]


def _chosen_experts(x, index, share, gate_up, down):
    """[M, D] -> float32 [M, D], gathering the k experts of each token."""
    y = linear("md,mkdcf->mkcf", x, gate_up[index])
    h = gelu(y[:, :, 0]) * y[:, :, 1]
    return jnp.einsum("mkd,mk->md", linear_f32("mkf,mkfd->mkd", h, down[index]), share)


def _every_expert(x, index, share, gate_up, down):
    """[M, D] -> float32 [M, D], one expert after another over all tokens."""

    def add(total, expert):
        e, w_gate_up, w_down = expert
        y = linear("md,dcf->mcf", x, w_gate_up)
        h = gelu(y[:, 0]) * y[:, 1]
        weight_of_e = jnp.where(index == e, share, 0.0).sum(-1, keepdims=True)
        return total + linear_f32("mf,fd->md", h, w_down) * weight_of_e, None

    experts = (jnp.arange(gate_up.shape[0]), gate_up, down)
    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), experts)[0]
