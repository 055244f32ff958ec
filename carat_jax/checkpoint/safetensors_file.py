"""Reading safetensors piece by piece into arrays that already exist.

The `safetensors` library maps a file into memory and returns whole tensors; here any box of
a tensor is read with plain file reads, so that host memory holds only the pieces under
way. The header is checked in full before anything is read.
"""

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from carat_jax.checkpoint.errors import CheckpointError

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
          "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. dtype is the format's name ("BF16"), offset is in bytes from 0."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name.

    Raises:
      CheckpointError: truncated file, malformed header, tensors that overlap, leave gaps, lie
        outside the file or disagree with their own shape.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _damaged(file, f"a header of {length:,} bytes in a file of {size:,}")
        try:
            text = stream.read(length).decode("utf-8")
            header = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise _damaged(file, f"the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "the header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            raise _damaged(file, f"tensor {name} starts at byte {info.offset:,}, "
                                 f"the one before ends at {end:,}")  # fmt: skip
        end += info.nbytes
    if end != size:
        raise _damaged(file, f"the tensors end at byte {end:,}, the file at {size:,}")
    return tensors


def read_box(
    info: TensorInfo, view: tuple[int, ...], start: tuple[int, ...], destination: np.ndarray
) -> None:
    """Fills a contiguous array with a box of a tensor, and reads nothing else.

    Args:
      info: the tensor.
      view: the shape in which to see it.
      start: the index there at which the box begins; its shape is that of `destination`.

    Raises:
      CheckpointError: the file ended early.
    """
    if not destination.size:
        return
    box, axis = destination.shape, max(len(view) - 1, 0)
    while axis > 0 and box[axis] == view[axis]:  # such axes lie in one run of the file
        axis -= 1
    runs = destination.reshape(-1, math.prod(box[axis:])).view(np.uint8)
    strides = [math.prod(view[i + 1 :]) * destination.itemsize for i in range(len(view))]
    with info.file.open("rb", buffering=0) as stream:
        for run, outer in zip(runs, np.ndindex(box[:axis]), strict=True):
            index = (*np.add(start[:axis], outer).tolist(), *start[axis:])
            stream.seek(info.offset + sum(map(operator.mul, index, strides)))
            rest = memoryview(run)
            while rest:
                count = stream.readinto(rest)
                if not count:
                    raise _damaged(info.file, "it ended early")
                rest = rest[count:]


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file}: {why}: the file is damaged, download or copy it again")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    fields = entry if isinstance(entry, Mapping) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise _damaged(file, f"tensor {name} has dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise _damaged(file, f"tensor {name} has shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _damaged(file, f"tensor {name} has data_offsets {offsets!r}")
    info = TensorInfo(file, dtype, tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise _damaged(file, f"tensor {name} {dtype}{shape} does not fit into "
                             f"its data_offsets {offsets}")  # fmt: skip
    return info


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62
