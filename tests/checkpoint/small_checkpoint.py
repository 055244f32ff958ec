"""Checkpoints small enough to be written, spoilt and loaded many times."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from random_checkpoints import FULL, SLIDING, config_json, write
from safetensors.numpy import save_file

SHARED_PROJECTION = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
CONFIGS = {
    "dense": config_json(layer_types=[SLIDING, FULL], **SHARED_PROJECTION),
    "per_layer_inputs": config_json(
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=96,
    ),
    "experts": config_json(
        layer_types=[FULL],
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=14,
        **SHARED_PROJECTION,
    ),
}
TINY = config_json(  # one layer, for what is done hundreds of times
    layer_types=[FULL],
    vocab_size=12,
    hidden_size=8,
    intermediate_size=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    global_head_dim=4,
)


def write_sharded(folder: Path, config: Mapping[str, Any], shards: int = 2) -> dict[str, str]:
    """Writes a checkpoint in several files with its index; returns the index's weight_map."""
    tensors = write(folder, config)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(names[i::shards], shard)
        save_file({name: tensors[name] for name in names[i::shards]}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_file(header: object, data: bytes) -> bytes:
    """The reverse; the header as JSON unless it is bytes already."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def bits(array: jax.Array) -> np.ndarray:
    """The values as unsigned integers, so that -0.0 and NaN are compared too."""
    values = np.asarray(array)
    return values.view(np.dtype(f"u{values.itemsize}"))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays agree in structure, dtype and every bit."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(bits(x), bits(y))
        for x, y in zip(leaves, others, strict=True)
    )


def with_prefix(tensors: Mapping[str, Any], prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """The named tensors, which start with "model.", under another prefix."""
    return {prefix + name.removeprefix("model."): tensors[name] for name in names}
