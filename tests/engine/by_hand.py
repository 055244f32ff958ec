"""A scheduler driven without a thread, step by step, so that a test decides what happens when."""

import scripted_model
import small_model

from carat_jax.batch_run import Row
from carat_jax.engine import Request
from carat_jax.engine.prefix import Past
from carat_jax.engine.scheduler import Scheduler
from carat_jax.gemma import Gemma
from carat_jax.generation import Generation
from carat_jax.prompts import Prompt
from carat_jax.speculative import Drafter, Speculation

# Of all tests. `Gemma.generate` has caches and chunks of these sizes too then, so that it shares
# its compilations with the engine.
CONTEXT, CHUNK = 512, 64


def small_gemma() -> Gemma:
    """The small model; its 96 ids stand for characters, so that it has text."""
    plain = small_model.gemma()
    plain.tokenizer, plain.max_context = scripted_model.TOKENIZER, CONTEXT
    return plain


def scheduler(gemma: Gemma, slots: int, drafter: Drafter | None = None) -> Scheduler:
    """An empty one."""
    return Scheduler(
        gemma.params,
        gemma.config,
        slots=slots,
        max_context=CONTEXT,
        speculation=None if drafter is None else Speculation(drafter),
        prefill_chunk=CHUNK,
    )


def submit(s: Scheduler, gemma: Gemma, prompt: Prompt, **options) -> Request:
    """What `Engine.submit` does."""
    (ids,), asked = gemma.checked([prompt], options, s.max_context)
    request = Request(ids, asked, Row(gemma.tokenizer, asked), lambda generation: generation)
    s.waiting.append(request)
    return request


def work_off(s: Scheduler, most: int = 1000) -> None:
    """Steps until nothing is left to do."""
    for _ in range(most):
        if s.idle:
            return
        s.step()
    raise AssertionError(f"not idle after {most} steps")


def run(s: Scheduler, gemma: Gemma, prompt: Prompt, **options) -> Generation:
    """One request, with the scheduler to itself."""
    request = submit(s, gemma, prompt, **options)
    work_off(s)
    return request.result(timeout=0)


def snapshot(s: Scheduler, ids: list[int]) -> Past:
    """One snapshot, read to its end."""
    future = s.snapshot(ids)
    work_off(s)
    return future.result(timeout=0)
