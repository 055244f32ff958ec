"""Many random requests through an engine of the bundled model: none lost, none mixed up.

    python tests/engine/soak.py --requests 2000 [--slots 4] [--drafter tiny | ngram] [--seed 0]

Prompts are cuts of one text and of each other's conversations, so that pasts are reused; a part of
the requests is cancelled at a random time. Every finished request must have the tokens that
`Gemma.generate` gives its prompt alone. Arrays on the device must never take more than the states
that the engine's docstring counts, and come back to where they were; the process's memory must
hardly grow. Exit status 1 if not.
"""

import argparse
import gc
import itertools
import resource
import sys
import time
from collections import Counter

import jax
import numpy as np

import carat_jax as carat
from carat_jax.engine import Cancelled, Engine, Request
from carat_jax.kv_state import state_bytes

LENGTHS = (1, 60, 127, 128, 129, 191, 192, 193, 250, 380)  # W is 128, the rings have 192 slots
KINDS = ({}, {"temperature": 0.8, "top_k": 40, "seed": 5, "logprobs": 2})
MOST = 24  # new tokens
CONTEXT = 1024
GROWTH = 200e6  # bytes of the process; of compiling for a mixture that comes late, say


def main() -> int:
    """Runs and prints the summary; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--drafter", help="tiny or ngram; none by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="submit no longer")
    arguments = parser.parse_args()

    gemma = carat.load("tiny", dtype="float32", max_context=CONTEXT, progress=False)
    drafter = arguments.drafter and carat.load_drafter(arguments.drafter, gemma)
    draw = np.random.default_rng(arguments.seed)
    expected = alone(gemma, draw)
    with engine(gemma, arguments.slots, drafter) as warm:  # what stays compiled counts as before
        collect(warm.submit(list(p), max_new_tokens=MOST, **KINDS[k]) for p, k in expected)
    gc.collect()
    before, peak = live(), peak_memory()
    # Of the slots, one being read, one being moved; and a quarter of one for all that is small.
    room = (arguments.slots + 2.25) * state_bytes(gemma.config, 1, CONTEXT)

    began, counts, most = time.perf_counter(), Counter(), before
    with engine(gemma, arguments.slots, drafter) as running:
        pending: list[tuple[Request, list[int]]] = []
        for _ in range(arguments.requests):
            if time.perf_counter() - began > arguments.seconds:
                break
            prompt, kind = list(expected)[draw.integers(len(expected))]
            n = int(draw.integers(1, MOST + 1))
            request = running.submit(list(prompt), max_new_tokens=n, **KINDS[kind])
            pending.append((request, expected[prompt, kind][:n]))
            counts["submitted"] += 1
            if draw.random() < 0.2:
                pending[draw.integers(len(pending))][0].cancel()
            if draw.random() < 0.3:
                time.sleep(draw.exponential(0.02))
            most = max(most, live())
            if len(pending) > 50:
                judge(pending[:25], counts)
                del pending[:25]
        judge(pending, counts)
    del running, pending, request
    seconds = time.perf_counter() - began
    gc.collect()
    after = live()
    grown = peak_memory() - peak

    print(
        f"{counts['submitted']} requests in {seconds:.0f} s, slots {arguments.slots}, "
        f"drafter {arguments.drafter}: {counts['equal']} finished as alone, "
        f"{counts['cancelled']} cancelled, {counts['mixed up']} mixed up, {counts['lost']} lost"
    )
    print(
        f"live arrays: {before / 1e6:.2f} MB before, at most {most / 1e6:.2f} while running "
        f"({(before + room) / 1e6:.2f} allowed), {after / 1e6:.2f} after; "
        f"peak memory of the process: {peak / 1e6:.0f} MB before, {grown / 1e6:.0f} more after "
        f"({GROWTH / 1e6:.0f} allowed)"
    )
    sound = not (counts["mixed up"] or counts["lost"])
    sound &= before < most <= before + room and after <= before and grown <= GROWTH
    return 0 if sound else 1


def engine(gemma: carat.Gemma, slots: int, drafter: carat.speculative.Drafter | None) -> Engine:
    """With chunks that the longer prompts do not fit into."""
    return Engine(gemma, slots=slots, max_context=CONTEXT, drafter=drafter, prefill_chunk=64)


def alone(
    gemma: carat.Gemma, draw: np.random.Generator
) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Prompts and kinds with the tokens that each gets alone: beginnings, turns that follow them,
    and texts that part from them."""
    vocabulary, made = gemma.config.vocab_size, {}
    base = draw.integers(3, vocabulary, max(LENGTHS)).tolist()
    for length, kind in itertools.product(LENGTHS, range(len(KINDS))):
        prompt = base[:length]
        for _ in range(3):
            out = gemma.generate(prompt, max_new_tokens=MOST, **KINDS[kind]).tokens
            made[tuple(prompt), kind] = out
            turn = draw.integers(3, vocabulary, int(draw.integers(1, 30))).tolist()
            cut = int(draw.integers(0, len(out) + 1))
            prompt = [*prompt, *out[:cut], *turn]
    return made


def judge(pending: list[tuple[Request, list[int]]], counts: Counter) -> None:
    """Waits for requests and compares them."""
    for request, tokens in pending:
        try:
            out = request.result(timeout=120).tokens
            counts["equal" if out == tokens else "mixed up"] += 1
        except Cancelled as error:
            part = error.generation.tokens if error.generation else []
            counts["cancelled" if part == tokens[: len(part)] else "mixed up"] += 1
        except TimeoutError:
            counts["lost"] += 1


def collect(requests) -> None:
    """Waits for requests."""
    for request in list(requests):
        request.result(timeout=300)


def live() -> int:
    """Bytes of arrays on the device."""
    return sum(array.nbytes for array in jax.live_arrays())


def peak_memory() -> int:
    """Bytes of this process, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
