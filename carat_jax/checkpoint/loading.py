"""safetensors -> parameters: everything is checked first, then read piece by piece."""

import collections
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from tqdm.auto import tqdm

from carat_jax import display
from carat_jax.checkpoint import orbax_store
from carat_jax.checkpoint.errors import CheckpointError, misfit
from carat_jax.checkpoint.mapping import PREFIXES, SKIPPED, Part, Recipe, recipes, unused
from carat_jax.checkpoint.safetensors_file import DTYPES, TensorInfo, read_header, read_into
from carat_jax.config import GemmaConfig
from carat_jax.model import Params, abstract_params

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PIECE = 1 << 23  # bytes read at a time
READERS = 3  # pieces read at once, ahead of the device
SMALL = 1 << 20  # bytes of a parameter that is not worth the compilations of the device's way

Plan = dict[str, tuple[Recipe, list[TensorInfo]]]


def load_params(path: str | Path, config: GemmaConfig, *, progress: bool = True) -> Params:
    """Loads a checkpoint folder onto the default device, in config.dtype.

    The folder holds `model.safetensors`, or shards with `model.safetensors.index.json`, or what
    `carat convert` wrote. Names may start with `model.language_model.` or `model.`; vision and
    audio tensors and the unused K/V weights of borrowing layers are skipped. Beside the
    parameters themselves, host memory holds a few pieces of 8 MB.

    Args:
      path: the folder.
      config: what its `config.json` says; `dataclasses.replace(config, dtype=…)` to convert.
      progress: show a bar, on a terminal or in a notebook, if it takes more than a second.

    Raises:
      FileNotFoundError: no folder, or no weights in it.
      CheckpointError: damaged files, or weights that do not fit the configuration: every
        missing, unexpected and wrong-shaped tensor in one message.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the one that holds config.json")
    if orbax_store.is_store(folder):
        return orbax_store.restore(folder, abstract_params(config))
    return _read(_match(find_tensors(folder), config, folder), config, progress)


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
    """For each parameter its recipe and where its tensors lie; or one error with all that is
    wrong."""
    todo, skipped = recipes(config), unused(config)
    names = {part.name for recipe in todo.values() for part in recipe.parts}
    prefix = max(PREFIXES, key=lambda p: sum(p + name in tensors for name in names))
    problems = []
    plan: Plan = {}
    for path, recipe in todo.items():
        for part in recipe.parts:
            name = prefix + part.name
            info = tensors.get(name)
            if info is None:
                problems.append(f"missing {name} {list(part.shape)}")
            elif info.shape != part.shape:
                problems.append(f"{name} has shape {list(info.shape)}, "
                                f"the configuration gives {list(part.shape)}")  # fmt: skip
            elif info.dtype not in DTYPES:
                problems.append(f"{name} has dtype {info.dtype}; supported: {', '.join(DTYPES)}")
            else:
                plan.setdefault(path, (recipe, []))[1].append(info)
    expected = {prefix + name for name in names | skipped}
    extra = [n for n in tensors if n not in expected and not SKIPPED.fullmatch(n)]
    problems += [f"unexpected {name} {list(tensors[name].shape)}" for name in sorted(extra)]
    if problems:
        raise misfit(folder, problems)
    return plan


@dataclass(frozen=True)
class _Piece:
    """A block of a part's view that is one run of the file.

    Attributes:
      path, info: of the parameter and the tensor.
      skip: bytes of the tensor before it.
      shape: of the piece, like the part's view.
      start: the index in the parameter where it begins.
    """

    path: str
    info: TensorInfo
    skip: int
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.info.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read(plan: Plan, config: GemmaConfig, progress: bool) -> Params:
    pieces = [
        piece
        for path, (recipe, infos) in plan.items()
        for part, info in zip(recipe.parts, infos, strict=True)
        for piece in _pieces(path, recipe, part, info)
    ]
    leaves: dict[str, jax.Array] = {}
    total = sum(piece.nbytes for piece in pieces)
    with display.progress_bar(total, "loading weights", progress) as bar:
        blocks = _read_ahead(pieces, bar)
        for path, own in itertools.groupby(blocks, lambda block: block[0].path):
            leaves[path] = _assemble(plan[path][0], own, jnp.dtype(config.dtype))
    return jax.block_until_ready(traverse_util.unflatten_dict(leaves, sep="/"))


def _pieces(path: str, recipe: Recipe, part: Part, info: TensorInfo) -> Iterator[_Piece]:
    """Cuts a tensor along the first axis of its view whose rows are no larger than a piece.

    All pieces have one size, so that one executable places them: the last begins early enough.
    """
    axis = 0
    while axis < len(part.view) - 1 and _row_bytes(part.view, axis, info) > PIECE:
        axis += 1
    rows, row_bytes = part.view[axis], _row_bytes(part.view, axis, info)
    count = -(-rows // max(1, PIECE // row_bytes))
    size = -(-rows // count)
    shape = (1,) * axis + (size, *part.view[axis + 1 :])
    for outer in np.ndindex(part.view[:axis]):
        for i in range(count):
            index = (*outer, min(i * size, rows - size))
            start = list(part.start)
            for view_axis, at in enumerate(index):
                start[recipe.order.index(view_axis)] += at
            skip = int(np.ravel_multi_index(index, part.view[: axis + 1])) * row_bytes
            yield _Piece(path, info, skip, shape, tuple(start))


def _row_bytes(view: tuple[int, ...], axis: int, info: TensorInfo) -> int:
    return info.nbytes // math.prod(view[: axis + 1])


def _read_ahead(pieces: Sequence[_Piece], bar: tqdm) -> Iterator[tuple[_Piece, np.ndarray]]:
    """The pieces, in order, with their values; the next ones are being read meanwhile."""
    reading: collections.deque[tuple[_Piece, np.ndarray, Future]] = collections.deque()

    def first() -> tuple[_Piece, np.ndarray]:
        piece, values, read = reading.popleft()
        read.result()  # raises what the reading raised
        bar.update(piece.nbytes)
        return piece, values

    with ThreadPoolExecutor(READERS) as pool:
        for piece in pieces:
            # Allocated in this thread: each thread would keep what it allocates to itself.
            values = np.empty(piece.shape, piece.dtype)
            reading.append((piece, values, pool.submit(read_into, piece.info, piece.skip, values)))
            if len(reading) > READERS:
                yield first()
        while reading:
            yield first()


def _assemble(
    recipe: Recipe, blocks: Iterable[tuple[_Piece, np.ndarray]], dtype: np.dtype
) -> jax.Array:
    """One parameter from its pieces: in host memory if it is small, else in place on the device."""
    if math.prod(recipe.shape) * dtype.itemsize <= SMALL:
        host = np.empty(recipe.shape, dtype)
        for piece, values in blocks:
            block = values.transpose(recipe.order)
            ends = np.add(piece.start, block.shape)
            host[tuple(map(slice, piece.start, ends))] = block
        return jax.device_put(host)
    leaf = jnp.zeros(recipe.shape, dtype)
    for piece, values in blocks:
        block = _transposed(values, recipe.order)
        jax.block_until_ready(leaf)  # so that no more than two pieces wait for the device
        leaf = _update(leaf, block, np.array(piece.start, np.int32))
    return leaf


def _transposed(values: np.ndarray, order: tuple[int, ...]) -> jax.Array:
    if jax.default_backend() == "cpu":  # the transfer transposes much faster than XLA does there
        return jax.device_put(values.transpose(order))
    return _transpose(jax.device_put(values), order)


@functools.partial(jax.jit, static_argnums=1)
def _transpose(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return array.transpose(order)


@functools.partial(jax.jit, donate_argnums=0)
def _update(leaf: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(leaf, block.astype(leaf.dtype), tuple(start))
