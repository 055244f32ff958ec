"""The soak test, with fewer requests than it takes by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["300"], ["100", "--drafter", "tiny"]], ids=["plain", "drafted"])
def test_none_is_lost_or_mixed_up_and_no_memory(argv):
    command = [sys.executable, str(SOAK), "--requests", *argv]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(f"{argv[0]} requests in ")
