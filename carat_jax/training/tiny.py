"""Trains the bundled model from nothing but a Python installation:

    python -m carat_jax.training.tiny --out DIR

or a smaller one that can be its drafter, since it has the same tokenizer:

    python -m carat_jax.training.tiny --tokenizer tiny --layers 4 --hidden-size 64 --out DIR

The text is the installation's standard library (`carat_jax.training.corpus` says what of it and
under which licence), a tokenizer is made from it first unless one is given, and the model is Gemma
4 31B's architecture in small. DIR gets what `carat.load` reads (`config.json`,
`generation_config.json`, `tokenizer.json`, `model.safetensors`), `training_log.json` and
`training_curve.png`.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from carat_jax import checkpoint
from carat_jax.chat import ChatFormat
from carat_jax.config import GemmaConfig
from carat_jax.params import abstract_params, num_params
from carat_jax.training import log as logs
from carat_jax.training.corpus import Corpus, documents, read_corpus, standard_library
from carat_jax.training.export import save_weights
from carat_jax.training.initial import initial_params
from carat_jax.training.loop import TrainingOptions, train
from carat_jax.training.next_token import NextToken, window_losses
from carat_jax.training.token_stream import Windows, held_out_windows, spread, token_stream
from carat_jax.training.tokenizer_training import train_tokenizer

# What 31B has, in small: 5 local layers to a global one, twice as many query heads as local KV
# heads and several times as many as global ones, global heads twice as wide.
CONFIG = GemmaConfig(
    vocab_size=4096,
    hidden_size=160,
    intermediate_size=320,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=32,
    global_head_dim=64,
    sliding_window=128,
    layer_types=("sliding_attention",) * 5 + ("full_attention",)
    + ("sliding_attention",) * 5 + ("full_attention",),
    attention_k_eq_v=True,
    max_position_embeddings=8192,
)  # fmt: skip

GENERATION_CONFIG = {
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": [1, 106, 50],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
}


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module's docstring."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        options = TrainingOptions(
            seconds=given.seconds,
            batch=given.batch,
            window=given.window,
            learning_rate=given.learning_rate,
            weight_decay=given.weight_decay,
        )
        config = of_size(given.layers, given.hidden_size, given.intermediate_size)
        tokenizer = None
        if given.tokenizer is not None:
            tokenizer, vocab_size = _tokenizer_of(given.tokenizer)
            config = dataclasses.replace(config, vocab_size=vocab_size)
        corpus = read_corpus(given.corpus)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    run(corpus, options, given.out, config, tokenizer)


SIZES = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size")  # in the log


def of_size(layers: int, hidden_size: int, intermediate_size: int) -> GemmaConfig:
    """The bundled model's configuration in another size; its layers end as those do.

    Raises:
      ConfigError: a size below one, or too many layers.
    """
    return dataclasses.replace(
        CONFIG,
        num_hidden_layers=layers,
        layer_types=(CONFIG.layer_types * layers)[-layers:],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def run(
    corpus: Corpus,
    options: TrainingOptions,
    out: Path,
    config: GemmaConfig = CONFIG,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """From text to a checkpoint folder.

    Args:
      corpus: what to train and to measure on.
      options: how to train.
      out: gets the files.
      config: of the model.
      tokenizer: with config.vocab_size ids or fewer; None = made from the corpus.

    Returns:
      what `training_log.json` says.

    Raises:
      ValueError: a tokenizer with more ids.
    """
    if tokenizer is not None and tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size():,} ids, vocab_size is "
            f"{config.vocab_size:,}: raise it"
        )
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if tokenizer is None:
        print("tokenizer …", flush=True)
        tokenizer = train_tokenizer(corpus.training.values(), config.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    texts = documents(corpus.training.values(), ChatFormat(empty_thought=True))
    stream = token_stream(tokenizer, texts, options.window)
    held_out, paths = held_out_windows(tokenizer, corpus.held_out, options.window)

    # CPUs have no bfloat16 products worth using.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    compute = dataclasses.replace(config, dtype=dtype)
    task = NextToken(stream, spread(held_out), compute, options.batch, options.window)
    params = initial_params(abstract_params(compute), config.num_hidden_layers, options.seed)
    print(f"compiling for {jax.devices()[0].device_kind} …", flush=True)
    with logs.progress_bar() as report:
        trained = train(params, task, options, report)

    save_weights(out / "model.safetensors", trained.params, config)
    logs.write_json(out / "config.json", config.to_dict())
    logs.write_json(out / "generation_config.json", GENERATION_CONFIG)
    losses = np.asarray(window_losses(trained.params, config, held_out))
    log = {
        "corpus": corpus.describe() | {"training_tokens": int(stream.tokens.size)},
        "model": {
            "parameters": num_params(config),
            **{name: getattr(config, name) for name in SIZES},
        },
        "options": dataclasses.asdict(options),
        **logs.environment(),
        **logs.timing(trained, options, time.perf_counter() - began),
        "held_out": _held_out(losses, held_out, paths, corpus),
        "curve": logs.curve(trained),
    }
    logs.write_json(out / "training_log.json", log)
    _plot(out / "training_curve.png", log)
    print(f"held-out loss {log['held_out']['loss']:.3f} nats per token, "
          f"{log['held_out']['bits_per_byte']:.3f} bits per byte")  # fmt: skip
    return log


def _tokenizer_of(model: str) -> tuple[Tokenizer, int]:
    """The tokenizer of another model, and the size of that model's vocabulary."""
    folder = checkpoint.resolve(model, weights=False)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{model} has no tokenizer.json: leave --tokenizer out, or name "
                                "a model with one")  # fmt: skip
    return Tokenizer.from_file(str(file)), GemmaConfig.from_json(folder).vocab_size


def _held_out(
    losses: np.ndarray, windows: Windows, paths: list[str], corpus: Corpus
) -> dict[str, Any]:
    """What the saved weights, bfloat16, reach on held-out text, as a whole and file by file."""
    counts = np.asarray(windows.counts)
    files = {}
    for path in dict.fromkeys(paths):
        own = np.array(paths) == path
        files[path] = round(float(losses[own].sum() / counts[own].sum()), 4)
    num_bytes = sum(len(text.encode()) for text in corpus.held_out.values())
    return {
        "loss": round(float(losses.sum() / counts.sum()), 4),
        "bits_per_byte": round(float(losses.sum() / math.log(2) / num_bytes), 4),
        "tokens": int(counts.sum()),
        "window": windows.tokens.shape[1] - 1,
        "files": files,
    }


def _plot(file: Path, log: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # slow to import, and needed once

    curve = log["curve"]
    measured = [p for p in curve if "held_out_loss" in p]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p["step"] for p in curve], [p["loss"] for p in curve], label="training")
    axes.plot([p["step"] for p in measured], [p["held_out_loss"] for p in measured],
              marker="o", markersize=3, label="held-out files")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None),
             title=f"{log['model']['parameters'] / 1e6:.1f} M parameters, {log['device']}, "
                   f"{log['tokens_per_second']:,} tokens/s")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m carat_jax.training.tiny",
        description="Train the bundled model, or one like it in another size, on the Python "
        "standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the log")
    parser.add_argument("--corpus", type=Path, default=standard_library(),
                        help="folder of .py files, like lib/python3.12")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="MODEL",
                        help="take this model's tokenizer and vocabulary, to be its drafter "
                        "(default: train one)")  # fmt: skip
    parser.add_argument("--layers", type=int, default=CONFIG.num_hidden_layers,
                        help="the last and every sixth before it are global")  # fmt: skip
    parser.add_argument(
        "--hidden-size", type=int, default=CONFIG.hidden_size, help="width of the residual"
    )
    parser.add_argument("--intermediate-size", type=int, default=CONFIG.intermediate_size,
                        help="width of its MLPs")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=360.0, help="of training proper")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=TrainingOptions.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=TrainingOptions.weight_decay)
    return parser


if __name__ == "__main__":
    main()
