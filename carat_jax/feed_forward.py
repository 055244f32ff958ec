"""The feed-forward half of a decoder layer: the dense MLP and the mixture of experts."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.config import GemmaConfig
from carat_jax.layers import linear_share, weight
from carat_jax.sharding import MODEL
from pallas_kernels import (
    PartialSums,
    choose_experts,
    expert_inputs,
    expert_matmul,
    gated_gelu,
    weighed,
)


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


class Visits(NamedTuple):
    """What the experts made of M tokens, each of which visits k, for `combine_experts`.

    On a mesh k is 1 here: a token's row, float32, is one device's share of its sum, for `total`.

    Attributes:
      rows: [M · k, D], one for each visit.
      place: int32 [M, k], which row is whose; None: in the order of tokens.
      share: float32 [M, k], by which a row is weighed.
    """

    rows: jax.Array
    place: jax.Array | None
    share: jax.Array


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

    def __call__(self, residual: jax.Array, norm: jax.Array) -> Visits:
        """Runs residual [B, T, D] through the experts that it chooses.

        The experts read it under a norm of weight `norm` [D], the router under one of its own.
        """
        c, h = self.config, residual.reshape(-1, residual.shape[-1])
        x, logits = expert_inputs(h, norm, self.router_scale, self.router, eps=c.rms_norm_eps)
        index, share = choose_experts(logits, self.per_expert_scale, k=c.top_k_experts)
        self.sow("intermediates", "router", (index, share))
        if self.shards > 1:
            index = _of_this_device(index, len(self.down))
        visits = Visits(*_visit(x, index, self.gate_up, self.down, self.shards > 1), share)
        return visits if self.shards == 1 else _one_each(visits)


def _one_each(visits: Visits) -> Visits:
    """The same with one row for each token, the sum of its k, so that devices send no more."""
    rows = weighed(*visits)
    return Visits(rows, None, jnp.ones((len(rows), 1), jnp.float32))


def _of_this_device(index: jax.Array, E: int) -> jax.Array:
    """Expert ids as this device counts its own E; E for those of others."""
    index = index - lax.axis_index(MODEL) * E
    return jnp.where((index >= 0) & (index < E), index, E)


def _visit(
    x: jax.Array, index: jax.Array, gate_up: jax.Array, down: jax.Array, absent: bool
) -> tuple[jax.Array, jax.Array | None]:
    """What the experts `index` [M, k] make of each row of x [M, D]: rows and places of `Visits`.

    `absent`: some have the index E, and give zeros.
    """
    M, k = index.shape
    x, expert, place = x.astype(gate_up.dtype), index.reshape(-1), None
    if M > 1:  # else k different experts: there is nothing to bring together
        # Sorted by expert, then by visit, as one array: cheaper than an argsort.
        row = jnp.arange(M * k, dtype=jnp.int32)
        expert, visit = jnp.divmod(jnp.sort(expert * (M * k) + row), M * k)
        x = x[visit // k]
        place = jnp.zeros_like(row).at[visit].set(row, unique_indices=True)
        place = place.reshape(M, k)
    y = expert_matmul(x, gate_up, expert, absent=absent)
    y = expert_matmul(y, down, expert, absent=absent)
    if absent:
        y = jnp.where((expert < len(down))[:, None], y, 0)
    return y, place
