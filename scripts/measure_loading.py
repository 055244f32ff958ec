"""Measures the peak memory and the speed of loading a checkpoint of 3 GB on the CPU.

Writes a synthetic checkpoint with the architecture of the 31B model, smaller, and loads it in a
fresh process, onto one device or cut over several. Prints one JSON line; exits with 1 if the peak
resident memory is more than the size of the file + 0.8 GB. Linux only: the peak is VmHWM, which a
fresh process starts from 0.

    python scripts/measure_loading.py [--folder FOLDER] [--layers N] [--devices N]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from carat_jax import GemmaConfig, sharding
from carat_jax.checkpoint import load_params
from carat_jax.checkpoint.mapping import PREFIXES, recipes

ALLOWANCE = 0.8e9  # bytes beside the weights: Python, JAX and the buffers of the loader
BLOCK = 1 << 25  # values written at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made (and deleted)")
    parser.add_argument("--layers", type=int, default=6, help="6 layers give 3 GB, each more 0.26")
    parser.add_argument("--devices", type=int, default=1, help="virtual ones, with shares of it")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the fresh process
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(measure(arguments.load, arguments.devices)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        size = write_checkpoint(Path(folder), narrow_31b(arguments.layers))
        devices = str(arguments.devices)
        command = [sys.executable, __file__, "--load", folder, "--devices", devices]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result = {"file_bytes": size, "limit_bytes": size + int(ALLOWANCE)} | json.loads(done.stdout)
    result["gb_per_s"] = round(size / result["seconds"] / 1e9, 2)
    result["within_limit"] = result["peak_bytes"] <= result["limit_bytes"]
    print(json.dumps(result))
    return 0 if result["within_limit"] else 1


def measure(folder: Path, devices: int) -> dict[str, float]:
    """Loads and reports, of this process: seconds, and the peak before and after in bytes."""
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = None if devices == 1 else sharding.mesh(model=devices)
    before = peak_memory()
    start = time.perf_counter()
    params = load_params(folder, GemmaConfig.from_json(folder), mesh=mesh, progress=False)
    seconds = time.perf_counter() - start
    peak = peak_memory()
    if not params["norm"].all():
        raise RuntimeError("the norm has zeros: nothing was loaded")
    return {"start_bytes": before, "peak_bytes": peak, "seconds": round(seconds, 2)}


def peak_memory() -> int:
    """The most resident memory this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def narrow_31b(layers: int) -> GemmaConfig:
    """The 31B model at about half its width."""
    raw = GemmaConfig.preset("31b").to_dict()
    for absent in ("layer_types", "per_layer_config"):
        del raw[absent]
    sizes = {"hidden_size": 2816, "intermediate_size": 11_264, "num_hidden_layers": layers,
             "num_attention_heads": 16, "num_key_value_heads": 8,
             "global_head_dim": 512, "num_global_key_value_heads": 2}  # fmt: skip
    return GemmaConfig.from_dict(raw | sizes)


def write_checkpoint(folder: Path, config: GemmaConfig) -> int:
    """Writes config.json and model.safetensors with random weights; returns the file's bytes."""
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    header, end = {}, 0
    for recipe in recipes(config).values():
        for part in recipe.parts:
            start, end = end, end + 2 * math.prod(part.shape)
            header[PREFIXES[0] + part.name] = {
                "dtype": "BF16", "shape": part.shape, "data_offsets": (start, end)}  # fmt: skip
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end // 2, BLOCK):
            count = min(BLOCK, end // 2 - start)
            values = rng.integers(0, 1 << 16, count, dtype=np.uint16)
            file.write((values & 0x80FF | 0x3C00).tobytes())  # sizes from 0.008 to 0.03
        return file.tell()


if __name__ == "__main__":
    sys.exit(main())
