"""Assistant drafters from their published checkpoints."""

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.checkpoint.errors import misfit
from carat_jax.checkpoint.loading import find_tensors, match, mismatch
from carat_jax.checkpoint.mapping import Recipe, layer_recipes, single
from carat_jax.checkpoint.reading import Plan, read
from carat_jax.checkpoint.safetensors_file import TensorInfo, read_box
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
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the one that holds config.json")
    config = AssistantConfig.from_json(folder)
    check_pair(config, target_config)
    if mesh is not None:
        sharding.check(config.text, mesh, "the drafter's")
    text = dataclasses.replace(config.text, dtype=target_config.dtype)
    config = dataclasses.replace(config, text=text)
    tensors = find_tensors(folder)
    plan, problems, ids = _match(tensors, config)
    if problems:
        raise misfit(folder, problems)
    ordering = None
    if ids is not None:
        ordering = jnp.asarray(ids.reshape(config.num_centroids, -1), jnp.int32)
    shapes = Assistant.abstract(config).params
    if mesh is not None:
        shapes = sharding.stored(shapes, mesh, top={})
    params = read(plan, shapes, progress=False)
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


def _match(
    tensors: dict[str, TensorInfo], config: AssistantConfig
) -> tuple[Plan, list[str], np.ndarray | None]:
    """As `checkpoint.loading.match`, and the token ordering, int64 [V], if there is to be one."""
    if not config.use_ordered_embeddings:
        return *match(tensors, recipes(config)), None
    others = {name: info for name, info in tensors.items() if name != TOKEN_ORDERING}
    plan, problems = match(others, recipes(config))
    info, shape = tensors.get(TOKEN_ORDERING), (config.text.vocab_size,)
    if info is None:
        return plan, [*problems, f"missing {TOKEN_ORDERING} {list(shape)}"], None
    if wrong := mismatch(info, shape, ("I64",)):
        return plan, [*problems, f"{TOKEN_ORDERING} {wrong}"], None
    ids = np.empty(shape, np.int64)
    read_box(info, shape, (0,), ids)
    if not np.array_equal(np.sort(ids), np.arange(ids.size)):
        problems.append(f"{TOKEN_ORDERING} does not name every token once")
    return plan, problems, ids
