"""Parameters in Orbax form, in the model's own layout: nothing to merge or transpose on loading."""

import math
from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from carat_jax.checkpoint.errors import CheckpointError, misfit
from carat_jax.model import Params

FOLDER = "params"


def is_store(folder: Path) -> bool:
    """Whether the folder holds what `save` wrote."""
    return (folder / FOLDER).is_dir()


def save(folder: Path, params: Params) -> None:
    """Writes folder/params; an existing one is an error (FileExistsError)."""
    target = (folder / FOLDER).resolve()
    if target.exists():
        raise FileExistsError(f"{target} exists: choose an empty folder")
    with _checkpointer(params) as checkpointer:
        checkpointer.save(target, args=ocp.args.PyTreeSave(params))


def restore(folder: Path, shapes: Params) -> Params:
    """Reads folder/params, as the dtypes of `shapes`, to their shardings or the default device.

    Raises:
      CheckpointError: an incomplete store, or weights that do not fit: every missing,
        unexpected and wrong-shaped one in one message.
    """
    store = (folder / FOLDER).resolve()
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding or default), shapes
    )
    try:
        with _checkpointer(shapes) as checkpointer:
            stored = checkpointer.metadata(store).item_metadata
            if stored is None:
                raise FileNotFoundError("its description of the weights cannot be read")
            if problems := _differences(stored.tree, shapes):
                raise misfit(folder, problems)
            arguments = ocp.checkpoint_utils.construct_restore_args(target)
            return checkpointer.restore(
                store, args=ocp.args.PyTreeRestore(target, restore_args=arguments)
            )
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax lets through whatever its parts raise
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{store} is incomplete or damaged ({reason}): convert the checkpoint again"
        ) from error


def _checkpointer(params: Params) -> ocp.Checkpointer:
    """Moves a few weights at a time: as little at once as the largest of them allows.

    Uncompressed, because that is written and read about twice as fast, for a third more disk.
    """
    largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    limit = int(largest / 1e9) + 1
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_compression=False, save_concurrent_gb=limit, restore_concurrent_gb=limit
        )
    )


def _differences(stored: Mapping, shapes: Params) -> list[str]:
    found = {path: tuple(leaf.shape) for path, leaf in _flat(stored).items()}
    expected = {path: leaf.shape for path, leaf in _flat(shapes).items()}
    problems = [
        f"missing {path} {list(expected[path])}" for path in sorted(expected.keys() - found)
    ]
    problems += [
        f"{path} has shape {list(found[path])}, the configuration gives {list(shape)}"
        for path, shape in expected.items()
        if path in found and found[path] != shape
    ]
    extra = sorted(found.keys() - expected)
    return problems + [f"unexpected {path} {list(found[path])}" for path in extra]


def _flat(tree: Mapping) -> dict:
    return traverse_util.flatten_dict(tree, sep="/")
