"""`--devices` of the commands."""

import json

import pytest
import small_model

from carat_jax import cli, compilation_cache, memory, sharding
from carat_jax.bench import decode
from carat_jax.config import PRESETS


@pytest.fixture(autouse=True)
def a_small_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", small_model.CONFIG)
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)


@pytest.mark.slow
def test_bench_decode(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "REPEATS", 1)
    argv = "bench decode --config small --batch 2 --context 128 --dtype float32 --devices 4"
    assert cli.main([*argv.split(), "--json", str(tmp_path / "result.json")]) == 0
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    read = memory.step_bytes(small_model.CONFIG, 2, 128, sharding.planned(4))
    assert (row["devices"], row["void"]) == (4, False)
    assert (row["weights_bytes"], row["kv_bytes"]) == (read.weights, read.kv)
    assert row["collectives"] == 2 * 2 + 2
    assert "collectives" in capsys.readouterr().out


@pytest.mark.slow
def test_generate_and_convert(capsys, tmp_path):
    assert cli.main(["generate", "def ", "--max-new-tokens", "8"]) == 0
    expected = capsys.readouterr().out
    made = str(tmp_path / "made")
    assert cli.main(["convert", "tiny", made, "--devices", "2"]) == 0
    capsys.readouterr()
    argv = ["generate", "def ", "--max-new-tokens", "8", "--model", made, "--devices", "4"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == expected
