"""The parameter tree of a model: its shapes, its size, random values for it."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.config import GemmaConfig
from carat_jax.model import Gemma4, Params
from carat_jax.sharding import AnyMesh


def abstract_params(config: GemmaConfig, mesh: AnyMesh | None = None) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct` leaves; nothing is allocated.

    With a mesh they have the shardings and, where KV heads are repeated, the shapes of it.

    Raises:
      ConfigError: a mesh that the model cannot be cut for.
    """
    shapes = traverse_util.unflatten_dict(_param_shapes(config), sep="/")
    if mesh is None:
        return shapes
    sharding.check(config, mesh)
    return sharding.laid_out(shapes, mesh)


@functools.cache
def _param_shapes(config: GemmaConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """By path ("layers_0/mlp/down"). Cached: a large model takes half a second."""
    init = functools.partial(Gemma4(config).init, method="declare")
    shapes = jax.eval_shape(init, jax.random.key(0))["params"]
    return traverse_util.flatten_dict(shapes, sep="/")


def init_params(config: GemmaConfig, key: jax.Array, mesh: Mesh | None = None) -> Params:
    """Random weights of the model's real shapes, by `random_params`; the same on any mesh.

    Raises:
      ConfigError: as `abstract_params`.
    """
    shapes = abstract_params(config)
    if mesh is None:
        return random_params(shapes, key)
    sharding.check(config, mesh)
    return sharding.spread(random_params(sharding.stored(shapes, mesh), key), mesh)


def random_params(shapes: Params, key: jax.Array) -> Params:
    """Random weights for a tree like that of `abstract_params`, made on the device leaf by leaf.

    Norm weights, layer and router scales are one, except that of queries: H^-1/2, since scores
    have no other scale. Matrices are normal with variance one over the width they sum over.
    """
    leaves = {
        path: _init_leaf(jax.random.fold_in(key, i), leaf, _fan_in(path, leaf))
        for i, (path, leaf) in enumerate(traverse_util.flatten_dict(shapes, sep="/").items())
    }
    for path, leaf in leaves.items():
        if path.endswith("/q_norm"):
            leaves[path] = leaf * leaf.dtype.type(leaf.size**-0.5)
    return traverse_util.unflatten_dict(leaves, sep="/")


def _fan_in(path: str, leaf: jax.ShapeDtypeStruct) -> int | None:
    """Widths a matrix sums over; None for norms and scales."""
    name = path.rsplit("/", 1)[-1]
    shape = leaf.shape
    if len(shape) == 1:
        return None
    if name in ("embed_tokens", "embed_tokens_per_layer"):
        return shape[-1]
    if "experts" in path and name in ("gate_up", "down"):
        return shape[1]
    return math.prod(shape[:-1]) if name == "o" else shape[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init_leaf(key: jax.Array, leaf: jax.ShapeDtypeStruct, fan_in: int | None) -> jax.Array:
    if fan_in is None:
        made = jnp.ones(leaf.shape, leaf.dtype)
    else:
        made = jax.random.normal(key, leaf.shape, leaf.dtype)
        made = made * jnp.asarray(fan_in**-0.5, leaf.dtype)
    return made if leaf.sharding is None else lax.with_sharding_constraint(made, leaf.sharding)


def param_bytes(config: GemmaConfig, mesh: AnyMesh | None = None) -> int:
    """Bytes of the weights, exactly; on a mesh, on each device of it.

    Raises:
      ConfigError: as `abstract_params`.
    """
    return sharding.local_bytes(abstract_params(config, mesh))


def num_params(config: GemmaConfig) -> int:
    """Weights that the model uses (what a checkpoint holds beyond them is not counted)."""
    return sum(math.prod(leaf.shape) for leaf in _param_shapes(config).values())
