"""How a layer of E2B and E4B takes in what a token has for it: norm, residual sum, two products."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.per_layer_input import mosaic, xla

# Best first: `carat bench decode --config e4b e2b --context 2048`, "per_layer_input" in
# benchmarks/h200/kernels_31b.json (6902df1, dfe5ad5), which has more in it. Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.per_layer_input, "xla": xla.per_layer_input}


def per_layer_input(
    h: jax.Array,
    y: jax.Array | PartialSums,
    w: jax.Array,
    gate: jax.Array,
    inputs: jax.Array,
    projection: jax.Array,
    *,
    layer: int,
    eps: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds the normed output y of a sublayer to the residual h; the sum gates the layer's input.

    With norm as in `residual_norm` and the tanh form of GELU:

      new = h + norm(y, w)
      product = (gelu(new · gate) · inputs[:, layer]) · projection

    Products accumulate in float32. new · gate, what is projected, and the result are rounded to
    the dtype of h; GELU and its product with the input are float32.

    Args:
      h, y: [M, D].
      w: [D].
      gate: [D, P].
      inputs: [M, L, P], of all layers, so that no layer needs a copy of its own.
      projection: [P, D].
      layer: which one.
      eps: added to the mean square.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      The new residual and the product, [M, D] each, like h.

    Raises:
      ValueError: shapes or dtypes that do not fit, a layer that is not there, an unknown
        implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    if h.ndim != 2 or y.shape != h.shape or w.shape != h.shape[-1:]:
        raise ValueError(f"h {h.shape} and y {y.shape} must be alike [M, D], w {w.shape} [D]")
    (M, D), P = h.shape, gate.shape[-1]
    if gate.shape != (D, P) or projection.shape != (P, D):
        raise ValueError(
            f"gate {gate.shape} must be [D, P] and projection {projection.shape} [P, D], D = {D}"
        )
    if inputs.ndim != 3 or (len(inputs), inputs.shape[-1]) != (M, P):
        raise ValueError(f"inputs {inputs.shape} must be [M, L, P], M = {M} and P = {P}")
    if not 0 <= layer < inputs.shape[1]:
        raise ValueError(f"layer {layer} is none of the {inputs.shape[1]} of inputs")
    for name, x in (("gate", gate), ("inputs", inputs), ("projection", projection)):
        if x.dtype != h.dtype:
            raise ValueError(f"{name} is {x.dtype}, h {h.dtype}: they must be alike")
    return dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        h,
        y,
        w,
        gate,
        inputs,
        projection,
        layer=layer,
        eps=eps,
    )
