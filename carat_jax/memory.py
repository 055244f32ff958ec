"""How much memory a model and its state take, and the time it takes to read them."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.config import ConfigError, GemmaConfig
from carat_jax.generate import MIN_CAPACITY
from carat_jax.kv_state import RingKV, abstract_state, state_bytes
from carat_jax.params import abstract_params, param_bytes
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
    """Refuses a model that the memory of its devices cannot hold, before anything is read.

    Raises:
      ValueError: weights and the smallest state are larger than that; the message says how many
        devices would do.
      ConfigError: a mesh that the model cannot be cut for.
    """
    needed = _smallest(config, mesh)
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None or needed <= limit:
        return
    enough = (n for n in _possible(config) if _smallest(config, sharding.planned(n)) <= limit)
    advice = next((f"take {n} (carat.mesh(model={n}), --devices {n})" for n in enough), None)
    n = sharding.shards(mesh)
    raise ValueError(
        f"weights and the smallest state take {needed / 1e9:.2f} GB on "
        f"{'the device' if n == 1 else f'each of {n} devices'}, which has {limit / 1e9:.2f} GB: "
        f"{advice or 'no number of such devices is enough, choose a smaller model'}"
    )


def _smallest(config: GemmaConfig, mesh: AnyMesh | None) -> int:
    context = min(MIN_CAPACITY, config.max_position_embeddings)
    return memory_estimate(config, 1, context, mesh=mesh)


def _possible(config: GemmaConfig) -> Iterator[int]:
    """Numbers of devices that the model can be cut for, from 2 on."""
    for n in range(2, config.num_attention_heads + 1):
        with contextlib.suppress(ConfigError):
            sharding.check(config, sharding.planned(n))
            yield n


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
