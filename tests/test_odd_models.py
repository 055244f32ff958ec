"""Models of unusual shapes against float64: windows, layer patterns, head groups, experts."""

import functools
import tempfile
from pathlib import Path

import float64_reference
import jax
import numpy as np
import pytest
from fixture_models import step
from random_checkpoints import FULL, SLIDING, config_json, write

from carat_jax.checkpoint.loading import load_params
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import init_state
from carat_jax.model import Params

MODELS = {
    # A window that is no multiple of anything, half of a global head turning, no soft cap.
    "window_37": config_json(
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        rope_partial=0.5,
        final_logit_softcapping=None,
    ),
    # Layers that borrow a compact cache, per-layer inputs, one KV head for all queries.
    "borrowed_compact": config_json(
        layer_types=[SLIDING, FULL, FULL, SLIDING, FULL],
        attention_k_eq_v=True,
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=96,
        sliding_window=64,
    ),
    # Experts, every head its own keys, plain caches, whole global heads turning, a window of one.
    "ten_experts": config_json(
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_key_value_heads=6,
        enable_moe_block=True,
        num_experts=10,
        top_k_experts=4,
        moe_intermediate_size=14,
        rope_partial=1.0,
        sliding_window=1,
    ),
}
each_odd_model = pytest.mark.parametrize("name", MODELS)
CHUNK = 140  # tokens: more than a ring of any of these windows holds
STEPS = {name: [7] * 5 for name in MODELS}
STEPS["ten_experts"] = [2] * 10 + [1] * 5  # 4 experts a token: the chosen ones are read alone
IDS = np.random.default_rng(7).integers(0, 96, 320).astype(np.int32)


@functools.cache
def loaded(name: str) -> tuple[GemmaConfig, Params, np.ndarray]:
    """Configuration, weights, and the exact logits of IDS."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = write(Path(folder), MODELS[name])
        config = GemmaConfig.from_json(folder)
        params = jax.block_until_ready(load_params(folder, config, progress=False))
    return config, params, float64_reference.run(MODELS[name], tensors, IDS).logits


def worst_error(name: str, pieces: list[int]) -> float:
    """Largest error of the logits of IDS, fed in pieces of so many tokens each."""
    config, params, exact = loaded(name)
    state, worst, start = init_state(config, 1, 320), 0.0, 0
    for size in pieces:
        logits, state = step(params, config, IDS[None, start : start + size], state)
        worst = max(worst, np.abs(logits[0] - exact[start : start + size]).max())
        start += size
    return worst


@each_odd_model
def test_the_logits_are_those_of_float64(name):
    """Two chunks, the second with a past in a ring that has wrapped, then steps."""
    assert worst_error(name, [CHUNK, CHUNK, *STEPS[name]]) < 5e-4
