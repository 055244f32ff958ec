"""Puts this folder on the import path, for the helpers beside the tests; sets up their tools."""

import os

# The simulator of Mosaic kernels blocks a thread of XLA's CPU client for each warpgroup.
os.environ.setdefault("NPROC", "8")

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)  # the same examples each time
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fails a test in which the simulator of Mosaic kernels found a race: it only prints so.

    Under `-s` nothing is captured and nothing fails.
    """
    report = yield
    if report.when == "call" and report.passed and "RACE DETECTED" in report.capstdout:
        report.outcome = "failed"
        report.longrepr = "a simulated kernel has a race: see the captured output"
    return report
