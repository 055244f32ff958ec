"""Small checkpoints of unusual shapes with random weights, under the published tensor names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FULL, SLIDING = "full_attention", "sliding_attention"


def config_json(**text: Any) -> dict[str, Any]:
    """A flat `config.json`, small where nothing else is said.

    Keys are the published ones, and rope_partial for the global layers' partial_rotary_factor.
    """
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": text.pop("rope_partial", 0.25),
        },
    }
    return {
        "model_type": "gemma4_text",
        "dtype": "float32",
        "vocab_size": 96,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
        "global_head_dim": 24,
        "sliding_window": 37,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
        "num_hidden_layers": len(text["layer_types"]),
    } | text


def write(folder: Path, config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Writes config.json and model.safetensors; returns the tensors."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: _values(rng, name, shape) for name, shape in tensor_shapes(config, "model.").items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def tensor_shapes(c: Mapping[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Published name -> shape, all matrices [out, in]; borrowing layers without K/V weights."""
    D, L, N = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    P = c.get("hidden_size_per_layer_input", 0)
    shapes = {"embed_tokens.weight": (c["vocab_size"], D), "norm.weight": (D,)}
    if P:
        shapes["embed_tokens_per_layer.weight"] = (c["vocab_size"], L * P)
        shapes["per_layer_model_projection.weight"] = (L * P, D)
        shapes["per_layer_projection_norm.weight"] = (P,)
    first_borrower = L - c.get("num_kv_shared_layers", 0)
    for i, kind in enumerate(c["layer_types"]):
        shared = kind == FULL and c.get("attention_k_eq_v", False)
        H = c["global_head_dim"] if kind == FULL else c["head_dim"]
        K = c["num_global_key_value_heads"] if shared else c["num_key_value_heads"]
        F = c["intermediate_size"] * (
            1 + (c.get("use_double_wide_mlp", False) and i >= first_borrower)
        )
        layer = {
            "self_attn.q_proj.weight": (N * H, D),
            "self_attn.o_proj.weight": (D, N * H),
            "self_attn.q_norm.weight": (H,),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
            "layer_scalar": (1,),
        }
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        layer |= {f"{name}_layernorm.weight": (D,) for name in norms}
        if i < first_borrower:
            layer["self_attn.k_proj.weight"] = (K * H, D)
            layer["self_attn.k_norm.weight"] = (H,)
            if not shared:
                layer["self_attn.v_proj.weight"] = (K * H, D)
        if P:
            layer["per_layer_input_gate.weight"] = (P, D)
            layer["per_layer_projection.weight"] = (D, P)
            layer["post_per_layer_input_norm.weight"] = (D,)
        if c.get("enable_moe_block"):
            E, F = c["num_experts"], c["moe_intermediate_size"]
            layer["router.proj.weight"], layer["router.scale"] = (E, D), (D,)
            layer["router.per_expert_scale"] = (E,)
            layer["experts.gate_up_proj"], layer["experts.down_proj"] = (E, 2 * F, D), (E, D, F)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
                         "post_feedforward_layernorm_2"):  # fmt: skip
                layer[f"{name}.weight"] = (D,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms and scales well off one; matrices that keep the size of what they multiply."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.2, shape).astype(np.float32)
    spread = 4.0 if name.endswith("router.proj.weight") else 1.0  # experts clearly apart
    return (rng.standard_normal(shape) * spread / np.sqrt(shape[-1])).astype(np.float32)
