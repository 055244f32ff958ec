"""Weights from which training starts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax

from carat_jax.model import Params


def initial_params(shapes: Params, num_layers: int, seed: int) -> Params:
    """Random float32 weights for dense layers; the same on every device.

    Matrices are normal with variance one over the widths they sum over. Norms and scalars are one,
    but for two: those of the queries give attention scores a variance of one (their scale is 1.0),
    and those after each branch keep the residual stream from growing with depth.

    Args:
      shapes: a tree like that of `abstract_params`.
      num_layers: decoder layers in it.
      seed: of the draw.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
        match path[-1]:
            case "q_norm":
                value = np.full(shape, shape[0] ** -0.5)
            case "post_attention_layernorm" | "post_feedforward_layernorm":
                value = np.full(shape, (2 * num_layers) ** -0.5)
            case "embed_tokens":
                value = rng.standard_normal(shape) * shape[-1] ** -0.5
            case "o":  # [K, G, H, D]
                value = rng.standard_normal(shape) * math.prod(shape[:-1]) ** -0.5
            case _ if len(shape) > 1:
                value = rng.standard_normal(shape) * shape[0] ** -0.5
            case _:
                value = np.ones(shape)
        return jnp.asarray(value, jnp.float32)

    flat = traverse_util.flatten_dict(shapes)
    return traverse_util.unflatten_dict({p: leaf(p, a.shape) for p, a in sorted(flat.items())})


def suited(params: Params, target: Params) -> Params:
    """Initial params of an assistant drafter, made to suit the target's.

    Its inputs are brought to a mean square of one: a target's hidden states may be several times
    larger than its embeddings, and one would drown the other. What it passes on for the next step
    gets the size of those hidden states. Its head begins as the target's, seen in the directions in
    which that has most of its length: tokens alike there are alike here from the start.
    """
    table, norm = (jnp.asarray(target[name], jnp.float32) for name in ("embed_tokens", "norm"))
    D = len(norm)
    embedded, hidden = _rms(table) * math.sqrt(D), _rms(norm)
    sizes = jnp.repeat(jnp.stack([embedded, hidden]), D)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    _, directions = jnp.linalg.eigh(product(table.T, table))  # the longest last
    width = min(params["embed_tokens"].shape[1], D)
    head = product(table, directions[:, -width:])
    head /= _rms(head) * math.sqrt(width)
    return params | {
        "pre_projection": params["pre_projection"] / sizes[:, None],
        "post_projection": params["post_projection"] * hidden,
        "embed_tokens": params["embed_tokens"].at[:, :width].set(head),
    }


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x))
