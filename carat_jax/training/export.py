"""Parameters to checkpoints in Gemma 4's published forms."""

from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from flax import traverse_util

from carat_jax.checkpoint.mapping import PREFIXES, Recipe, recipes
from carat_jax.config import GemmaConfig
from carat_jax.model import Params
from carat_jax.speculative.drafters import assistant_checkpoint
from carat_jax.speculative.drafters.assistant_config import AssistantConfig

_PREFIX = PREFIXES[-1]  # of text-only checkpoints, which is what the flat config.json says it is


def save_weights(file: Path, params: Params, config: GemmaConfig) -> None:
    """Writes `model.safetensors`: bfloat16, output-major, the tensor names of `checkpoint.mapping`.

    `load_params` reads it back to the same bits, where the parameters fit in bfloat16.
    """
    _save(file, params, recipes(config), _PREFIX)


def save_drafter(file: Path, params: Params, config: AssistantConfig) -> None:
    """As `save_weights`, of an assistant drafter with a full head; `load_assistant` reads it."""
    _save(file, params, assistant_checkpoint.recipes(config), "")


def _save(file: Path, params: Params, recipes: Mapping[str, Recipe], prefix: str) -> None:
    leaves = traverse_util.flatten_dict(params, sep="/")
    tensors: dict[str, np.ndarray] = {}
    for path, recipe in recipes.items():
        leaf = np.asarray(jax.device_get(leaves[path])).astype(ml_dtypes.bfloat16)
        for part in recipe.parts:
            sizes = (part.view[axis] for axis in recipe.order)
            block = leaf[
                tuple(slice(n, n + size) for n, size in zip(part.start, sizes, strict=True))
            ]
            tensor = block.transpose(np.argsort(recipe.order)).reshape(part.shape)
            tensors[prefix + part.name] = np.ascontiguousarray(tensor)
    file.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
