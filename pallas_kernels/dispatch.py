"""How an op picks one of its implementations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import PartialSums

Implementation = Callable[..., Any]

HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA H20", "NVIDIA GH200")


class Unsupported(NotImplementedError):
    """An implementation cannot take these inputs; the message names the shape or dtype.

    Raised while tracing, before anything is compiled, so that the next implementation can be
    tried. A shape that *no* implementation could mean (heads that do not divide) is a ValueError.
    """


def run(
    implementations: Mapping[str, Implementation],
    implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the implementation named, or the first in order that takes the inputs.

    Gradients are those of the last: the kernels have none of their own.

    Args:
      implementations: by name, best first; the last takes everything, and has a gradient.
      implementation: a name, then that one runs or its error is raised; None tries them in order.

    Raises:
      ValueError: no implementation has that name.
      Unsupported: the named one, or every one, refused the inputs.
    """
    if implementation is not None:
        if implementation not in implementations:
            known = ", ".join(repr(name) for name in implementations)
            raise ValueError(f"implementation={implementation!r} does not exist: take {known}")
        return _differentiable(implementations, implementation)(args, kwargs)
    refusals = []
    for name in implementations:
        try:
            return _differentiable(implementations, name)(args, kwargs)
        except Unsupported as refusal:
            refusals.append(f"{name}: {refusal}")
    raise Unsupported("; ".join(refusals))


def _differentiable(
    implementations: Mapping[str, Implementation], name: str
) -> Callable[[tuple, dict], Any]:
    """The implementation as a function of its arguments, with the gradient of the last."""
    *_, last = implementations

    def call(args: tuple, kwargs: dict) -> Any:
        arrays = {key: x for key, x in kwargs.items() if isinstance(x, jax.Array)}
        static = {key: x for key, x in kwargs.items() if key not in arrays}

        def reference(args, arrays):
            return implementations[last](*args, **arrays, **static)

        @jax.custom_vjp
        def run(args, arrays):
            return implementations[name](*args, **arrays, **static)

        def forward(args, arrays):
            return run(args, arrays), (args, arrays)

        def backward(inputs, cotangent):
            outputs, gradient = jax.vjp(reference, *inputs)
            return gradient(_of_sums(cotangent, outputs))

        run.defvjp(forward, backward)
        return run(args, arrays)

    if name == last:
        return lambda args, kwargs: implementations[name](*args, **kwargs)
    return call


def _of_sums(cotangent: Any, outputs: Any) -> Any:
    """A cotangent like the reference's outputs, which may be in other pieces, or in none.

    Each piece of a sum has the sum's.
    """

    def is_sum(x):
        return isinstance(x, PartialSums)

    def fit(like, x):
        x = x.parts[0].astype(x.dtype) if is_sum(x) else x
        if is_sum(like):
            return like.replace(parts=jnp.broadcast_to(x, like.parts.shape).astype(jnp.float32))
        return x

    return jax.tree.map(fit, outputs, cotangent, is_leaf=is_sum)


def thread_blocks(blocks: int | None, interpret: Any) -> int:
    """How many blocks a kernel may have at a time.

    Args:
      blocks: what the interpreter, which has no multiprocessors to count, is to take; else None.
      interpret: the interpreter's parameters; None = on a GPU.

    Returns:
      `blocks`, or the multiprocessors of the GPU.

    Raises:
      ValueError: the interpreter without blocks, or a GPU with them.
      Unsupported: as `require_hopper`.
    """
    if interpret is None:
        if blocks is not None:
            raise ValueError(
                f"blocks={blocks} without interpret: leave it out, a GPU takes as many as it has "
                "multiprocessors"
            )
        return require_hopper()
    if blocks is None or blocks < 1:
        raise ValueError(f"blocks={blocks} with interpret: give how many it takes, at least 1")
    return blocks


def require_hopper() -> int:
    """Raises Unsupported unless programs being traced now are for an NVIDIA Hopper GPU.

    The device is the one of the abstract mesh, when a program is lowered for a device that is
    not here; else JAX's default.

    Returns:
      Its number of multiprocessors.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind.startswith(HOPPER):
        return device.num_cores
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
        device = jax.devices(device)[0] if isinstance(device, str) else device
        if str(getattr(device, "compute_capability", "")).startswith("9."):
            return device.core_count
    raise Unsupported(
        f"needs an NVIDIA Hopper GPU (compute capability 9.x), not {device.device_kind!r}"
    )
