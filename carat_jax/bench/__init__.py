"""Benchmarks: each prints its measurement beside the floor that the hardware sets.

A benchmark is a module with `add_arguments(parser)`, `run(args) -> dict` (what --json writes)
and `table(result) -> str`.
"""

from types import ModuleType

from carat_jax.bench import (
    ablation,
    agreement,
    attention,
    decode,
    prefill,
    serving,
    speculative,
)

BENCHMARKS: dict[str, ModuleType] = {
    "attention": attention,
    "decode": decode,
    "prefill": prefill,
    "speculative": speculative,
    "agreement": agreement,
    "serving": serving,
    "ablation": ablation,
}
