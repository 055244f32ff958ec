"""Puts this folder on the import path, for the helpers beside the tests; sets up their tools."""

import gc
import importlib.util
import os
import re

# The simulator of Mosaic kernels blocks a thread of XLA's CPU client for each warpgroup.
os.environ.setdefault("NPROC", "8")
# The tests compile much and run little: on a CPU, XLA's older code generator, without LLVM's
# optimizations and without threads of its own, takes about half the time. What XLA does to a
# program before that is the same.
if importlib.util.find_spec("jax_plugins") is None:  # where JAX has nothing but the CPU
    os.environ["XLA_FLAGS"] = " ".join(
        [
            "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",
            "--xla_cpu_multi_thread_eigen=false",
            os.environ.get("XLA_FLAGS", ""),
        ]
    )

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

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


# What takes longest, so that no process is left alone with it at the end.
LONGEST = (
    "test_notebooks.py",
    "test_sharding.py",
    "test_model.py",
    "test_model_rows.py",
    "kernels/test_split_keys.py",
    "speculative/test_loop.py",
    "speculative/test_gemma_speculation.py",
    "test_training_drafter.py",
    "test_generate.py",
    "kernels/test_prefill_attention_mosaic.py",
    "speculative/test_acceptance.py",
    "speculative/test_assistant.py",
    "kernels/test_expert_matmul_mosaic.py",
    "test_gemma_rows.py",
)
TOGETHER = "tests/test_model"  # the beginning of two files that compile the same programs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which they are best begun."""
    place = {os.path.join(os.path.dirname(__file__), name): i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(LONGEST)))


class ByFile(LoadFileScheduling):
    """Deals whole files out to the processes of `pytest -n`, in the order above; but notebooks one
    by one, and the tests of a kernel at published shapes by size, which share expected values."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        if "test_notebooks.py" in nodeid:
            return nodeid
        if of_a_size := re.match(r"(.*/kernels/\w+\.py)::\w+\[(31b|12b|26b-a4b|e4b|e2b)\b", nodeid):
            return "::".join(of_a_size.groups())
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What has been imported stays: tracing makes many objects, and each search for cycles among
    them would go through all of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
