"""A small model of the 31B's architecture with random weights, quick to compile; ids only."""

import functools

import jax

from carat_jax.chat import ChatFormat
from carat_jax.config import FULL, SLIDING, GemmaConfig
from carat_jax.gemma import Gemma
from carat_jax.model import Params, init_params
from carat_jax.options import GenerateOptions

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


@functools.cache
def params() -> Params:
    return init_params(CONFIG, jax.random.key(0))


def gemma(**options) -> Gemma:
    """The model without a tokenizer; `options` are its defaults, greedy without stop ids else."""
    chat_format = ChatFormat(empty_thought=True)
    return Gemma(CONFIG, params(), None, chat_format, GenerateOptions(**options), CONTEXT)
