"""What a user may call a model; the hub itself is never asked."""

import huggingface_hub
import pytest

from carat_jax.checkpoint import CheckpointError, resolve


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for the hub: records what is asked for, and fails with `hub.error` if set."""

    class Hub:
        error: Exception | None = None
        asked: tuple = ()

        def snapshot_download(self, repo, **options):
            self.asked = (repo, options)
            if self.error:
                raise self.error
            return str(tmp_path / "snapshot")

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_the_bundled_model(hub):
    assert resolve("tiny").parts[-3:] == ("carat_jax", "assets", "tiny")


def test_folders(hub, tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path / "owner")) == tmp_path / "owner"
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").samefile(tmp_path / "owner" / "name")  # a folder comes first
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"
    assert resolve("~") == tmp_path
    assert hub.asked == ()


@pytest.mark.parametrize("name", ["google/gemma-4-31B-it", "a/b", "0x.y_z-1/M.0"])
def test_hub_ids(hub, tmp_path, name):
    assert resolve(name) == tmp_path / "snapshot"
    repo, options = hub.asked
    assert repo == name
    patterns = options["allow_patterns"]
    assert {"*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json",
            "generation_config.json", "chat_template.jinja"} <= set(patterns)  # fmt: skip
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)


@pytest.mark.parametrize(
    "name",
    [
        "", ".../", "gemma", "./models/gemma", "../gemma", "/models/gemma", "models/google/gemma",
        "~/no/such/folder", "~no-such-user/x", "a/", "/a", "a//b", "-a/b", "a/.b", "a b/c", "a/b\n",
        "ä/b", "a/b:c", "a\0/b", "https://huggingface.co/a/b", "C:\\models\\gemma", "x" * 5_000,
        "a/" + "x" * 5_000, "tiny/",
    ],
    ids=lambda name: repr(name[:30]),
)  # fmt: skip
def test_names_that_are_neither(hub, name):
    with pytest.raises(FileNotFoundError) as caught:
        resolve(name)
    message = str(caught.value)
    assert repr(name) in message
    assert "'tiny'" in message and "config.json" in message and "hub id" in message
    assert hub.asked == ()


@pytest.mark.parametrize("name", ["31b", "E2B"])
def test_presets_have_no_weights(hub, name):
    with pytest.raises(FileNotFoundError, match=f"preset, .* no weights .*info {name}.* hub id"):
        resolve(name)


@pytest.mark.parametrize("name", [None, 7, {}])
def test_what_is_no_name(hub, name):
    with pytest.raises(ValueError, match=f"{type(name).__name__} in place of a model's name: give"):
        resolve(name)


def test_a_file_is_no_folder(hub, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", tmp_path / "owner" / "name"):
        with pytest.raises(FileNotFoundError, match="is a file"):
            resolve(name)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        resolve(tmp_path / "nowhere")
    assert hub.asked == ()


@pytest.mark.parametrize(
    "error",
    [
        OSError("We couldn't connect\nto the hub,\n\nsee the page"),
        RuntimeError("401 Client Error.\nAccess to model x/y is restricted."),
        ValueError(""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_hubs_errors_are_one_line(hub, error):
    hub.error = error
    with pytest.raises(CheckpointError) as caught:
        resolve("owner/name")
    message = str(caught.value)
    assert "\n" not in message
    assert "'owner/name'" in message and "hf auth login" in message and "no folder" in message
    assert (str(error).split("\n")[0] or "ValueError") in message
    assert caught.value.__cause__ is error


def test_interrupting_a_download_is_no_checkpoint_error(hub):
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("owner/name")


def test_without_weights_only_small_files_are_asked_for(hub):
    resolve("a/b", weights=False)
    patterns = hub.asked[1]["allow_patterns"]
    assert "config.json" in patterns
    assert not any("safetensors" in pattern for pattern in patterns)
