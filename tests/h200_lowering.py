"""Lowers a function for an H200 on a machine without one.

That finds shapes, layouts and memory sizes that Mosaic GPU refuses; spills and wrong numbers it
does not see.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.mesh import AbstractDevice  # no public name yet
from jax.sharding import AbstractMesh, AxisType

H200 = AbstractMesh(
    (1,),
    ("device",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)


def lower_for_h200(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """StableHLO of `function` under jit, lowered for CUDA on one H200.

    Args:
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s; what is static is closed over.
    """
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(function).trace(*args, **kwargs)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
