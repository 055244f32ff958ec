"""safetensors -> parameters: everything is checked first, then read weight by weight."""

import functools
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from tqdm import tqdm

from carat_jax.checkpoint import orbax_store
from carat_jax.checkpoint.mapping import PREFIXES, SKIPPED, Recipe, recipes, unused
from carat_jax.checkpoint.safetensors_file import (
    DTYPES,
    CheckpointError,
    TensorInfo,
    read_header,
    read_into,
)
from carat_jax.config import GemmaConfig
from carat_jax.model import Params, abstract_params

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def load_params(path: str | Path, config: GemmaConfig, *, progress: bool = True) -> Params:
    """Loads a checkpoint folder onto the default device, in config.dtype.

    The folder holds `model.safetensors`, or shards with `model.safetensors.index.json`, or what
    `carat convert` wrote. Names may start with `model.language_model.` or `model.`; vision and
    audio tensors and the unused K/V weights of borrowing layers are skipped. Host memory holds
    one weight at a time.

    Args:
      path: the folder.
      config: what its `config.json` says; `dataclasses.replace(config, dtype=…)` to convert.
      progress: show a bar on a terminal.

    Raises:
      FileNotFoundError: no folder, or no weights in it.
      CheckpointError: damaged files, or weights that do not fit the configuration: every
        missing, unexpected and wrong-shaped tensor in one message.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    if orbax_store.is_store(folder):
        return orbax_store.restore(folder, abstract_params(config))
    tensors = find_tensors(folder)
    plan = _match(tensors, config, folder)
    return _read(plan, tensors, config, progress)


def find_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a folder's safetensors files, by full name.

    Raises:
      FileNotFoundError, CheckpointError: as `load_params`.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _sharded(folder, index)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickle files ({', '.join(pickles[:3])}), which can run code when "
            "opened: take the safetensors version of the checkpoint"
        )
    raise FileNotFoundError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json"
    )


def _sharded(folder: Path, index: Path) -> dict[str, TensorInfo]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no valid weight_map: {error!r}") from error
    for name in shards:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or "\\" in name
            or name in (".", "..")
        ):
            raise CheckpointError(f"{index} points to {name!r}, outside its own folder: refused")
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(missing)}: download the rest")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if weight_map.get(name, shard) != shard or name in tensors:
                raise CheckpointError(f"{index}: tensor {name} is in {shard} too")
            tensors[name] = info
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise CheckpointError(f"{index} lists tensors that no shard holds: {', '.join(lost[:20])}")
    return tensors


def _match(
    tensors: Mapping[str, TensorInfo], config: GemmaConfig, folder: Path
) -> dict[str, tuple[Recipe, list[str]]]:
    """For each parameter its recipe and the full names of its tensors; or one error with all."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[0])
    plan: dict[str, tuple[Recipe, list[str]]] = {}
    problems: list[str] = []
    expected = {prefix + name for name in unused(config)}
    for path, recipe in recipes(config).items():
        names = [prefix + part.name for part in recipe.parts]
        plan[path] = recipe, names
        expected.update(names)
        for part, name in zip(recipe.parts, names, strict=True):
            info = tensors.get(name)
            if info is None:
                problems.append(f"missing {name} {list(part.shape)}")
            elif info.shape != part.shape:
                problems.append(
                    f"{name} has shape {list(info.shape)}, the configuration gives "
                    f"{list(part.shape)}"
                )
            elif info.dtype not in DTYPES:
                problems.append(f"{name} has dtype {info.dtype}; supported: {', '.join(DTYPES)}")
    extra = [n for n in tensors if n not in expected and not SKIPPED.fullmatch(n)]
    problems += [f"unexpected {name} {list(tensors[name].shape)}" for name in sorted(extra)]
    if problems:
        raise CheckpointError(
            f"{folder} does not fit its configuration ({len(problems)} problems):\n  "
            + "\n  ".join(problems)
        )
    return plan


def _read(
    plan: Mapping[str, tuple[Recipe, list[str]]],
    tensors: Mapping[str, TensorInfo],
    config: GemmaConfig,
    progress: bool,
) -> Params:
    total = sum(tensors[name].nbytes for _, names in plan.values() for name in names)
    leaves: dict[str, jax.Array] = {}
    with (
        ExitStack() as stack,
        tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="loading weights",
            disable=None if progress else True,
        ) as bar,  # fmt: skip
    ):
        files = {info.file for info in tensors.values()}
        streams = {f: stack.enter_context(f.open("rb", buffering=0)) for f in files}
        for path, (recipe, names) in plan.items():
            dtype = DTYPES[tensors[names[0]].dtype]
            assembled = _aligned_empty(recipe.shape, dtype)
            for part, name in zip(recipe.parts, names, strict=True):
                info = tensors[name]
                if DTYPES[info.dtype] == dtype:
                    read_into(streams[info.file], info, assembled[part.place])
                else:  # parts of one weight in different dtypes
                    own = np.empty(assembled[part.place].shape, DTYPES[info.dtype])
                    read_into(streams[info.file], info, own)
                    assembled[part.place] = own
                bar.update(info.nbytes)
            leaves[path] = _to_device(assembled, recipe.order, jnp.dtype(config.dtype))
            del assembled
    return traverse_util.unflatten_dict(leaves, sep="/")


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which the CPU backend takes over uncopied."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _to_device(assembled: np.ndarray, order: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Copies to the device and brings into the model's layout there; waits, to free the buffer."""
    array = jax.device_put(assembled)
    if order or array.dtype != dtype:
        array = _arrange(array, order or tuple(range(array.ndim)), dtype)
    return jax.block_until_ready(array)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _arrange(array: jax.Array, order: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return array.transpose(order).astype(dtype)
