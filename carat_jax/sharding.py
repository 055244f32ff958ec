"""Meshes of devices, and which axis of each array is cut over them.

A mesh has two axes: `data` cuts the rows of a batch, `model` the model. Each device of the
`model` axis has some of the KV heads with their query heads, some of the MLP's width, of the
experts and of the vocabulary (`LAYER`, `TOP`), and runs the model on its share alone: the whole
forward step is one `shard_map`, in which the modules are made for the sizes of one device. What
must be known of the others is asked for explicitly, and it is little: two sums a layer (of the
products whose inner axis is cut), one for the embedding, one gather of the logits. All the rest,
sampling and the loops around the model, is left to XLA's partitioner, on arrays that every
device of the `model` axis has in full.

Why not leave the model to the partitioner as well? It cannot cut a Pallas kernel, so each would
need a `shard_map` of its own; it gathers the weights of gate and up where these are flattened for
their product, and the caches where positions are written by index. In one `shard_map` none of
that can happen, the collectives are those in the source, and the code of the model is that of one
device, with smaller numbers.

Numbers are added up over devices in float32 and rounded once, where one device would round.

* **Fewer KV heads than devices** (a global layer of 31B has 4, of 12B one): each is repeated for
  as many devices as need it, with its share of the query heads. The weights and the cache of
  such a layer then have `model` KV heads, so that every device has the same shapes. Checkpoints
  keep the model's own form; `spread` makes this one of it.
* **Experts** are cut by number, not by width: of a width of 704 a half is no multiple of the 64
  columns that the kernel takes. So devices may have unequal numbers of experts to visit.
* **Rows** are cut over `data` where it divides the batch; else each group of devices has them all.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from carat_jax.config import ConfigError, GemmaConfig

DATA, MODEL = "data", "model"

# Where weights are cut, by the end of their path; those not named here are on every device.
LAYER = {
    "attention/qkv": P(None, MODEL),  # [D, K, x, H]
    "attention/o": P(MODEL),  # [K, G, H, D]
    "mlp/gate_up": P(None, None, MODEL),  # [D, 2, F]
    "mlp/down": P(MODEL),  # [F, D]
    "experts/gate_up": P(MODEL),  # [E, D, 2, F]
    "experts/down": P(MODEL),  # [E, F, D]
}
TOP = {
    "embed_tokens": P(MODEL),  # [V, D]
    "embed_tokens_per_layer": P(None, None, MODEL),  # [V, L, P]
    "per_layer_model_projection": P(None, None, MODEL),  # [D, L, P]
}
LAST_OF_FOUR = P(None, None, None, MODEL)  # of qkv and o, where a cut along K does not work out

AnyMesh = Mesh | AbstractMesh


def mesh(
    *, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh for `load` and its like, of data · model devices.

    Args:
      data: groups of devices among which the rows of a batch are divided.
      model: devices of a group, among which the model is divided.
      devices: which; None = the first of all that JAX finds, in all processes.

    Raises:
      ValueError: a number below 1, or more than there are devices.
    """
    found = jax.devices() if devices is None else list(devices)
    wanted = data * model
    if min(data, model) < 1:
        raise ValueError(f"data = {data}, model = {model}: each must be at least 1")
    if wanted > len(found):
        raise ValueError(
            f"a mesh of data {data} × model {model} takes {wanted} devices, and there are "
            f"{len(found)}: lower one of the two"
        )
    axes = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=axes, devices=found[:wanted])


def planned(model: int) -> AbstractMesh:
    """A mesh without devices, to ask what each would hold.

    Raises:
      ValueError: a number below 1.
    """
    if model < 1:
        raise ValueError(f"{model} devices: it must be at least 1")
    return AbstractMesh((1, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


class MeshParams(dict):
    """Parameters that lie on a mesh, and know it: under jit it is part of the tree's structure.

    So the functions of the model need no argument for the mesh, and the trees stay plain.

    Attributes:
      mesh: the mesh.
    """

    def __init__(self, params: Mapping[str, Any], mesh: AnyMesh) -> None:
        super().__init__(params)
        self.mesh = mesh


jax.tree_util.register_pytree_with_keys(
    MeshParams,
    lambda p: ([(jax.tree_util.DictKey(k), p[k]) for k in sorted(p)], (tuple(sorted(p)), p.mesh)),
    lambda aux, leaves: MeshParams(zip(aux[0], leaves, strict=True), aux[1]),
)


def mesh_of(params: Mapping[str, Any]) -> AnyMesh | None:
    """The mesh that parameters lie on; None = one device."""
    return params.mesh if isinstance(params, MeshParams) else None


def shards(mesh: AnyMesh | None) -> int:
    """How many devices the model is cut into."""
    return 1 if mesh is None else mesh.shape[MODEL]


def check(config: GemmaConfig, mesh: AnyMesh, whose: str = "the model's") -> None:
    """Refuses a mesh that this model cannot be cut for.

    Args:
      whose: how the message names it.

    Raises:
      ValueError: a mesh with other axes than `mesh` makes.
      ConfigError: sizes that do not divide; each is named.
    """
    if tuple(mesh.axis_names) != (DATA, MODEL):
        raise ValueError(
            f"a mesh with the axes {mesh.axis_names}: make it with carat.mesh(data=…, model=…)"
        )
    n = shards(mesh)
    if wrong := _uneven(config, n):
        possible = [str(m) for m in range(1, n) if not _uneven(config, m)]
        sizes = ", ".join(f"{name} {size:,}" for name, size in wrong.items())
        raise ConfigError(
            f"a mesh with model = {n} does not divide {whose} {sizes}: "
            f"take model = {' or '.join(possible)}"
        )


def _uneven(config: GemmaConfig, n: int) -> dict[str, int]:
    """The sizes that n devices cannot share evenly."""
    c = config
    sizes = {
        "num_attention_heads": c.num_attention_heads,
        "vocab_size": c.vocab_size,
        "intermediate_size": c.intermediate_size,
        "num_experts": c.num_experts,
        "hidden_size_per_layer_input": c.hidden_size_per_layer_input,
    }
    wrong = {name: size for name, size in sizes.items() if size % n}
    heads = {
        "num_key_value_heads": c.num_key_value_heads,
        "num_global_key_value_heads": c.num_global_key_value_heads,
    }
    return wrong | {name: K for name, K in heads.items() if K % n and n % K}


# --- Weights -------------------------------------------------------------------------------------


def specs(params: Mapping[str, Any], top: Mapping[str, P] = TOP) -> Any:
    """The `PartitionSpec` of each leaf of a parameter tree, as they are used.

    Args:
      params: arrays or shapes.
      top: rules for what is no layer's.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    found = traverse_util.unflatten_dict({path: _spec(path, top) for path in flat}, sep="/")
    mesh = mesh_of(params)
    return found if mesh is None else MeshParams(found, mesh)


def laid_out(shapes: Mapping[str, Any], mesh: AnyMesh, top: Mapping[str, P] = TOP) -> MeshParams:
    """From the shapes of a checkpoint's parameters to those on the mesh, with their shardings.

    They differ in layers with fewer KV heads than devices.
    """
    flat = traverse_util.flatten_dict(shapes, sep="/")
    n = shards(mesh)
    found = {path: leaf.shape for path, leaf in flat.items()}
    for path, o in flat.items():
        if _few_heads(path, o.shape, n):
            (K, G, H, D), qkv = o.shape, _qkv(path)
            found[path] = (n, K * G // n, H, D)
            found[qkv] = (D, n, K * G // n + flat[qkv].shape[2] - G, H)
    placed = {
        path: _with_sharding(leaf, found[path], NamedSharding(mesh, _spec(path, top)))
        for path, leaf in flat.items()
    }
    return MeshParams(traverse_util.unflatten_dict(placed, sep="/"), mesh)


def stored(shapes: Mapping[str, Any], mesh: AnyMesh, top: Mapping[str, P] = TOP) -> dict[str, Any]:
    """The same shapes, with the shardings in which a checkpoint is read or written."""
    flat = traverse_util.flatten_dict(shapes, sep="/")
    n = shards(mesh)
    found = {path: _spec(path, top) for path in flat}
    for path, o in flat.items():
        if _few_heads(path, o.shape, n):
            for heads in (path, _qkv(path)):
                found[heads] = P() if flat[heads].shape[3] % n else LAST_OF_FOUR
    placed = {
        path: _with_sharding(leaf, leaf.shape, NamedSharding(mesh, found[path]))
        for path, leaf in flat.items()
    }
    return traverse_util.unflatten_dict(placed, sep="/")


def spread(params: Mapping[str, Any], mesh: Mesh) -> MeshParams:
    """Parameters that lie as `stored` says, as the model takes them on the mesh.

    Where there are fewer KV heads than devices each is repeated, and its query heads are divided
    among its copies.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    n = shards(mesh)
    for path, o in list(flat.items()):
        if _few_heads(path, o.shape, n):
            qkv = _qkv(path)
            flat[qkv], flat[path] = _spread(mesh, flat[qkv], o)
    return MeshParams(traverse_util.unflatten_dict(flat, sep="/"), mesh)


@functools.partial(jax.jit, static_argnums=0)
def _spread(mesh: Mesh, qkv: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
    (K, G, H, D), n = o.shape, shards(mesh)
    # No cut of these fits into the other, so each device takes its part from the whole.
    qkv, o = jax.lax.with_sharding_constraint((qkv, o), NamedSharding(mesh, P()))
    queries = qkv[:, :, :G].reshape(D, n, K * G // n, H)
    own = jnp.repeat(qkv[:, :, G:], n // K, axis=1)
    spread = jnp.concatenate([queries, own], axis=2), o.reshape(n, K * G // n, H, D)
    wanted = tuple(NamedSharding(mesh, LAYER[name]) for name in ("attention/qkv", "attention/o"))
    return jax.lax.with_sharding_constraint(spread, wanted)


def _few_heads(path: str, shape: tuple[int, ...], n: int) -> bool:
    """Whether this is the output weight of a layer with fewer KV heads than n devices."""
    return path.endswith("attention/o") and shape[0] % n != 0


def _qkv(path: str) -> str:
    """Beside the output weight of a layer, that of its queries, keys and values."""
    return path.removesuffix("o") + "qkv"


def _with_sharding(leaf: Any, shape: tuple[int, ...], place: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)


def _spec(path: str, top: Mapping[str, P]) -> P:
    return LAYER.get("/".join(path.split("/")[-2:])) or top.get(path) or P()


def local(shapes: Any) -> Any:
    """A tree of shapes as each device has them; those without a sharding stay."""

    def of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.sharding is None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

    return jax.tree.map(of, shapes)


def local_bytes(shapes: Any) -> int:
    """Bytes of a tree of shapes on each device."""
    leaves = jax.tree.leaves(local(shapes))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


# --- Rows ----------------------------------------------------------------------------------------


def rows(mesh: AnyMesh, batch: int) -> P:
    """The `PartitionSpec` of arrays whose first axis is a batch of so many rows."""
    n = mesh.shape[DATA]
    return P(DATA) if n > 1 and batch % n == 0 else P()


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Puts arrays [B, ...] that are not on the mesh there. None: as they are.

    What a jitted function gives back lies on the mesh. Were what it is given first to lie
    elsewhere, it would be compiled twice.
    """
    return _put(tree, mesh, lambda x: rows(mesh, x.shape[0]) if x.ndim else P())


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Puts arrays that are not on the mesh on every device of it. None: as they are."""
    return _put(tree, mesh, lambda _: P())


def _put(tree: Any, mesh: Mesh | None, spec: Callable[[jax.Array], P]) -> Any:
    if mesh is None:
        return tree

    def put(x: jax.Array) -> jax.Array:
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        return jax.device_put(x, NamedSharding(mesh, spec(x)))

    return jax.tree.map(put, tree)


def fetch(tree: Any) -> Any:
    """`jax.device_get`, also of rows that lie with other processes."""

    def whole(x: jax.Array) -> jax.Array:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return _replicated(x.sharding.mesh)(x)

    return jax.device_get(jax.tree.map(whole, tree))


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
