"""Trains an assistant drafter for a model by distillation:

    python -m carat_jax.training.drafter --target tiny --out DIR

The target first writes texts of its own, from prompts of the corpus (the same text as
`carat_jax.training.tiny` trains on), and the drafter then learns what the target says next, in
these and in the corpus (`carat_jax.training.distillation`). Killed and started again, it goes on
from its last checkpoint. DIR gets what `carat.load_drafter` reads (`config.json`,
`model.safetensors`), `training_log.json` and `training_curve.png`.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from carat_jax import checkpoint
from carat_jax.gemma import Gemma, load
from carat_jax.model import Params
from carat_jax.speculative.drafters.assistant import Assistant
from carat_jax.speculative.drafters.assistant_config import AssistantConfig
from carat_jax.training import log as logs
from carat_jax.training.checkpoints import Checkpoints
from carat_jax.training.corpus import Corpus, documents, read_corpus, standard_library
from carat_jax.training.distillation import Distillation
from carat_jax.training.export import save_drafter
from carat_jax.training.initial import initial_params, suited
from carat_jax.training.loop import Trained, TrainingOptions, measure, train
from carat_jax.training.own_text import Texts, Writer
from carat_jax.training.token_stream import (
    HELD_OUT_WINDOWS,
    held_out_windows,
    spread,
    token_stream,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What is particular to a drafter's training.

    Attributes:
      num_proposals: K, steps of a round that it learns.
      own_texts: windows that the target writes.
      hidden_size, intermediate_size: of the drafter. The defaults make 1.9 MB for the bundled
        model's; Google's have 256 and 2,048 for E2B and E4B, 1,024 and 8,192 for the larger.
      checkpoint_seconds: of training that a killed run may lose.

    Raises:
      ValueError: from the constructor, for a value out of its range.
    """

    num_proposals: int = 4
    own_texts: int = 4096
    hidden_size: int = 96
    intermediate_size: int = 320
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("num_proposals", "own_texts", "hidden_size", "intermediate_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if not self.checkpoint_seconds > 0:
            raise ValueError(f"checkpoint_seconds = {self.checkpoint_seconds}: must be positive")


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module's docstring."""
    parser = _parser()
    given = parser.parse_args(arguments)

    def chosen(kind: type) -> Any:
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{k: v for k, v in vars(given).items() if k in names})

    try:
        options, own = chosen(TrainingOptions), chosen(DrafterOptions)
        corpus = read_corpus(given.corpus)
        # CPUs have no bfloat16 products worth using.
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        gemma = load(given.target, dtype=dtype)
        if gemma.tokenizer is None:
            raise ValueError(f"{given.target} has no tokenizer.json, and text has to be encoded")
        tokenizer = Tokenizer.from_file(str(checkpoint.resolve(given.target) / "tokenizer.json"))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    run(corpus, gemma, tokenizer, options, own, given.out)


def run(
    corpus: Corpus,
    gemma: Gemma,
    tokenizer: Tokenizer,
    options: TrainingOptions,
    own: DrafterOptions,
    out: Path,
) -> dict[str, Any]:
    """From a target to a drafter's folder `out`.

    Args:
      corpus: prompts, and half of the text to train on.
      gemma: the target.
      tokenizer: its own.
      options, own: how to train.
      out: gets the files; "checkpoints" in it is there until the end.

    Returns:
      what `training_log.json` says.

    Raises:
      ValueError: windows too short for a round, or `out` holds checkpoints of another run.
    """
    began = time.perf_counter()
    if options.window <= own.num_proposals + 1:
        raise ValueError(
            f"window = {options.window} is too short for rounds of {own.num_proposals} proposals: "
            "lengthen it"
        )
    shape = AssistantConfig.for_target(
        gemma.config, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size
    )
    settings = {
        "target": gemma.config.to_dict(),
        "corpus": corpus.describe(),
        "options": dataclasses.asdict(options),
        "drafter": dataclasses.asdict(own),
    }
    with Checkpoints(out / "checkpoints", settings, own.checkpoint_seconds) as checkpoints:
        task = make_task(gemma, tokenizer, corpus, options, own, shape, checkpoints.folder)
        shapes = Assistant.abstract(shape).params
        params = initial_params(shapes, shape.text.num_hidden_layers, options.seed)
        params = suited(params, gemma.params)
        print(f"compiling for {jax.devices()[0].device_kind} …", flush=True)
        with logs.progress_bar() as report:
            trained = train(params, task, options, report, checkpoints=checkpoints)
        _save(out, trained.params, shape)
        log = {
            "corpus": settings["corpus"] | {"training_tokens": int(task.stream.tokens.size)},
            "model": {"parameters": sum(x.size for x in jax.tree.leaves(trained.params))},
            "options": settings["options"] | settings["drafter"],
            **logs.environment(),
            **logs.timing(trained, options, time.perf_counter() - began),
            "held_out": _held_out(task, trained),
            "curve": logs.curve(trained),
        }
        logs.write_json(out / "training_log.json", log)
        _plot(out / "training_curve.png", log)
        checkpoints.discard()
    shares = " ".join(f"{share:.2f}" for share in log["held_out"]["own"]["acceptance"])
    print(f"on held-out prompts: {log['held_out']['loss']:.3f} nats from the target, "
          f"acceptance {shares}")  # fmt: skip
    return log


def make_task(
    gemma: Gemma,
    tokenizer: Tokenizer,
    corpus: Corpus,
    options: TrainingOptions,
    own: DrafterOptions,
    shape: AssistantConfig,
    folder: Path,
) -> Distillation:
    """What is to be learned, its texts on the device.

    Args:
      gemma, tokenizer, corpus, options, own: as in `run`.
      shape: of the drafter.
      folder: what the target writes is kept there, and taken from there if it is there already.
    """
    print("text …", flush=True)
    stream, prompts = (
        token_stream(tokenizer, documents(sources.values(), gemma.chat_format), options.window)
        for sources in (corpus.training, corpus.held_out)
    )
    windows, _ = held_out_windows(tokenizer, corpus.held_out, options.window)
    windows = spread(windows)
    writer = Writer(gemma.params, gemma.config, gemma.options, options.window)
    written = writer.write(stream, own.own_texts, options.seed, folder / "own_texts")
    held_out = writer.write(prompts, HELD_OUT_WINDOWS, options.seed + 1, folder / "held_out_texts")
    return Distillation(
        target=gemma.params,
        stream=stream,
        own=jnp.asarray(written.tokens),
        held_out_corpus=Texts(windows.tokens, jnp.zeros_like(windows.counts), windows.counts),
        held_out_own=jax.tree.map(jnp.asarray, held_out),
        config=gemma.config,
        drafter=shape,
        batch=options.batch,
        window=options.window,
        num_proposals=own.num_proposals,
    )


def _save(out: Path, params: Params, shape: AssistantConfig) -> None:
    text = dataclasses.replace(shape.text, dtype="bfloat16")
    saved = dataclasses.replace(shape, text=text)
    save_drafter(out / "model.safetensors", params, saved)
    logs.write_json(out / "config.json", saved.to_dict())


def _held_out(task: Distillation, trained: Trained) -> dict[str, Any]:
    """What the saved weights reach, which are rounded to bfloat16."""
    saved = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), trained.params)
    loss, figures = measure(task, saved)
    lists = jax.tree.map(lambda x: np.asarray(x).tolist(), figures)
    return logs.rounded({"loss": float(loss)} | lists)


def _plot(file: Path, log: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # slow to import, and needed once

    curve = log["curve"]
    measured = [p for p in curve if "held_out_loss" in p]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([p["step"] for p in curve], [p["loss"] for p in curve], label="training")
    left.plot([p["step"] for p in measured], [p["held_out_loss"] for p in measured],
              marker="o", markersize=3, label="held-out prompts")  # fmt: skip
    left.set(xlabel="step", ylabel="KL from the target (nats)", ylim=(0, None))
    for i in range(log["options"]["num_proposals"]):
        shares = [p["held_out_figures"]["own"]["acceptance"][i] for p in measured]
        right.plot([p["step"] for p in measured], shares, marker="o", markersize=3,
                   label=f"proposal {i + 1}")  # fmt: skip
    right.set(xlabel="step", ylabel="accepted, on held-out prompts", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{log['model']['parameters'] / 1e6:.2f} M parameters, {log['device']}, "
                    f"{log['tokens_per_second']:,} tokens/s")  # fmt: skip
    figure.savefig(file, dpi=100)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m carat_jax.training.drafter",
        description="Train an assistant drafter for a model, on the Python standard library's "
        "sources and on what the model makes of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="tiny", help="bundled model, folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder for drafter and log")
    parser.add_argument("--corpus", type=Path, default=standard_library(),
                        help="folder of .py files, like lib/python3.12")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=100.0, help="of training proper")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=TrainingOptions.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=TrainingOptions.weight_decay)
    for field, text in (
        ("num_proposals", "guesses of a round to learn"),
        ("own_texts", "windows that the target writes beforehand"),
        ("hidden_size", "width of the drafter"),
        ("intermediate_size", "width of its MLPs"),
        ("checkpoint_seconds", "of training that a killed run may lose"),
    ):
        default = getattr(DrafterOptions, field)
        parser.add_argument(
            f"--{field.replace('_', '-')}", type=type(default), default=default, help=text
        )
    return parser


if __name__ == "__main__":
    main()
