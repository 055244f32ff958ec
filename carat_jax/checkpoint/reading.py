"""Reading the tensors of a checkpoint piece by piece into parameters, where these are to lie."""

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from tqdm.auto import tqdm

from carat_jax import display
from carat_jax.checkpoint.mapping import Part, Recipe
from carat_jax.checkpoint.safetensors_file import DTYPES, TensorInfo, read_box
from carat_jax.model import Params

PIECE = 1 << 23  # bytes read at a time
READERS = 3  # pieces read at once, ahead of the device
SMALL = 1 << 20  # bytes of a parameter that is not worth the compilations of the device's way

Plan = dict[str, tuple[Recipe, list[TensorInfo]]]


def read(plan: Plan, shapes: Params, progress: bool) -> Params:
    """Parameters from tensors that fit.

    Args:
      plan: for each parameter its recipe, and where the tensors of its parts lie.
      shapes: the parameters as `jax.ShapeDtypeStruct`; those with a sharding are read for the
        devices of this process, the others onto the default device.
      progress: show a bar, on a terminal or in a notebook, if it takes more than a second.

    Raises:
      CheckpointError: a file ended early.
    """
    leaves = traverse_util.flatten_dict(shapes, sep="/")
    pieces = [
        piece
        for path, (recipe, infos) in plan.items()
        for block in _blocks(path, leaves[path])
        for part, info in zip(recipe.parts, infos, strict=True)
        for piece in _pieces(block, recipe, part, info)
    ]
    arrays: dict[str, list[jax.Array]] = collections.defaultdict(list)
    total = sum(piece.nbytes for piece in pieces)
    with display.progress_bar(total, "loading weights", progress) as bar:
        blocks = _read_ahead(pieces, bar)
        for block, own in itertools.groupby(blocks, lambda item: item[0].block):
            array = _assemble(block, plan[block.path][0], own, leaves[block.path].dtype)
            arrays[block.path] += [array, *(jax.device_put(array, d) for d in block.devices[1:])]
    params = {path: _whole(leaf, arrays[path]) for path, leaf in leaves.items()}
    return jax.block_until_ready(traverse_util.unflatten_dict(params, sep="/"))


@dataclass(frozen=True)
class _Block:
    """A parameter, or what some devices of a mesh have of it.

    Attributes:
      path: of the parameter.
      start, shape: where it lies in the parameter.
      devices: all have the same; None = the default one.
    """

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    devices: tuple[jax.Device | None, ...]


@dataclass(frozen=True)
class _Piece:
    """A box of a part's view that is read at once.

    Attributes:
      block: what it is a piece of.
      info, view: the tensor, and how it is seen.
      at, shape: where the box begins in that view, and its shape.
      start: the index in the block where it begins.
    """

    block: _Block
    info: TensorInfo
    view: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.info.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _blocks(path: str, leaf: jax.ShapeDtypeStruct) -> list[_Block]:
    """What the devices of this process need of a parameter: each block once."""
    if leaf.sharding is None:
        return [_Block(path, (0,) * len(leaf.shape), leaf.shape, (None,))]
    devices: dict[tuple, list[jax.Device]] = collections.defaultdict(list)
    for device, slices in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(slices, leaf.shape, strict=True))
        devices[tuple(bounds)].append(device)
    return [
        _Block(path, tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds), tuple(same))
        for bounds, same in devices.items()
    ]


def _whole(leaf: jax.ShapeDtypeStruct, arrays: list[jax.Array]) -> jax.Array:
    if leaf.sharding is None:
        return arrays[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _pieces(block: _Block, recipe: Recipe, part: Part, info: TensorInfo) -> Iterator[_Piece]:
    """Cuts what the block has of a tensor along the first axis whose rows are below a piece.

    All pieces have one size, so that one executable places them: the last begins early enough.
    """
    extent = tuple(part.view[axis] for axis in recipe.order)
    low = np.maximum(block.start, part.start)
    high = np.minimum(np.add(block.start, block.shape), np.add(part.start, extent))
    if (low >= high).any():
        return
    place = [recipe.order.index(axis) for axis in range(len(part.view))]
    first = np.subtract(low, part.start)[place]
    box = tuple((high - low)[place].tolist())
    item, axis = DTYPES[info.dtype].itemsize, 0
    while axis < len(box) - 1 and math.prod(box[axis + 1 :]) * item > PIECE:
        axis += 1
    rows, row_bytes = box[axis], math.prod(box[axis + 1 :]) * item
    count = -(-rows // max(1, PIECE // row_bytes))
    size = -(-rows // count)
    shape = (1,) * axis + (size, *box[axis + 1 :])
    for outer in np.ndindex(box[:axis]):
        for i in range(count):
            index = np.zeros(len(box), int)
            index[: axis + 1] = (*outer, min(i * size, rows - size))
            at, start = first + index, low - block.start + index[list(recipe.order)]
            yield _Piece(block, info, part.view, tuple(at.tolist()), shape, tuple(start.tolist()))


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
            reading.append(
                (
                    piece,
                    values,
                    pool.submit(read_box, piece.info, piece.view, piece.at, values),
                )
            )
            if len(reading) > READERS:
                yield first()
        while reading:
            yield first()


def _assemble(
    block: _Block, recipe: Recipe, pieces: Iterable[tuple[_Piece, np.ndarray]], dtype: np.dtype
) -> jax.Array:
    """A block on the first of its devices: made in host memory if small, else in place there."""
    device = block.devices[0]
    if math.prod(block.shape) * dtype.itemsize <= SMALL:
        host = np.empty(block.shape, dtype)
        for piece, values in pieces:
            values = values.transpose(recipe.order)
            ends = np.add(piece.start, values.shape)
            host[tuple(map(slice, piece.start, ends))] = values
        return jax.device_put(host, device)
    leaf = jnp.zeros(block.shape, dtype, device=device)
    for piece, values in pieces:
        values = _transposed(values, recipe.order, device)
        jax.block_until_ready(leaf)  # so that no more than two pieces wait for the device
        leaf = _update(leaf, values, np.array(piece.start, np.int32))
    return leaf


def _transposed(values: np.ndarray, order: tuple[int, ...], device: jax.Device | None) -> jax.Array:
    if jax.default_backend() == "cpu":  # the transfer transposes much faster than XLA does there
        return jax.device_put(values.transpose(order), device)
    return _transpose(jax.device_put(values, device), order)


@functools.partial(jax.jit, static_argnums=1)
def _transpose(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return array.transpose(order)


@functools.partial(jax.jit, donate_argnums=0)
def _update(leaf: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(leaf, block.astype(leaf.dtype), tuple(start))
