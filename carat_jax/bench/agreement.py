"""Whether speculative decoding chooses the tokens of plain decoding, and where it does not.

Plain decoding makes the tokens. A drafter that knows them proposes them with scripted mistakes, so
that guesses are accepted and rejected at every place of a round, and `Exact` judges: its tokens
are compared.

After a first difference two runs have different contexts and cannot be compared further. So a run
that differs is made once more under `Following`, which emits plain decoding's tokens whatever the
model says, while the log-probabilities tell what it would have chosen. That names every difference,
each after the same context, with the caches as speculation writes them: nothing is read again by
the kernels of prefill.

With a temperature tokens are drawn by keys that hang on the position only, so they are to be equal
too, and random weights say many different ones, where greedy ones repeat the last token. Rounding
then decides more often, since draws are nearly tied more often than logits; of a run that differs
the first difference is named.
"""

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

from carat_jax import checkpoint, generate
from carat_jax.bench import random_model, report
from carat_jax.bench.following import Following
from carat_jax.bench.speculative import ACCEPTANCE
from carat_jax.config import GemmaConfig
from carat_jax.gemma import Gemma, load
from carat_jax.generation import Generation
from carat_jax.kv_state import abstract_state
from carat_jax.options import GenerateOptions
from carat_jax.speculative import Forced, Scripted, Speculation, check_speculation

TEXT, IDS = "def main(", "64"  # the default --prompt of a model, and of random weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench agreement`."""
    random_model.add_model(parser)
    parser.add_argument(
        "--tokens", type=int, default=2000, metavar="N", help="to compare (default 2000)"
    )
    parser.add_argument(
        "--prompt",
        nargs="+",
        metavar="TEXT|N",
        help="one or more: a text, or how many random ids "
        f"(default {TEXT!r} for a model, {IDS} for random weights)",
    )
    parser.add_argument(
        "--num-proposals",
        nargs="+",
        type=int,
        default=[4],
        metavar="K",
        help="one or more numbers of tokens guessed at once (default 4); each compiles a program",
    )
    parser.add_argument(
        "--acceptance",
        nargs="+",
        type=float,
        default=list(ACCEPTANCE),
        metavar="X",
        help="share of the rounds in which each guess is right (default .92 .78 .67 .57); those of "
        "a larger K beyond the shares are wrong. Each K also runs with all guesses wrong",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="draw the tokens, and name only a run's first difference (default 0: greedy)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compares for each prompt, K and script.

    Fields of a row that do not speak for themselves: `distinct` tokens of the plain run, few where
    it went in a circle; its `least_gap` between the logits of the two most likely tokens, and the
    `gap` at each of the `differences` (None for drawn tokens, which it says nothing about);
    `equal`, the tokens without a difference, or of drawn ones those before the first.
    """
    random_model.check_model(args)
    GenerateOptions(temperature=args.temperature)  # for what it refuses
    if args.config:
        config = GemmaConfig.preset(args.config)
    else:
        config = GemmaConfig.from_json(checkpoint.resolve(args.model, weights=False))
    prompts = _prompts(args, config)
    scripts = _scripts(args, config)
    name = args.config or args.model
    report.say(f"{name}: weights")
    if args.config:
        model = random_model.gemma(args.config, args.dtype)
    else:
        model = load(args.model, dtype=args.dtype)
    model.checked(prompts, {"max_new_tokens": args.tokens})  # texts, now that there is a tokenizer
    rows = []
    for prompt in prompts:
        shown = prompt if isinstance(prompt, str) else f"{len(prompt)} ids"
        report.say(f"{shown}: plain")
        plain = _generate(model, prompt, args.tokens, args.temperature)
        row = {
            "model": name,
            "dtype": model.config.dtype,
            "prompt": shown,
            "temperature": args.temperature,
            "tokens": args.tokens,
            "distinct": len(set(plain.tokens)),
            "least_gap": min(map(_gap, plain.top_logprobs)),
        }
        for K in args.num_proposals:
            for shares, right in scripts:
                drafter = Scripted.of(np.array([plain.tokens]), right)
                compared = _compare(model, prompt, args.temperature, plain, drafter, K)
                report.say(f"K {K}, acceptance {shares}: {compared['equal']} equal")
                rows.append(row | {"proposals": K, "acceptance": shares} | compared)
    return {"benchmark": "agreement", "environment": report.environment(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """A line for each run; below, one for each difference, positions counted from 0."""
    run = {"prompt": "prompt", "proposals": "K", "acceptance": "acceptance"}
    found = {"acceptance_length": "tokens a round", "tokens": "tokens", "equal": "equal"}
    columns = run | found | {"distinct": "distinct tokens", "least_gap": "smallest gap"}
    rows = [[row[key] for key in columns] for row in result["rows"]]
    text = report.table(list(columns.values()), rows)
    differences = [
        [*(row[key] for key in run), *difference.values()]
        for row in result["rows"]
        for difference in row["differences"]
    ]
    heads = [*run.values(), "position", "plain", "speculative", "gap of plain"]
    return text + ("\n\n" + report.table(heads, differences) if differences else "")


def _prompts(args: argparse.Namespace, config: GemmaConfig) -> list[str | list[int]]:
    """Texts as they are, for a number as many ids; checks them and --tokens."""
    limit = config.max_position_embeddings
    prompts: list[str | list[int]] = []
    for given in args.prompt or [IDS if args.config else TEXT]:
        is_text = not given.isdecimal()
        if is_text and args.config:
            raise ValueError(f"--prompt {given!r} is a text: random weights take a number of ids")
        n = 1 if is_text else int(given)
        if min(args.tokens, n) < 1 or n + args.tokens > limit:
            raise ValueError(
                f"--prompt {given} and --tokens {args.tokens:,}: from 1 on, together at most "
                f"{limit:,}"
            )
        prompts.append(given if is_text else random_model.random_ids(config, 1, n)[0].tolist())
    return prompts


def _scripts(
    args: argparse.Namespace, config: GemmaConfig
) -> list[tuple[list[float], int | list[float]]]:
    """Shares, and for `Scripted` how probable it is that each guess is right; checks every K."""
    # A guess is looked at only where those before it were right.
    right = Forced.at_rates(args.acceptance).probabilities.tolist()
    drafter = Scripted.of(np.zeros((1, 1), np.int32), right)
    slots = generate.capacity(args.tokens, config.max_position_embeddings)
    for K in args.num_proposals:
        check_speculation(Speculation(drafter, K), abstract_state(config, 1, slots), config)
    return [(args.acceptance, right), ([0.0], 0)]


def _compare(
    model: Gemma,
    prompt: str | list[int],
    temperature: float,
    plain: Generation,
    drafter: Scripted,
    K: int,
) -> dict[str, Any]:
    """The fields of a row that hang on speculation."""
    count, speculation = len(plain.tokens), {"drafter": drafter, "num_proposals": K}
    made = _generate(model, prompt, count, temperature, **speculation)
    chosen = {}
    if made.tokens != plain.tokens:
        first = [a == b for a, b in zip(plain.tokens, made.tokens, strict=True)].index(False)
        chosen[first] = made.tokens[first]
    if chosen and temperature == 0:
        known = jnp.asarray(plain.tokens, jnp.int32), jnp.int32(plain.prompt_tokens)
        speculation["acceptance"] = Following(*known)
        followed = _generate(model, prompt, count, temperature, **speculation)
        if followed.tokens != plain.tokens:
            raise RuntimeError("a run that was to follow plain decoding did not")
        # Of equals the first, as greedy decoding takes it.
        best = [max(top, key=lambda i: (top[i], -i)) for top in followed.top_logprobs]
        others = {i: token for i, token in enumerate(best) if token != plain.tokens[i]}
        chosen = others | chosen  # the first as it was: to follow is another program
    differences = [
        {
            "position": i,  # 0: the first token after the prompt
            "plain": plain.tokens[i],
            "speculative": chosen[i],
            "gap": _gap(plain.top_logprobs[i]) if temperature == 0 else None,
        }
        for i in sorted(chosen)
    ]
    return {
        "acceptance_length": round(made.stats.acceptance_length, 2),
        "equal": count - len(differences) if temperature == 0 else min(chosen, default=count),
        "differences": differences,
    }


def _generate(
    model: Gemma, prompt: str | list[int], count: int, temperature: float, **speculation: Any
) -> Generation:
    """`count` tokens, past any stop id, with the two most likely of each position."""
    options = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    options |= {"stop_token_ids": (), "suppress_tokens": (), "logprobs": 2}
    made = model.generate(prompt, max_new_tokens=count, **options, **speculation)
    if len(made.tokens) < count:
        raise ValueError(f"the logits of token {len(made.tokens)} hold NaN or Inf")
    return made


def _gap(top: dict[int, float]) -> float:
    """Between the logits of the two most likely tokens."""
    first, second = sorted(top.values(), reverse=True)[:2]
    return round(first - second, 6)
