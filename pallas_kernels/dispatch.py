"""How an op picks one of its implementations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Implementation = Callable[..., jax.Array]


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
) -> jax.Array:
    """Calls the implementation named, or the first in order that takes the inputs.

    Args:
      implementations: by name, best first.
      implementation: a name, then that one runs or its error is raised; None tries them in order.

    Raises:
      ValueError: no implementation has that name.
      Unsupported: the named one, or every one, refused the inputs.
    """
    if implementation is not None:
        if implementation not in implementations:
            known = ", ".join(repr(name) for name in implementations)
            raise ValueError(f"implementation={implementation!r} does not exist: take {known}")
        return implementations[implementation](*args, **kwargs)
    refusals = []
    for name, function in implementations.items():
        try:
            return function(*args, **kwargs)
        except Unsupported as refusal:
            refusals.append(f"{name}: {refusal}")
    raise Unsupported("; ".join(refusals))
