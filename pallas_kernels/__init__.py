"""Attention and expert products for Gemma 4 in JAX: arrays in, arrays out.

One folder an op. Its `__init__` holds the public function, `xla.py` the implementation that is
the reference, the CPU path and a contender on GPU; `apart.py` is that of an op made of two. Axis
letters: B sequence, T new position, N query head, K KV head, G = N / K, H head width, S slot of a
global cache, R slot of a ring, W window, P rotated widths of a head.
"""

from pallas_kernels.attention_inputs import AttentionInputs, attention_inputs
from pallas_kernels.choose_experts import choose_experts
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.gated_gelu import gated_gelu
from pallas_kernels.global_attention import global_attention
from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.per_layer_input import per_layer_input
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.residual_norm_matmul import residual_norm_matmul
from pallas_kernels.ring_attention import ring_attention
from pallas_kernels.skinny_matmul import skinny_matmul

__all__ = [
    "AttentionInputs",
    "PartialSums",
    "Unsupported",
    "attention_inputs",
    "choose_experts",
    "expert_matmul",
    "gated_gelu",
    "global_attention",
    "per_layer_input",
    "prefill_attention",
    "residual_norm",
    "residual_norm_matmul",
    "ring_attention",
    "skinny_matmul",
    "summed",
]
