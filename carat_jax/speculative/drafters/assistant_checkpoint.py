"""Assistant drafters from their published checkpoints."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.checkpoint.errors import misfit
from carat_jax.checkpoint.loading import find_tensors
from carat_jax.checkpoint.mapping import Recipe, layer_recipes, single
from carat_jax.checkpoint.safetensors_file import DTYPES, TensorInfo, read_box
from carat_jax.config import GemmaConfig
from carat_jax.speculative.drafters.assistant import Assistant
from carat_jax.speculative.drafters.assistant_config import AssistantConfig, check_pair

TOKEN_ORDERING = "masked_embedding.token_ordering"  # int64 [V], the ids cluster by cluster


def load_assistant(
    path: str | Path, target_config: GemmaConfig, mesh: Mesh | None = None
) -> Assistant:
    """Loads a drafter onto the default device, or a mesh, in the dtype of its target.

    Args:
      path: a folder with config.json and model.safetensors (or shards and their index).
      target_config: the model it drafts for.
      mesh: what the target lies on.

    Raises:
      FileNotFoundError: no folder, no config.json or no weights in it.
      ConfigError: not an assistant drafter, one for another model (see `check_pair`), or one that
        cannot be cut for the mesh.
      CheckpointError: damaged files, or weights that do not fit the configuration: every
        missing, unexpected and wrong tensor in one message.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the one that holds config.json")
    config = AssistantConfig.from_json(folder)
    check_pair(config, target_config)
    if mesh is not None:
        sharding.check(config.text, mesh, "the drafter's")
    text = dataclasses.replace(config.text, dtype=target_config.dtype)
    config = dataclasses.replace(config, text=text)
    tensors = find_tensors(folder)
    if problems := _problems(tensors, config):
        raise misfit(folder, problems)
    ordering = None
    if config.use_ordered_embeddings:
        ids = _values(tensors[TOKEN_ORDERING], np.dtype(np.int64))
        if not np.array_equal(np.sort(ids), np.arange(ids.size)):
            raise misfit(folder, [f"{TOKEN_ORDERING} does not name every token once"])
        ordering = jnp.asarray(ids.reshape(config.num_centroids, -1), jnp.int32)
    dtype = jnp.dtype(text.dtype)
    places = {}
    if mesh is not None:
        shapes = sharding.stored(Assistant.abstract(config).params, mesh, top={})
        shapes = traverse_util.flatten_dict(shapes, sep="/")
        places = {path: leaf.sharding for path, leaf in shapes.items()}
    leaves = {
        path: jax.device_put(_leaf(recipe, tensors, dtype), places.get(path))
        for path, recipe in recipes(config).items()
    }
    params = traverse_util.unflatten_dict(leaves, sep="/")
    if mesh is not None:
        params, ordering = sharding.spread(params, mesh), sharding.everywhere(ordering, mesh)
    return Assistant(params=params, token_ordering=ordering, config=config)


def recipes(config: AssistantConfig) -> dict[str, Recipe]:
    """A recipe for each parameter, by its path in the tree; tensors have their full names."""
    D, h, V = config.backbone_hidden_size, config.text.hidden_size, config.text.vocab_size
    result = {
        "embed_tokens": single("model.embed_tokens.weight", (V, h)),
        "norm": single("model.norm.weight", (h,)),
        "pre_projection": single("pre_projection.weight", (h, 2 * D), order=(1, 0)),
        "post_projection": single("post_projection.weight", (D, h), order=(1, 0)),
    }
    if config.use_ordered_embeddings:
        shape = (config.num_centroids, h)
        result["centroids"] = single("masked_embedding.centroids.weight", shape, order=(1, 0))
    for spec in config.layers:
        for name, recipe in layer_recipes(config.text, spec, f"model.layers.{spec.index}."):
            result[f"layers_{spec.index}/{name}"] = recipe
    return result


def _problems(tensors: Mapping[str, TensorInfo], config: AssistantConfig) -> list[str]:
    """Everything that is wrong with the tensors' names, shapes and dtypes."""
    parts = [part for recipe in recipes(config).values() for part in recipe.parts]
    expected = {part.name: (part.shape, tuple(DTYPES)) for part in parts}
    if config.use_ordered_embeddings:
        expected[TOKEN_ORDERING] = ((config.text.vocab_size,), ("I64",))
    problems = []
    for name, (shape, dtypes) in expected.items():
        info = tensors.get(name)
        if info is None:
            problems.append(f"missing {name} {list(shape)}")
        elif info.shape != shape:
            problems.append(f"{name} has shape {list(info.shape)}, "
                            f"the configuration gives {list(shape)}")  # fmt: skip
        elif info.dtype not in dtypes:
            problems.append(f"{name} has dtype {info.dtype}; supported: {', '.join(dtypes)}")
    extra = sorted(tensors.keys() - expected.keys())
    return problems + [f"unexpected {name} {list(tensors[name].shape)}" for name in extra]


def _leaf(recipe: Recipe, tensors: Mapping[str, TensorInfo], dtype: np.dtype) -> np.ndarray:
    """One parameter, laid out in host memory: the largest has half a gigabyte."""
    leaf = np.empty(recipe.shape, dtype)
    for part in recipe.parts:
        info = tensors[part.name]
        block = _values(info, DTYPES[info.dtype]).reshape(part.view).transpose(recipe.order)
        ends = np.add(part.start, block.shape)
        leaf[tuple(map(slice, part.start, ends))] = block
    return leaf


def _values(info: TensorInfo, dtype: np.dtype) -> np.ndarray:
    values = np.empty(info.shape, dtype)
    read_box(info, info.shape, (0,) * len(info.shape), values)
    return values
