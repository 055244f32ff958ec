"""A model of a published shape with random weights and a state that looks used."""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.chat import ChatFormat
from carat_jax.config import PRESETS, GemmaConfig
from carat_jax.gemma import Gemma
from carat_jax.kv_state import KVState, abstract_state
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.params import init_params


def add_config(parser: argparse.ArgumentParser) -> None:
    """The --config of a benchmark of one size."""
    parser.add_argument(
        "--config",
        choices=list(PRESETS),
        default="31b",
        metavar="SIZE",
        help=f"one of {', '.join(PRESETS)} (default 31b)",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """The --dtype that `make` takes."""
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of weights and caches (default bfloat16)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The --model, --config and --dtype of a benchmark of a model or of random weights."""
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="MODEL", help="tiny (bundled, the default), a folder, or a hub id")
    add(
        "--config",
        choices=list(PRESETS),
        metavar="SIZE",
        help=f"instead, random weights of a published shape: one of {', '.join(PRESETS)}",
    )
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="type to compute in (default: the checkpoint's; bfloat16 for random weights)",
    )


def check_model(args: argparse.Namespace) -> None:
    """Fills in the default of `add_model`; raises ValueError where both were given."""
    if args.config and args.model:
        raise ValueError("--model and --config: give one of them")
    args.model = args.model or "tiny"


def make(name: str, dtype: str, mesh: Mesh | None = None) -> tuple[GemmaConfig, Params]:
    """The preset `name` and random weights, on the device or a mesh."""
    config = dataclasses.replace(GemmaConfig.preset(name), dtype=dtype)
    return config, jax.block_until_ready(init_params(config, jax.random.key(0), mesh))


def gemma(name: str, dtype: str | None) -> Gemma:
    """The preset `name` with random weights (bfloat16 for None), greedy, without a tokenizer."""
    config, params = make(name, dtype or "bfloat16")
    chat, limit = ChatFormat(empty_thought=True), config.max_position_embeddings
    return Gemma(config, params, None, chat, GenerateOptions(), limit)


def used_state(
    config: GemmaConfig, batch: int, max_context: int, length: int, mesh: Mesh | None = None
) -> KVState:
    """A state with random keys and values in every slot, `length` tokens behind each row."""
    leaves, tree = jax.tree.flatten(abstract_state(config, batch, max_context, mesh=mesh).layers)
    filled = [_normal(leaf, i) for i, leaf in enumerate(leaves)]
    behind = sharding.place(jnp.full((batch,), length, jnp.int32), mesh)
    return KVState(layers=jax.tree.unflatten(tree, filled), length=behind)


@functools.partial(jax.jit, static_argnums=0)
def _normal(leaf: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    made = jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype)
    return made if leaf.sharding is None else lax.with_sharding_constraint(made, leaf.sharding)


def random_ids(config: GemmaConfig, batch: int, count: int, seed: int = 0) -> np.ndarray:
    """int32 [batch, count], below the vocabulary size."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, config.vocab_size, (batch, count), np.int32)
