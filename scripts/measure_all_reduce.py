"""Measures the sum over devices of one layer's output, on each path that XLA has for it.

A decode step cut over devices has two of these sums a layer, one after the other, each of a few
kilobytes: what counts is how long one takes from end to end. XLA reads its flags when a process
starts, so every path is measured in a process of its own, by a chain of sums, once bare and once
with a product of [D, D] between two of them, as there is in a model. Prints a table; --json also
writes a file.

    python scripts/measure_all_reduce.py [--devices N] [--width D] [--path NAME ...] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from carat_jax import sharding
from carat_jax.bench import report

PATHS = {  # environment of the process
    "default": {},
    "collective kernels": {"XLA_FLAGS": "--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE"},
    "registered buffers": {"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true"},
    "symmetric buffers": {"XLA_FLAGS": "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"},
    "synchronous": {"XLA_FLAGS": "--xla_gpu_disable_async_collectives=allreduce"},
    "NCCL ring, low latency": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"},
}
CHAIN, CALLS, REPEATS = 120, 10, 5  # sums of a loop's body, its passes, timed calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=5376, help="D (default: of 31B)")
    parser.add_argument("--path", nargs="+", choices=PATHS, default=list(PATHS), metavar="NAME",
                        help=f"of {', '.join(PATHS)} (default all)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # the process
    arguments = parser.parse_args()
    sizes = {"devices": arguments.devices, "width": arguments.width}
    if arguments.measure:
        print(json.dumps(measure(**sizes)))
        return 0
    command = [sys.executable, __file__, "--measure"]
    command += ["--devices", str(arguments.devices), "--width", str(arguments.width)]
    rows = []
    for path in arguments.path:
        done = subprocess.run(command, env=_environment(PATHS[path]), stdout=subprocess.PIPE)
        found = {"failed": True} if done.returncode else json.loads(done.stdout)
        rows.append({"path": path} | found)
    columns = ["path", "bare_us", "with_product_us", "product_us"]
    print(report.table(columns, [[row.get(name) for name in columns] for row in rows]))
    if arguments.json:
        result = {"benchmark": "all_reduce", **sizes, "dtype": "float32", "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in row for row in rows))


def _environment(path: dict[str, str]) -> dict[str, str]:
    """That of this process and a path's; flags of both."""
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), path.get("XLA_FLAGS", "")])
    return os.environ | path | {"XLA_FLAGS": flags}


def measure(devices: int, width: int) -> dict[str, Any]:
    """Of this process: µs of a sum alone, of product and sum, and of the product alone."""
    mesh = sharding.mesh(model=devices)
    x = sharding.place(jnp.ones((1, width)), mesh)
    weights = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) / width**0.5
    weights = sharding.place(weights, mesh)

    def seconds(product: bool, reduce: bool) -> float:
        def body(_: int, x: jax.Array) -> jax.Array:
            for _ in range(CHAIN):
                if product:
                    x = x + 0.01 * (x.astype(jnp.bfloat16) @ weights).astype(jnp.float32)
                if reduce:
                    x = lax.psum(x, sharding.MODEL)
                x = x / devices
            return x

        @jax.jit
        def run(x: jax.Array, weights: jax.Array) -> jax.Array:
            return jax.shard_map(
                lambda x, _: lax.fori_loop(0, CALLS, body, x),
                mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False,
            )(x, weights)  # fmt: skip

        jax.block_until_ready(run(x, weights))
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            jax.block_until_ready(run(x, weights))
            times.append(time.perf_counter() - begin)
        return min(times) / (CALLS * CHAIN)

    return {
        "bare_us": round(1e6 * seconds(False, True), 2),
        "with_product_us": round(1e6 * seconds(True, True), 2),
        "product_us": round(1e6 * seconds(True, False), 2),
        "environment": report.environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
