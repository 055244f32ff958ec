"""The choice of a router: which experts a token visits, and with which shares."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.choose_experts import mosaic, xla
from pallas_kernels.partial_sums import PartialSums

# Best first; not measured apart. `carat bench decode --config 26b-a4b`, benchmarks/h200: through
# XLA "before" in kernels_31b.json (b7552ee); decode_26b-a4b.json (879781d), with more in it, since.
IMPLEMENTATIONS = {"mosaic": mosaic.choose_experts, "xla": xla.choose_experts}


def choose_experts(
    logits: jax.Array | PartialSums,
    scale: jax.Array,
    *,
    k: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k experts of the largest logits, and softmax(those k) · scale.

    That is softmax over all E, the k largest, divided by their sum: the denominator over E cancels,
    and is not computed. All in float32.

    The choice is among the logits, in the order of `lax.top_k`: of equal ones the lower index
    first, and +0 before -0. Hugging Face's is among the probabilities, and differs where the k-th
    and the next round to the same one. Which logits do hangs on how exp rounds; here they decide
    themselves, so that every implementation makes the same choice.

    A NaN among a row's logits makes all its shares NaN; its indices are some in [0, E).

    Args:
      logits: float32 [M, E].
      scale: [E], of each expert, multiplies its share.
      k: how many, at most E.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      Indices int32 [M, k], the largest logit first, and shares float32 [M, k].

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes or the device.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32 or scale.shape != logits.shape[1:]:
        raise ValueError(
            f"logits {logits.shape} {logits.dtype} must be float32 [M, E], and scale "
            f"{scale.shape} [E]"
        )
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k = {k} must be between 1 and the {logits.shape[1]} experts")
    return dispatch.run(IMPLEMENTATIONS, implementation, logits, scale, k=k)
