"""Parameters in Orbax form, in the model's own layout: nothing to merge or transpose on loading."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

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
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, params)


def restore(folder: Path, shapes: Params) -> Params:
    """Reads folder/params onto the default device, as the dtypes of `shapes`."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore((folder / FOLDER).resolve(), target)
