"""scripts/measure.sh: that it asks for what is stored, and goes on where a benchmark fails."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from carat_jax import cli

ROOT = Path(__file__).resolve().parents[1]
STUB = """#!/usr/bin/env bash
echo "$@" >> "$(dirname "$0")/asked"
exit "${STATUS:-0}"
"""


def measure(folder: Path, *groups: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs the script with a command that only notes what it is asked, in `folder`/asked."""
    stub = folder / "carat"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts" / "measure.sh", folder / "results", *groups],
        cwd=ROOT,
        env=os.environ | {"CARAT": str(stub)} | environment,
        capture_output=True,
        text=True,
    )


def asked(folder: Path) -> dict[str, list[str]]:
    """The arguments of each command, by the name of its result."""
    lines = (folder / "asked").read_text().splitlines()
    return {Path(line.split()[-1]).stem: line.split() for line in lines}


def test_all_are_commands_and_of_the_kind_that_is_stored(tmp_path):
    done = measure(tmp_path)
    assert done.returncode == 0, done.stderr
    commands = asked(tmp_path)
    assert len(commands) > 15
    stored = {
        path.stem: json.loads(path.read_text()) for path in ROOT.glob("benchmarks/h200/*.json")
    }
    assert len(commands.keys() & stored) > 10
    for name, argv in commands.items():
        args = cli._parser().parse_args(argv)
        assert args.module.__name__.endswith(argv[1])
        if name not in stored:
            continue
        assert stored[name]["benchmark"] == argv[1]
        for row in stored[name]["rows"]:
            for field in ("config", "batch", "context", "slots"):
                given = getattr(args, field, None)
                if given and field in row:
                    assert row[field] in (given if isinstance(given, list) else [given]), name


def test_a_group_alone_and_what_is_there_already(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "serving_31b_8.json").write_text("{}")
    assert measure(tmp_path, "serving").returncode == 0
    assert set(asked(tmp_path)) == {"serving_31b_3", "serving_31b_6k", "serving_31b_3_plain"}


def test_what_fails_is_told_and_does_not_stop_the_others(tmp_path):
    done = measure(tmp_path, "attention", "prefill", STATUS="1")
    assert done.returncode == 1
    assert len(asked(tmp_path)) == 4
    names = "attention_31b prefill_attention_31b ablation_31b prefill_31b_cold"
    assert f"not measured: {names}" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("nonsense",)])
def test_wrong_arguments_are_told(tmp_path, arguments):
    folder = (tmp_path / "results",) if arguments else ()
    done = subprocess.run(
        [ROOT / "scripts" / "measure.sh", *folder, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "steps" in done.stdout + done.stderr
