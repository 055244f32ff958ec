"""Puts this folder on the import path, for the helpers beside the tests; sets up their tools."""

import gc
import importlib.util
import os

# The simulator of Mosaic kernels blocks a thread of XLA's CPU client for each warpgroup.
os.environ.setdefault("NPROC", "8")
# The tests compile much and run little: on a CPU, XLA's older code generator, without LLVM's
# optimizations and without threads of its own, takes half the time. What XLA does to a program
# before that is the same.
if importlib.util.find_spec("jax_plugins") is None:  # where JAX has nothing but the CPU
    os.environ["XLA_FLAGS"] = " ".join(
        [
            "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",
            os.environ.get("XLA_FLAGS", ""),
        ]
    )

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


def pytest_collection_finish() -> None:
    """What has been imported stays: tracing makes many objects, and each search for cycles among
    them would go through all of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
