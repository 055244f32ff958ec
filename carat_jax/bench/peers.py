"""Other projects' attention kernels, measured on the same tensors where they are installed."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from carat_jax.bench import timing
from carat_jax.bench.cases import Buffer, Case

SGLANG, SGLANG_BEFORE = "sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops"
SPLITS = (8, 64)  # SGLang's default, and the best found; the faster is reported

# Takes a case with a plain cache, its queries and buffers. Returns its result for the first and
# for the last buffer, [B, T, N, H] each, and its times.
Peer = Callable[[Case, jax.Array, Sequence[Buffer]], tuple[list[np.ndarray], timing.Times]]


def why_not(name: str) -> str | None:
    """Why a peer cannot run here, in one line; None where it can."""
    try:
        torch = importlib.import_module("torch")
        _sglang("decode_attention")
        _sglang("extend_attention")
    except Exception as error:  # a half-installed package raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{name} cannot be imported: {reason}"
    if not torch.cuda.is_available():
        return f"{name} needs a GPU that torch can use"
    if jax.default_backend() != "gpu":
        return f"{name} shares its tensors with JAX, which runs on {jax.default_backend()} here"
    return None


def sglang(
    case: Case, q: jax.Array, buffers: Sequence[Buffer]
) -> tuple[list[np.ndarray], timing.Times]:
    """SGLang's Triton kernels: decode for one new token, extend for more.

    Keys and values lie token by token, [slot, K, H], and are found through index lists, as SGLang
    serves them; the chain of all buffers is one CUDA graph. The new tokens of extend form a chain
    and are handed over apart from the past, as they are there.
    """
    torch = importlib.import_module("torch")
    if case.tokens == 1:
        runs = [_decode(torch, case, splits) for splits in SPLITS]
    else:
        runs = [_extend(torch, case)]
    queries = _from_jax(torch, q).reshape(-1, *q.shape[2:])  # [B·T, N, H]
    caches = [_token_by_token(torch, case, buffer) for buffer in buffers]
    measured = [_measure(torch, run, queries, caches) for run in runs]
    outputs, times = min(measured, key=lambda result: result[1].median)
    return [out.float().cpu().numpy().reshape(q.shape) for out in outputs], times


PEERS: dict[str, Peer] = {"sglang": sglang}


def _sglang(module: str) -> Any:
    try:
        return importlib.import_module(f"{SGLANG}.{module}")
    except ModuleNotFoundError:  # 0.5.15 has them elsewhere
        return importlib.import_module(f"{SGLANG_BEFORE}.{module}")


def _token_by_token(torch: Any, case: Case, buffer: Buffer) -> dict[str, Any]:
    """k and v as [B·S, K, H], and the new tokens' as new_k and new_v [B·T, K, H]."""
    new, _ = _indices(torch, case, case.positions[-case.tokens :])
    cache = {}
    for name, x in buffer.items():
        tokens = _from_jax(torch, x).transpose(1, 2)
        cache[name] = tokens.reshape(-1, *tokens.shape[2:])
        cache[f"new_{name}"] = cache[name][new]
    return cache


def _from_jax(torch: Any, x: jax.Array) -> Any:
    return torch.from_dlpack(jax.block_until_ready(x))


def _measure(
    torch: Any, run: Callable[..., None], queries: Any, caches: Sequence[dict[str, Any]]
) -> tuple[list[Any], timing.Times]:
    """Results for the first and the last cache, and times of the chain over all."""
    outputs = [torch.empty_like(queries) for _ in range(2)]
    for out, cache in zip(outputs, (caches[0], caches[-1]), strict=True):
        run(queries, out, cache)
    torch.cuda.synchronize()
    ends = [queries.clone(), torch.empty_like(queries)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, cache in enumerate(caches):
            run(ends[i % 2], ends[(i + 1) % 2], cache)
    times = timing.measure(graph.replay, lambda _: torch.cuda.synchronize(), len(caches))
    return outputs, times


def _indices(torch: Any, case: Case, positions: np.ndarray) -> tuple[Any, Any]:
    """Where each row's `positions` lie among all tokens, row after row, and where rows begin."""
    slots = case.slots(positions) + case.capacity * np.arange(case.batch)[:, None]
    starts = len(positions) * np.arange(case.batch + 1)
    return (
        torch.as_tensor(slots.reshape(-1), dtype=torch.int64, device="cuda"),
        torch.as_tensor(starts, dtype=torch.int32, device="cuda"),
    )


def _decode(torch: Any, case: Case, splits: int) -> Callable[..., None]:
    attend = _sglang("decode_attention").decode_attention_fwd
    indices, starts = _indices(torch, case, case.positions)
    shape = (case.batch, case.spec.num_heads, splits)
    partial = torch.empty((*shape, case.spec.head_dim), dtype=torch.float32, device="cuda")
    lse = torch.empty(shape, dtype=torch.float32, device="cuda")
    counts = torch.full((case.batch,), splits, dtype=torch.int32, device="cuda")

    def run(q: Any, out: Any, cache: dict[str, Any]) -> None:
        attend(
            q, cache["k"], cache["v"], out, starts, indices, partial, lse, counts, splits,
            sm_scale=1.0, k_scale=1.0, v_scale=1.0,
        )  # fmt: skip

    return run


def _extend(torch: Any, case: Case) -> Callable[..., None]:
    attend = _sglang("extend_attention").extend_attention_fwd
    past, starts = _indices(torch, case, case.positions[: -case.tokens])
    _, new_starts = _indices(torch, case, case.positions[-case.tokens :])
    window = -1 if case.spec.window is None else case.spec.window - 1  # keys besides itself

    def run(q: Any, out: Any, cache: dict[str, Any]) -> None:
        attend(
            q, cache["new_k"], cache["new_v"], out, cache["k"], cache["v"],
            new_starts, starts, past, None, True, None, case.tokens,
            k_scale=1.0, v_scale=1.0, sm_scale=1.0, sliding_window_size=window,
        )  # fmt: skip

    return run
