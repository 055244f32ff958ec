"""A converted checkpoint loads to the same parameters; a failed conversion leaves nothing."""

import json
from pathlib import Path

import pytest
from small_checkpoint import CONFIGS, TINY, same_bits, write

from carat_jax.checkpoint import CheckpointError, convert, load_params, orbax_store
from carat_jax.config import ConfigError, GemmaConfig

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
          "chat_template.jinja")  # fmt: skip


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder, TINY)
    return folder


def load(folder: Path, config: GemmaConfig | None = None):
    return load_params(folder, config or GemmaConfig.from_json(folder), progress=False)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_in_the_home_of_the_user(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    convert("~/source", "~/made", progress=False)
    config = GemmaConfig.from_json("~/made")
    assert same_bits(load_params("~/made", config, progress=False), load(source))
    assert entries(tmp_path) == ["made", "source"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_parameters(tmp_path, kind):
    write(tmp_path, CONFIGS[kind])
    convert(tmp_path, tmp_path / "made", progress=False)
    assert GemmaConfig.from_json(tmp_path / "made") == GemmaConfig.from_json(tmp_path)
    assert same_bits(load(tmp_path / "made"), load(tmp_path))
    assert entries(tmp_path / "made") == ["config.json", "params"]


def test_another_dtype(source, tmp_path):
    made = tmp_path / "made"
    convert(source, made, dtype="bfloat16", progress=False)
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    config = GemmaConfig.from_json(made)
    assert config.dtype == "bfloat16"
    assert same_bits(load(made), load(source, config))


def test_a_converted_checkpoint_converts_again(source, tmp_path):
    convert(source, tmp_path / "once", progress=False)
    convert(tmp_path / "once", tmp_path / "twice", progress=False)
    assert same_bits(load(tmp_path / "twice"), load(source))


def test_the_other_files_come_along(source, tmp_path):
    for i, name in enumerate(COPIED):
        (source / name).write_bytes(bytes([i, 255, 13, 10]))
    (source / "README.md").write_text("not this one")
    convert(source, tmp_path / "made", progress=False)
    for name in COPIED:
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
    assert entries(tmp_path / "made") == sorted(["config.json", "params", *COPIED])


def test_into_an_empty_or_a_new_folder(source, tmp_path):
    (tmp_path / "empty").mkdir()
    for destination in (tmp_path / "empty", tmp_path / "a" / "b" / "new"):
        convert(source, destination, progress=False)
        assert same_bits(load(destination), load(source))
        assert len(entries(destination.parent)) == (2 if destination.name == "empty" else 1)


def test_what_exists_is_left_alone(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for destination in (tmp_path / "full", tmp_path / "full" / "file", source):
        before = entries(tmp_path), entries(source)
        with pytest.raises(FileExistsError, match="choose another"):
            convert(source, destination, progress=False)
        assert (entries(tmp_path), entries(source)) == before
    assert (tmp_path / "full" / "file").read_text() == "mine"


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_conversion_that_broke_off(
    source, tmp_path, monkeypatch, error, empty
):
    save = orbax_store.save

    def save_and_fail(folder, params):
        save(folder, params)
        raise error

    monkeypatch.setattr(orbax_store, "save", save_and_fail)
    if empty:
        (tmp_path / "made").mkdir()
    with pytest.raises(type(error)):
        convert(source, tmp_path / "made", progress=False)
    assert entries(tmp_path) == (["made", "source"] if empty else ["source"])
    assert not empty or entries(tmp_path / "made") == []


def test_a_source_that_does_not_load(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    cases = [
        ({"hidden_size": 16}, None, CheckpointError),
        ({"sliding_window": 0}, None, ConfigError),
        ({}, "float16", ConfigError),
    ]
    for change, dtype, error in cases:
        (source / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(error):
            convert(source, tmp_path / "made", dtype=dtype, progress=False)
        assert entries(tmp_path) == ["source"]
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert(source, tmp_path / "made", progress=False)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert(tmp_path / "nowhere", tmp_path / "made", progress=False)
