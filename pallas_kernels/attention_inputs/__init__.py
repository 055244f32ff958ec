"""What stands between the query/key/value product and attention: norms, RoPE, the new keys."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.attention_inputs import mosaic, xla
from pallas_kernels.attention_inputs.form import AttentionInputs
from pallas_kernels.partial_sums import PartialSums

__all__ = ["AttentionInputs", "attention_inputs"]

# Best first: `carat bench decode --config 31b` before it and with it, "steps" in
# benchmarks/h200/kernels_31b.json (8b71bf0, b7552ee). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.attention_inputs, "xla": xla.attention_inputs}


def attention_inputs(
    y: jax.Array | PartialSums,
    q_norm: jax.Array,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    length: jax.Array,
    new: jax.Array,
    *,
    group: int,
    eps: float,
    ring: bool,
    k: jax.Array | None = None,
    v: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    implementation: str | None = None,
) -> AttentionInputs:
    """Norms and turns the heads of T new positions, and puts their keys and values in the cache.

    With norm(x, w) = x / sqrt(mean(x²) + eps) · w over a head, and R(x) = x with its first P/2
    pairs of widths (d, d + H/2) turned: queries are R(norm(q, q_norm)), keys R(norm(k, k_norm)),
    values norm(v, 1). In the compact form a key is not stored but for the P widths that turn (the
    others are its value times k_norm), and a query comes as those P widths, and as all times
    k_norm with those at zero. All in float32, rounded once, to the dtype of y.

    Args:
      y: [B, T, K, group + own, H], of each KV head its query heads, then its key, then its value.
        own is 2; or 1 where the value is the key's product without norm and RoPE, which makes the
        form compact; or 0 where keys and values are another layer's.
      q_norm: [H].
      k_norm: [H]; where own is 0, that of the other layer if its form is compact, else None.
      cos, sin: float32 [B, T, 1, P/2] of the positions' angles.
      length: int32 [B], positions before the new ones.
      new: int32 [B], how many of the T are real. The others are stored as zeros: a masked slot has
        weight zero, and zero times NaN is NaN.
      group: G, query heads of a KV head.
      eps: added to the mean square.
      ring: position p is stored in slot p mod S, of which there must be T; else in slot p, or
        nowhere if there is none.
      k, v, k_rotated: the caches [B, K, S, width] to write to, donated through: v and one of the
        others, or none at all.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Raises:
      ValueError: shapes that do not fit, caches of another form, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    _check(y, q_norm, k_norm, cos, sin, length, new, group, ring, k, v, k_rotated)
    return dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        y,
        q_norm,
        k_norm,
        cos,
        sin,
        length,
        new,
        group=group,
        eps=eps,
        ring=ring,
        k=k,
        v=v,
        k_rotated=k_rotated,
    )


def _check(y, q_norm, k_norm, cos, sin, length, new, group, ring, k, v, k_rotated) -> None:
    if y.ndim != 5 or y.shape[3] - group not in (0, 1, 2):
        raise ValueError(
            f"y {y.shape} must be [B, T, K, group + own, H] with own 0, 1 or 2; group is {group}"
        )
    B, T, K, heads, H = y.shape
    own = heads - group
    norms = [w.shape for w in (q_norm, k_norm) if w is not None]
    if set(norms) != {(H,)} or (own and k_norm is None):
        raise ValueError(f"q_norm and k_norm {norms} must both be [H], H = {H}, for own {own}")
    if cos.shape != sin.shape or cos.shape[:3] != (B, T, 1) or 2 * cos.shape[3] > H:
        raise ValueError(
            f"cos {cos.shape} and sin {sin.shape} must be [B, T, 1, P/2] = ({B}, {T}, 1, up to "
            f"{H // 2})"
        )
    if length.shape != (B,) or new.shape != (B,):
        raise ValueError(f"length {length.shape} and new {new.shape} must be [B], B = {B}")
    caches = {"k": k, "v": v, "k_rotated": k_rotated}
    given = {name: x.shape for name, x in caches.items() if x is not None}
    if not given:
        return
    widths = {"v": H, "k_rotated": 2 * cos.shape[3]} if own == 1 else {"k": H, "v": H}
    slots = next(iter(given.values()))[2:3]
    wanted = {name: (B, K, *slots, width) for name, width in widths.items()} if own else {}
    if given != wanted:
        wanted = {name: f"({B}, {K}, S, {width})" for name, width in widths.items()} if own else {}
        raise ValueError(f"caches {given} do not fit y {y.shape}: it needs {wanted or 'none'}")
    if ring and T > slots[0]:
        raise ValueError(
            f"a ring of {slots[0]} slots cannot hold {T} new positions: give it {T} slots or more, "
            "or no cache, and store the newest"
        )
