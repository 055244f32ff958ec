"""safetensors -> parameters: everything is checked first, then read piece by piece."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import Mesh

from carat_jax import sharding
from carat_jax.checkpoint import orbax_store
from carat_jax.checkpoint.errors import CheckpointError, misfit
from carat_jax.checkpoint.mapping import PREFIXES, SKIPPED, Recipe, recipes, unused
from carat_jax.checkpoint.reading import Plan, read
from carat_jax.checkpoint.safetensors_file import DTYPES, TensorInfo, read_header
from carat_jax.config import GemmaConfig
from carat_jax.model import Params
from carat_jax.params import abstract_params

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def load_params(
    path: str | Path,
    config: GemmaConfig,
    *,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> Params:
    """Loads a checkpoint folder onto the default device or a mesh, in config.dtype.

    The folder holds `model.safetensors`, or shards with `model.safetensors.index.json`, or what
    `carat convert` wrote. Names may start with `model.language_model.` or `model.`; vision and
    audio tensors and the unused K/V weights of borrowing layers are skipped. Beside the
    parameters themselves, host memory holds a few pieces of 8 MB. For a mesh each process reads
    what its own devices need, once.

    Args:
      path: the folder.
      config: what its `config.json` says; `dataclasses.replace(config, dtype=…)` to convert.
      mesh: from `carat.mesh`; the tree then knows it (`sharding.MeshParams`).
      progress: show a bar, on a terminal or in a notebook, if it takes more than a second.

    Raises:
      ConfigError: a mesh that the model cannot be cut for.
      FileNotFoundError: no folder, or no weights in it.
      CheckpointError: damaged files, or weights that do not fit the configuration: every
        missing, unexpected and wrong-shaped tensor in one message.
    """
    params = load_stored(path, config, mesh=mesh, progress=progress)
    return params if mesh is None else sharding.spread(params, mesh)


def load_stored(
    path: str | Path, config: GemmaConfig, *, mesh: Mesh | None, progress: bool
) -> Params:
    """As `load_params`, but in the form that checkpoints have on any mesh (`sharding.stored`)."""
    folder = Path(os.path.expanduser(path))
    shapes = abstract_params(config)
    if mesh is not None:
        sharding.check(config, mesh)
        shapes = sharding.stored(shapes, mesh)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the one that holds config.json")
    if orbax_store.is_store(folder):
        return orbax_store.restore(folder, shapes)
    return read(_match(find_tensors(folder), config, folder), shapes, progress)


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


def match(
    tensors: Mapping[str, TensorInfo], wanted: Mapping[str, Recipe], prefix: str = ""
) -> tuple[Plan, list[str]]:
    """Finds the tensors of every parameter.

    Args:
      tensors: of a checkpoint, by full name; all are to be used.
      wanted: recipes, by the parameter's path.
      prefix: what full names have before the recipes'.

    Returns:
      for each parameter its recipe and where its tensors lie, complete only if nothing is wrong;
      a line for everything that is.
    """
    problems, expected = [], set()
    plan: Plan = {}
    for path, recipe in wanted.items():
        for part in recipe.parts:
            name = prefix + part.name
            expected.add(name)
            info = tensors.get(name)
            if info is None:
                problems.append(f"missing {name} {list(part.shape)}")
            elif wrong := mismatch(info, part.shape, tuple(DTYPES)):
                problems.append(f"{name} {wrong}")
            else:
                plan.setdefault(path, (recipe, []))[1].append(info)
    extra = sorted(tensors.keys() - expected)
    return plan, problems + [f"unexpected {name} {list(tensors[name].shape)}" for name in extra]


def mismatch(info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
    """What is wrong with a tensor's shape or dtype; None if nothing is."""
    if info.shape != shape:
        return f"has shape {list(info.shape)}, the configuration gives {list(shape)}"
    if info.dtype not in dtypes:
        return f"has dtype {info.dtype}; supported: {', '.join(dtypes)}"
    return None


def _sharded(folder: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not os.path.isfile(folder / name)]
    if missing:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(missing)}: download the rest")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors or weight_map.get(name, shard) != shard:
                raise CheckpointError(
                    f"tensor {name} is in {shard} and, by {index}, in another shard"
                )
            tensors[name] = info
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise CheckpointError(f"{index} lists tensors that no shard holds: {', '.join(lost)}")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The shard of each tensor; only plain names of safetensors files beside the index."""
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not valid JSON: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise CheckpointError(
                f"{index} places {name} in {shard!r}: refused, it must be a .safetensors file in "
                "the same folder"
            )
    return weight_map


def _match(tensors: Mapping[str, TensorInfo], config: GemmaConfig, folder: Path) -> Plan:
    """`match` for a model's checkpoint, whichever prefix its names have; raises what is wrong."""
    todo = recipes(config)
    names = {part.name for recipe in todo.values() for part in recipe.parts}
    prefix = max(PREFIXES, key=lambda p: sum(p + name in tensors for name in names))
    skipped = {prefix + name for name in unused(config)}
    taken = {
        name: info
        for name, info in tensors.items()
        if name not in skipped and not SKIPPED.fullmatch(name)
    }
    plan, problems = match(taken, todo, prefix)
    if problems:
        raise misfit(folder, problems)
    return plan
