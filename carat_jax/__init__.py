"""Carat-JAX: Gemma 4 from JAX, as jitted functions over plain pytrees.

    import carat_jax as carat

    gemma = carat.load("tiny")
    print(gemma.generate("def main(", max_new_tokens=64).text)

The functional level, for scripts that own the loop: `GemmaConfig`, `load_params`, `init_params`,
`init_state`, `forward`, `generate_tokens`. Speculative decoding: `load_drafter`, `speculative`.
Many generations at once: `Engine`. More than one device: `mesh`.
"""

from carat_jax import speculative
from carat_jax.checkpoint import CheckpointError, load_params
from carat_jax.config import ConfigError, GemmaConfig
from carat_jax.engine import Engine
from carat_jax.gemma import Gemma, load, load_drafter
from carat_jax.generate import Tokens, generate_tokens
from carat_jax.generation import Generation, Piece, Stats
from carat_jax.kv_state import GlobalKV, KVState, RingKV, init_state
from carat_jax.memory import memory_estimate
from carat_jax.model import forward
from carat_jax.options import GenerateOptions, OptionError
from carat_jax.params import init_params
from carat_jax.sharding import mesh

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "Gemma",
    "GemmaConfig",
    "GenerateOptions",
    "Generation",
    "GlobalKV",
    "KVState",
    "OptionError",
    "Piece",
    "RingKV",
    "Stats",
    "Tokens",
    "forward",
    "generate_tokens",
    "init_params",
    "init_state",
    "load",
    "load_drafter",
    "load_params",
    "memory_estimate",
    "mesh",
    "speculative",
]
