"""Parameters to a checkpoint in Gemma 4's published form."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from flax import traverse_util

from carat_jax.checkpoint.mapping import PREFIXES, recipes
from carat_jax.config import GemmaConfig
from carat_jax.model import Params

_PREFIX = PREFIXES[-1]  # of text-only checkpoints, which is what the flat config.json says it is


def save_weights(file: Path, params: Params, config: GemmaConfig) -> None:
    """Writes `model.safetensors`: bfloat16, output-major, the tensor names of `checkpoint.mapping`.

    `load_params` reads it back to the same bits, where the parameters fit in bfloat16.
    """
    leaves = traverse_util.flatten_dict(params, sep="/")
    tensors: dict[str, np.ndarray] = {}
    for path, recipe in recipes(config).items():
        leaf = np.asarray(jax.device_get(leaves[path])).astype(ml_dtypes.bfloat16)
        for part in recipe.parts:
            sizes = (part.view[axis] for axis in recipe.order)
            block = leaf[
                tuple(slice(n, n + size) for n, size in zip(part.start, sizes, strict=True))
            ]
            tensor = block.transpose(np.argsort(recipe.order)).reshape(part.shape)
            tensors[_PREFIX + part.name] = np.ascontiguousarray(tensor)
    file.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
