"""The feed-forward half of a decoder layer: the dense MLP and the mixture of experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.config import GemmaConfig
from carat_jax.layers import linear, linear_share, rms_norm, weight
from carat_jax.sharding import MODEL
from pallas_kernels import PartialSums, choose_experts, expert_matmul, gated_gelu


class MLP(nn.Module):
    """Gated MLP. Weights: gate_up [D, 2, F] (gate, then up), down [F, D]; F is `width`.

    The product with gate_up is taken where the residual is formed, see `layers.Entry`.

    On a mesh a device has a share of the width, and its output is a share of the sum.
    """

    config: GemmaConfig
    width: int
    shards: int = 1

    def setup(self) -> None:
        D = self.config.hidden_size
        self.gate_up = weight(self, "gate_up", (D, 2, self.width), self.config)
        self.down = weight(self, "down", (self.width, D), self.config)

    def __call__(self, y: jax.Array | PartialSums) -> jax.Array | PartialSums:
        """[B, T, 2, F], the product with gate_up -> [B, T, D], for `total`."""
        return linear_share(gated_gelu(y), self.down, self.shards)


class Experts(nn.Module):
    """Mixture of experts: a float32 router and E gated MLPs, of which each token visits k.

    Weights: router [D, E], router_scale [D], per_expert_scale [E], gate_up [E, D, 2, F],
    down [E, F, D]. On a mesh a device has a share of the experts (E of the last two is less) and
    the whole router, and its output is a share of the sum.
    """

    config: GemmaConfig
    shards: int = 1

    def setup(self) -> None:
        c = self.config
        D, E, F = c.hidden_size, c.num_experts, c.moe_intermediate_size
        self.router = weight(self, "router", (D, E), c)
        self.router_scale = weight(self, "router_scale", (D,), c)
        self.per_expert_scale = weight(self, "per_expert_scale", (E,), c)
        E //= self.shards
        self.gate_up = weight(self, "gate_up", (E, D, 2, F), c)
        self.down = weight(self, "down", (E, F, D), c)

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        """Runs x [B, T, D] through the experts that `residual` [B, T, D] chooses: float32, for
        `total`.

        The router reads the residual under a norm without weight, the experts read x.
        """
        B, T, D = x.shape
        index, share = self._route(residual.reshape(B * T, D))
        self.sow("intermediates", "router", (index, share))
        if self.shards > 1:
            index = _of_this_device(index, len(self.down))
        x = x.reshape(B * T, D)
        y = _visit(x, index, share, self.gate_up, self.down, self.shards > 1)
        return y.reshape(B, T, D)

    def _route(self, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For [M, D]: expert ids int32 [M, k] and their weights float32 [M, k]."""
        c = self.config
        r = rms_norm(residual, None, c.rms_norm_eps) * self.router_scale
        logits = linear(r * c.hidden_size**-0.5, self.router, jnp.float32)
        return choose_experts(logits, self.per_expert_scale, k=c.top_k_experts)


def _of_this_device(index: jax.Array, E: int) -> jax.Array:
    """Expert ids as this device counts its own E; E for those of others."""
    index = index - lax.axis_index(MODEL) * E
    return jnp.where((index >= 0) & (index < E), index, E)


def _visit(
    x: jax.Array,
    index: jax.Array,
    share: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    absent: bool,
) -> jax.Array:
    """[M, D] -> float32 [M, D]: the experts `index` [M, k] of each token, weighed by `share`.

    `absent`: some have the index E, and add nothing.
    """
    M, k = index.shape
    expert, visit = index.reshape(-1), jnp.arange(M * k)
    x = x.astype(gate_up.dtype)
    if M == 1:  # k different experts: there is nothing to bring together
        rows = jnp.broadcast_to(x, (k, x.shape[1]))
    else:
        # Sorted by expert, then by visit, as one array: cheaper than an argsort.
        expert, visit = jnp.divmod(jnp.sort(expert * (M * k) + visit), M * k)
        rows = x[visit // k]
    y = expert_matmul(rows, gate_up, expert, absent=absent)
    y = expert_matmul(y, down, expert, absent=absent)
    if absent:
        y = jnp.where((expert < len(down))[:, None], y, 0)
    if M > 1:
        y = y[jnp.zeros_like(visit).at[visit].set(jnp.arange(M * k), unique_indices=True)]
    return (y.astype(jnp.float32).reshape(M, k, -1) * share[..., None]).sum(1)
