"""A small model of the 31B's architecture with random weights, quick to compile; ids only."""

import functools
import math

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from carat_jax.chat import ChatFormat
from carat_jax.config import FULL, SLIDING, GemmaConfig
from carat_jax.gemma import Gemma
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params

CONTEXT = 2176  # tokens; all generations then have caches of one size
CONFIG = GemmaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=8,
    global_head_dim=16,
    sliding_window=16,
    layer_types=(SLIDING, FULL),
    attention_k_eq_v=True,
    max_position_embeddings=4096,
    dtype="float32",
)
OUTWEIGHING = ("post_attention_layernorm", "post_feedforward_layernorm")


@functools.cache
def params() -> Params:
    """Attention and MLP outweigh the token itself, so that what is chosen hangs on the context."""
    draw = np.random.default_rng(0)

    def values(path: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.full(shape, 6 if path.endswith(OUTWEIGHING) else 1)
        summed = {"embed_tokens": shape[-1:], "o": shape[:-1]}.get(path.split("/")[-1], shape[:1])
        return draw.standard_normal(shape) / np.sqrt(math.prod(summed))

    flat = traverse_util.flatten_dict(abstract_params(CONFIG), sep="/")
    made = {path: jnp.asarray(values(path, s.shape), s.dtype) for path, s in flat.items()}
    return traverse_util.unflatten_dict(made, sep="/")


def gemma(**options) -> Gemma:
    """The model without a tokenizer; `options` are its defaults, greedy without stop ids else."""
    chat_format = ChatFormat(empty_thought=True)
    return Gemma(CONFIG, params(), None, chat_format, GenerateOptions(**options), CONTEXT)
