"""The converted form: bit-equal when read back, and clear about what is wrong with it."""

import copy
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoint import CONFIGS, TINY, same_bits, write

from carat_jax.checkpoint import CheckpointError, load_params, orbax_store
from carat_jax.config import GemmaConfig
from carat_jax.params import abstract_params


def saved(folder: Path, config: dict = TINY, dtype: str = "float32"):
    """Writes a checkpoint beside the store in `folder`; returns config and parameters."""
    source = folder / "source"
    source.mkdir(parents=True)
    write(source, config)
    parsed = dataclasses.replace(GemmaConfig.from_dict(config), dtype=dtype)
    params = load_params(source, parsed, progress=False)
    orbax_store.save(folder, params)
    return parsed, params


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_read_back_to_the_bit(tmp_path, kind, dtype):
    config, params = saved(tmp_path, CONFIGS[kind], dtype)
    assert orbax_store.is_store(tmp_path) and not orbax_store.is_store(tmp_path / "source")
    restored = load_params(tmp_path, config, progress=False)
    assert same_bits(restored, params)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(restored))


def test_bits_that_arithmetic_would_not_keep(tmp_path):
    every = jnp.asarray(np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16.dtype))
    orbax_store.save(tmp_path, {"a": {"every": every}})
    assert same_bits(
        orbax_store.restore(tmp_path, {"a": {"every": every}}), {"a": {"every": every}}
    )


def test_in_another_dtype(tmp_path):
    config, params = saved(tmp_path)
    narrow = load_params(tmp_path, dataclasses.replace(config, dtype="bfloat16"), progress=False)
    assert same_bits(narrow, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_an_existing_store_is_not_overwritten(tmp_path):
    _, params = saved(tmp_path)
    with pytest.raises(FileExistsError, match="params"):
        orbax_store.save(tmp_path, params)


def test_another_configuration(tmp_path):
    saved(tmp_path)
    other = GemmaConfig.from_dict(TINY | {"hidden_size": 16, "enable_moe_block": True,
        "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 4})  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path, other, progress=False)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "embed_tokens has shape [12, 8], the configuration gives [12, 16]" in message
    assert "missing layers_0/experts/gate_up [2, 16, 2, 4]" in message
    shapes = copy.deepcopy(abstract_params(GemmaConfig.from_dict(TINY)))
    del shapes["layers_0"]["attention"]["k_norm"]
    with pytest.raises(CheckpointError, match=r"unexpected layers_0/attention/k_norm \[4\]"):
        orbax_store.restore(tmp_path, shapes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an Orbax thread
def test_whatever_is_missing_the_weights_are_right_or_refused(tmp_path):
    """Removes each file of the store in turn, and cuts it in half."""
    config, params = saved(tmp_path / "whole")
    refused = 0
    store = tmp_path / "whole" / "params"
    files = [path.relative_to(store) for path in store.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        for damage in ("removed", "halved"):
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(store, tmp_path / "damaged" / "params")
            victim = tmp_path / "damaged" / "params" / file
            content = victim.read_bytes()
            victim.unlink()
            if damage == "halved":
                victim.write_bytes(content[: len(content) // 2])
            try:
                restored = load_params(tmp_path / "damaged", config, progress=False)
            except CheckpointError as error:
                refused += 1
                assert "params" in str(error) and "\n" not in str(error)
            else:
                assert same_bits(restored, params), f"{file} {damage}"
    assert refused > 3


@pytest.mark.parametrize("content", [None, b"", b"not orbax"])
def test_a_folder_that_is_no_store(tmp_path, content):
    (tmp_path / "params").mkdir()
    if content is not None:
        (tmp_path / "params" / "_METADATA").write_bytes(content)
    with pytest.raises(CheckpointError, match="incomplete or damaged"):
        load_params(tmp_path, GemmaConfig.from_dict(TINY), progress=False)
