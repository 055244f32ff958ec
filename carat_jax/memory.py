"""How much memory a model and its state take, and the time it takes to read them."""

import dataclasses
import math

import jax
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.config import ConfigError, GemmaConfig
from carat_jax.kv_state import RingKV, abstract_state, state_bytes
from carat_jax.model import abstract_params, param_bytes
from carat_jax.sharding import AnyMesh

# Bytes per second that a streaming kernel reads, measured; by the name JAX gives the device.
READ_BANDWIDTH = {"NVIDIA H200": 4.69e12}


def memory_estimate(
    config: GemmaConfig,
    batch: int = 1,
    max_context: int = 8192,
    *,
    mesh: AnyMesh | None = None,
) -> int:
    """Bytes of weights and state on the device, exactly; workspace comes on top.

    Args:
      config: the model; its dtype counts.
      batch: B.
      max_context: tokens that each row may hold.
      mesh: the bytes are those on each device of it. `sharding.planned` makes one to ask with.

    Raises:
      ValueError: as `init_state`.
      ConfigError: a mesh that the model cannot be cut for.
    """
    return param_bytes(config, mesh) + state_bytes(config, batch, max_context, mesh=mesh)


def check_fits(config: GemmaConfig, mesh: Mesh | None) -> None:
    """Refuses weights that are larger than the memory of a device, before anything is read.

    Raises:
      ValueError: they are; the message says how many devices would do.
      ConfigError: a mesh that the model cannot be cut for.
    """
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    needed = param_bytes(config, mesh)
    if limit is None or needed < limit:
        return
    n = sharding.shards(mesh)
    enough = (m for m in (2, 4, 8, 16, 32) if m > n and _weights_on(config, m) < limit)
    more = next((f"carat.mesh(model={m}) or --devices {m}" for m in enough), "a smaller model")
    raise ValueError(
        f"the weights take {needed / 1e9:.1f} GB on {'the' if n == 1 else 'each'} device, and it "
        f"has {limit / 1e9:.1f} GB: take {more}"
    )


def _weights_on(config: GemmaConfig, devices: int) -> float:
    try:
        return param_bytes(config, sharding.planned(devices))
    except ConfigError:
        return math.inf


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step must read, each once: the floor's numerator.

    Attributes:
      weights: all that every step reads; of the embedding table the whole, as the head does.
      experts: of the experts, those that the rows of this batch visit at most.
      kv: rings and the live part of the global caches.
    """

    weights: int
    experts: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.kv

    def floor_s(self, bandwidth: float) -> float:
        """Seconds at `bandwidth` bytes per second."""
        return self.total / bandwidth


def step_bytes(
    config: GemmaConfig, batch: int, context: int, mesh: AnyMesh | None = None
) -> StepBytes:
    """What a decode step of `batch` rows reads with `context` tokens behind each.

    On a mesh, what each device of it reads; of the experts its share of those visited, though they
    may be dealt out less evenly.
    """
    params = sharding.local(abstract_params(config, mesh))
    state = sharding.local(abstract_state(config, batch, context, mesh=mesh))
    batch = state.length.size
    item = params["norm"].dtype.itemsize
    experts = sum(
        math.prod(layer["experts"][name].shape)
        for layer in (params[f"layers_{i}"] for i in range(config.num_hidden_layers))
        if "experts" in layer
        for name in ("gate_up", "down")
    )
    visited = min(batch * config.top_k_experts, config.num_experts)
    all_weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    rows = params.get("embed_tokens_per_layer")  # a lookup: one row a token, not the table
    table = 0 if rows is None else math.prod(rows.shape)
    row = 0 if rows is None else math.prod(rows.shape[1:])
    weights = (all_weights - experts - table) * item
    kv = 0
    for layer, spec in zip(state.layers, config.kv_layers, strict=True):
        width = sum(
            a.shape[-1]
            for a in (layer.v, layer.k, getattr(layer, "k_rotated", None))
            if a is not None
        )
        keys = min(context, spec.window) if isinstance(layer, RingKV) else context
        kv += batch * layer.v.shape[1] * keys * width * item
    return StepBytes(
        weights=weights + batch * row * item,
        experts=experts * visited // max(config.num_experts, 1) * item,
        kv=kv,
    )
