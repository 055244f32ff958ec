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
    parser.add_argument("--chain", type=int, default=CHAIN, help="sums in a row (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # the process
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.devices, arguments.width, arguments.chain)))
        return 0
    rows, environment = [], None
    for path in arguments.path:
        sizes = [str(arguments.devices), "--width", str(arguments.width)]
        command = [sys.executable, __file__, "--measure", "--devices", *sizes]
        command += ["--chain", str(arguments.chain)]
        done = subprocess.run(command, env=os.environ | PATHS[path], stdout=subprocess.PIPE)
        if done.returncode:
            print(f"{path}: failed", file=sys.stderr)
            continue
        result = json.loads(done.stdout)
        environment = result.pop("environment")
        rows.append({"path": path, "set": PATHS[path]} | result)
    columns = ["path", "bare_us", "with_product_us", "product_us"]
    print(report.table(columns, [[row[name] for name in columns] for row in rows]))
    if arguments.json:
        result = {"benchmark": "all_reduce", "environment": environment, "rows": rows}
        result |= {"devices": arguments.devices, "width": arguments.width, "dtype": "float32"}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if rows else 1


def measure(devices: int, width: int, chain: int) -> dict[str, Any]:
    """Of this process: µs of a sum alone, of product and sum, and of the product alone."""
    mesh = sharding.mesh(model=devices)
    x = sharding.place(jnp.ones((1, width)), mesh)
    weights = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) / width**0.5
    weights = sharding.place(weights, mesh)

    def seconds(product: bool, reduce: bool) -> float:
        def body(_: int, x: jax.Array) -> jax.Array:
            for _ in range(chain):
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
        return min(times) / (CALLS * chain)

    return {
        "bare_us": round(1e6 * seconds(False, True), 2),
        "with_product_us": round(1e6 * seconds(True, True), 2),
        "product_us": round(1e6 * seconds(True, False), 2),
        "environment": report.environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
