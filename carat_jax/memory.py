"""How much memory a model and its state take, and the time it takes to read them."""

import dataclasses
import math

from carat_jax.config import GemmaConfig
from carat_jax.kv_state import RingKV, abstract_state, state_bytes
from carat_jax.model import abstract_params, param_bytes

# Bytes per second that a streaming kernel reads, measured; by the name JAX gives the device.
READ_BANDWIDTH = {"NVIDIA H200": 4.69e12}


def memory_estimate(config: GemmaConfig, batch: int = 1, max_context: int = 8192) -> int:
    """Bytes of weights and state on the device, exactly; workspace comes on top.

    Args:
      config: the model; its dtype counts.
      batch: B.
      max_context: tokens that each row may hold.

    Raises:
      ValueError: as `init_state`.
    """
    return param_bytes(config) + state_bytes(config, batch, max_context)


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


def step_bytes(config: GemmaConfig, batch: int, context: int) -> StepBytes:
    """What a decode step of `batch` rows reads with `context` tokens behind each."""
    params = abstract_params(config)
    item = params["norm"].dtype.itemsize
    experts = sum(
        math.prod(layer["experts"][name].shape)
        for layer in (params[f"layers_{i}"] for i in range(config.num_hidden_layers))
        if "experts" in layer
        for name in ("gate_up", "down")
    )
    visited = min(batch * config.top_k_experts, config.num_experts)
    rows = params.get("embed_tokens_per_layer")  # a lookup: one row a token, not the table
    table = 0 if rows is None else math.prod(rows.shape)
    row = 0 if rows is None else math.prod(rows.shape[1:])
    weights = param_bytes(config) - (experts + table) * item
    kv = 0
    for layer, spec in zip(
        abstract_state(config, batch, context).layers, config.kv_layers, strict=True
    ):
        width = sum(
            a.shape[-1]
            for a in (layer.v, layer.k, getattr(layer, "k_rotated", None))
            if a is not None
        )
        keys = min(context, spec.window) if isinstance(layer, RingKV) else context
        kv += batch * spec.num_kv_heads * keys * width * item
    return StepBytes(
        weights=weights + batch * row * item,
        experts=experts * visited // max(config.num_experts, 1) * item,
        kv=kv,
    )
