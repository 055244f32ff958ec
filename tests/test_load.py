"""`carat.load` of folders that are unusual but legal, and of arguments that are not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import carat_jax as carat
from carat_jax import compilation_cache, generate

FIXTURE = Path(__file__).parent / "fixtures" / "dense_31b_like"


def edited(tmp_path: Path, **changes) -> Path:
    """The dense fixture with other values in its text configuration."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURE, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_limit_that_is_no_multiple_of_64(tmp_path):
    gemma = carat.load(edited(tmp_path, max_position_embeddings=1000), progress=False)
    expected = np.load(FIXTURE / "expected.npz")
    out = gemma.generate(expected["prompt_ids"], max_new_tokens=5, temperature=0, stop_token_ids=[])
    assert out.tokens == expected["continuation_ids"][:5].tolist()
    assert generate.capacity(1000, 1000) == 1000


def test_a_window_beyond_the_limit_sees_everything(tmp_path):
    folder = edited(tmp_path, sliding_window=2**31 - 1, max_position_embeddings=128)
    gemma = carat.load(folder, progress=False)
    assert carat.memory_estimate(gemma.config, max_context=128) < 10e6
    ids = np.load(FIXTURE / "expected.npz")["prompt_ids"]
    whole = np.asarray(gemma.logits(ids))
    assert np.isfinite(whole).all()
    reference = carat.load(FIXTURE, progress=False)
    np.testing.assert_allclose(whole[:16], reference.logits(ids)[:16], atol=1e-3)
    assert np.abs(whole[40:] - np.asarray(reference.logits(ids))[40:]).max() > 0.1


@pytest.mark.parametrize("limit", [0, -1, 100.5, True, "8", 10**9])
def test_a_max_context_that_is_none(limit):
    with pytest.raises(ValueError, match=r"max_context = .*integer from 1 to"):
        carat.load(FIXTURE, max_context=limit, progress=False)


@pytest.mark.parametrize("dtype", ["junk", "float16", "int8"])
def test_a_dtype_that_is_none(dtype):
    with pytest.raises(carat.ConfigError, match=dtype):
        carat.load(FIXTURE, dtype=dtype, progress=False)


def test_without_a_home_folder_there_is_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compilation_cache.Path, "home", no_home)
    before = compilation_cache.jax.config.jax_compilation_cache_dir
    try:
        compilation_cache.jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.enable()
        assert compilation_cache.jax.config.jax_compilation_cache_dir is None
    finally:
        compilation_cache.jax.config.update("jax_compilation_cache_dir", before)


def test_a_state_of_another_batch_size_is_named():
    config = carat.GemmaConfig.from_json(FIXTURE)
    params = carat.load_params(FIXTURE, config, progress=False)
    state = carat.init_state(config, 2, 64)
    with pytest.raises(ValueError, match=r"tokens \(1, 5\).*state.length \(2,\)"):
        carat.forward(params, config, np.ones((1, 5), np.int32), state)


def test_padding_that_computes_to_nan_leaves_real_positions_alone():
    """Id 0, which pads chunks, has a row of NaN; neither prompt nor continuation contains it."""
    folder = FIXTURE.parent / "e2b_like"
    gemma = carat.load(folder, progress=False, max_context=128)
    expected = np.load(folder / "expected.npz")
    assert 0 not in [*expected["prompt_ids"], *expected["continuation_ids"]]
    table = gemma.params["embed_tokens_per_layer"]
    gemma.params["embed_tokens_per_layer"] = table.at[0].set(np.nan)
    out = gemma.generate(
        expected["prompt_ids"], max_new_tokens=10, temperature=0, stop_token_ids=[]
    )
    assert out.tokens == expected["continuation_ids"][:10].tolist()
