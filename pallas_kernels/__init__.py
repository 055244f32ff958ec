"""The heavy parts of Gemma 4's layers in JAX: arrays in, arrays out.

Attention and what it is given, products of few rows and of experts, and what stands between
products: norms, residual sums, activation, per-layer inputs, the choice of experts, what these are
given and how what they give is combined.

One folder an op. Its `__init__` holds the public function and its implementations, of which the
last takes everything, and has a gradient: `xla.py`, the reference, the CPU path and a contender on
GPU; or `apart.py`, that of an op made of two.

Beside them, what ops share: `dispatch` picks an implementation; `partial_sums` are products left
in pieces; `grouping`, `rotation` and `cache_slots` are query rows by KV head, RoPE and writes to
a cache in plain JAX. Of kernels: `split_keys` is that of two ops, decode attention; of
`streamed_product`, `row_norm` and `tile_product` several are made; `row_copies`, `read_once` and
`thread_stores` move rows, tiles and numbers within them.

Axis letters: B sequence, T new position, N query head, K KV head, G = N / K, H head width, S slot
of a global cache, R slot of a ring, W window, P rotated widths of a head.
"""

from pallas_kernels.attention_inputs import AttentionInputs, attention_inputs
from pallas_kernels.choose_experts import choose_experts
from pallas_kernels.combine_experts import combine_experts
from pallas_kernels.combine_experts.xla import weighed
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.expert_inputs import expert_inputs
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
    "combine_experts",
    "expert_inputs",
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
    "weighed",
]
