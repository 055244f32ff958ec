"""The `carat` command: generate, chat, info, convert, bench."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from carat_jax import checkpoint, compilation_cache, gemma, memory, sharding
from carat_jax.bench import BENCHMARKS, report
from carat_jax.checkpoint.convert import convert
from carat_jax.config import PRESETS, GemmaConfig
from carat_jax.generation import Generation, Piece
from carat_jax.kv_state import state_bytes
from carat_jax.params import num_params, param_bytes
from carat_jax.speculative import NumProposals

ERROR, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Expected errors print one line, no traceback."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a prompt may hold bytes that are no text
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        _find_device()
        args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's prompt goes on a line of its own
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at exit
        return ERROR
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"carat: {error}", file=sys.stderr)
        return ERROR
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "carat: the device is out of memory: choose a smaller model, batch or context "
            "(`carat info MODEL` shows what each takes)",
            file=sys.stderr,
        )
        return ERROR
    return 0


def _find_device() -> None:
    """Raises OSError, in one line, where JAX finds no device to run on."""
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or a bare AssertionError of a missing backend
        reason = str(error).split("\n")[0] or "no such backend"
        raise OSError(
            f"JAX finds no device ({reason}): see JAX_PLATFORMS, or install the CUDA "
            "build with `make setup`"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="carat",
        description="Runs Gemma 4 language models with JAX. A small one comes with the package and "
        "is used\nwhere no other is named.",
        epilog="carat COMMAND --help tells more.\n\nexamples:\n"
        '  carat generate "def "                     continue text with the bundled model\n'
        "  carat chat --model google/gemma-4-E2B-it  talk to a model from the hub\n"
        "  carat info 31b --devices 2                sizes, memory and bandwidth floor\n"
        "  carat convert FOLDER CONVERTED            a checkpoint in the engine's layout\n"
        "  carat bench decode --config 31b           time of a decode step on this device\n"
        "  carat bench serving --rate 2              throughput and latency of many requests\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_generate(commands)
    _add_chat(commands)
    _add_info(commands)
    _add_convert(commands)
    _add_bench(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and prints it as it comes.",
    )
    parser.add_argument("prompt", help='the text to continue; "-" reads it from standard input')
    _add_model(parser)
    _add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=_generate)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talks to a model, one line a turn; an empty line or end of file ends it.",
    )
    _add_model(parser)
    _add_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--thinking", action="store_true", help="let the model think first")
    parser.set_defaults(run=_chat)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="sizes, memory and bandwidth floor of a model",
        description="Shows what a model is, the memory it takes at several context lengths, and "
        "what a decode step must read. Nothing is loaded; of a hub id only the small files are "
        "downloaded.",
    )
    parser.add_argument("model", help="e2b, e4b, 12b, 26b-a4b, 31b, tiny, a folder, or a hub id")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)"
    )
    _add_devices(parser, "plan for a model cut over N devices, which need not be here (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_info)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="safetensors to a checkpoint in the engine's own layout",
        description="Writes a checkpoint in the engine's own layout, which needs no conversion on "
        "loading; --model takes it like any folder.",
    )
    parser.add_argument("source", help="tiny, a folder, or a hub id")
    parser.add_argument("destination", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="type of the weights written (default: the source's)",
    )
    _add_devices(parser, "hold the weights on N devices together meanwhile (default 1)")
    parser.set_defaults(run=_convert)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this device against its floor",
        description="Measures this device, with random weights of the published shapes "
        "(agreement, serving: or with a model). The floor is the time that the device takes to "
        "read what must be read.",
    )
    names = parser.add_subparsers(dest="bench", metavar="NAME", title="benchmarks", required=True)
    for name, module in BENCHMARKS.items():
        text = module.__doc__.split("\n")[0]
        sub = names.add_parser(name, help=text, description=text)
        module.add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
        sub.set_defaults(run=_bench, module=module)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="MODEL",
        help='"tiny" (bundled, the default), a folder, or a hub id',
    )
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="limit for prompt and continuation together, in tokens (default: the model's own)",
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="type to compute in (default: the checkpoint's)",
    )
    _add_devices(parser, "cut the model over N devices (default 1)")


def _add_devices(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--devices", type=int, default=1, metavar="N", help=what)


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "how tokens are chosen",
        "Defaults are the checkpoint's own (generation_config.json), else the most likely token.",
    )
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="stop after N tokens (default 256)"
    )
    group.add_argument(
        "--temperature", type=float, metavar="X", help="higher is more random; 0 = no randomness"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="draw among the K most likely tokens; 0 = all"
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw among the fewest tokens that are this probable together, in (0, 1]",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="draw among tokens at least P times as probable as the likeliest, in [0, 1]",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="another number, another text (default 0)"
    )
    group.add_argument(
        "--drafter",
        metavar="DRAFTER",
        help='guess ahead, for speed: "ngram", "tiny" (for the bundled model), or folder or hub id '
        "of an assistant drafter or of a smaller model with the same vocabulary",
    )
    group.add_argument(
        "--num-proposals",
        type=_num_proposals,
        metavar="K",
        help='tokens guessed at once, or "auto": as many as pay, maybe none (default 4)',
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _options(args: argparse.Namespace, model: gemma.Gemma) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.drafter is not None:
        options["drafter"] = gemma.load_drafter(args.drafter, model)
        if args.num_proposals is not None:
            options["num_proposals"] = args.num_proposals
    elif args.num_proposals is not None:
        raise ValueError("--num-proposals is for a drafter: give --drafter too")
    return options


def _num_proposals(text: str) -> NumProposals:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give an integer or 'auto'") from None


def _load(args: argparse.Namespace) -> gemma.Gemma:
    return gemma.load(
        args.model, max_context=args.max_context, dtype=args.dtype, mesh=_mesh(args.devices)
    )


def _mesh(devices: int) -> Mesh | None:
    return None if devices == 1 else sharding.mesh(model=devices)


def _generate(args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model = _load(args)
    if args.json:
        generation = model.generate(prompt, **_options(args, model))
        print(json.dumps(dataclasses.asdict(generation)))
        _check_finite(generation)
        return
    pieces = model.stream(prompt, **_options(args, model))
    sys.stdout.write(prompt)
    _print_stream(pieces)


def _print_stream(pieces: Iterator[Piece]) -> Generation:
    """Prints text as it comes; returns the whole generation."""
    generation = None
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        generation = piece.generation
    print()
    _check_finite(generation)
    return generation


def _check_finite(generation: Generation) -> None:
    if generation.finish_reason == "non_finite":
        raise ValueError(
            f"the logits of token {generation.non_finite_step} hold NaN or Inf: the "
            "weights are damaged, or overflow in this dtype"
        )


def _chat(args: argparse.Namespace) -> None:
    model = _load(args)
    options = _options(args, model)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        if args.thinking:
            reply = model.chat(messages, thinking=True, **options)
            if reply.thinking:
                print(f"[thinking] {reply.thinking}\n")
            print(reply.text)
        else:
            ids = model.chat_prompt(messages)
            reply = _print_stream(model.stream(ids, **model.chat_options(options)))
        messages.append({"role": "assistant", "content": reply.text})


def _info(args: argparse.Namespace) -> None:
    if args.model.lower() in PRESETS:
        config = GemmaConfig.preset(args.model)
    else:
        try:
            folder = checkpoint.resolve(args.model, weights=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}, or a size: {', '.join(PRESETS)}") from None
        config = GemmaConfig.from_json(folder)
    mesh = sharding.planned(args.devices)
    device = jax.devices()[0]
    bandwidth = memory.READ_BANDWIDTH.get(device.device_kind)
    contexts, limit = [], config.max_position_embeddings
    for context in [n for n in (8192, 32_768, 131_072, 262_144) if n < limit] + [limit]:
        read = memory.step_bytes(config, args.batch, context, mesh)
        contexts.append(
            {
                "context": context,
                "state_bytes": state_bytes(config, args.batch, context, mesh=mesh),
                "total_bytes": memory.memory_estimate(config, args.batch, context, mesh=mesh),
                "read_bytes_per_step": read.total,
                "floor_ms": 1e3 * read.floor_s(bandwidth) if bandwidth else None,
            }
        )
    info = {
        "model": args.model,
        "parameters": num_params(config),
        "weight_bytes": param_bytes(config),
        "devices": args.devices,
        "weight_bytes_per_device": param_bytes(config, mesh),
        "batch": args.batch,
        "device": device.device_kind,
        "read_bandwidth": bandwidth,
        "contexts": contexts,
        "config": dataclasses.asdict(config),
    }
    print(json.dumps(info) if args.json else _info_text(info))


def _info_text(info: dict[str, Any]) -> str:
    c = info["config"]
    full = c["layer_types"].count("full_attention")
    unit, scale = ("GB", 1e9) if info["weight_bytes"] >= 1e9 else ("MB", 1e6)

    def size(count: int) -> str:
        return f"{count / scale:.2f}"

    lines = [
        f"{info['model']}: {info['parameters']:,} parameters, {c['dtype']}, "
        f"{size(info['weight_bytes'])} {unit} of weights",
        f"  layers        {c['num_hidden_layers']} ({c['num_hidden_layers'] - full} sliding with a "
        f"window of {c['sliding_window']}, {full} global)",
        f"  hidden size   {c['hidden_size']}, MLP {c['intermediate_size']}, "
        f"vocabulary {c['vocab_size']:,}",
        f"  heads         {c['num_attention_heads']} query, {c['num_key_value_heads']} KV × "
        f"{c['head_dim']} sliding, {c['num_global_key_value_heads']} KV × "
        f"{c['global_head_dim']} global",
    ]
    if c["num_experts"]:
        lines.append(f"  experts       {c['num_experts']}, {c['top_k_experts']} for each token")
    columns = ["context", f"KV state {unit}", f"weights + state {unit}", f"read {unit}/step"]
    names = ["state_bytes", "total_bytes", "read_bytes_per_step"]
    rows = [[f"{row['context']:,}", *(size(row[n]) for n in names)] for row in info["contexts"]]
    if info["read_bandwidth"]:
        columns.append("floor ms/step")
        for cells, row in zip(rows, info["contexts"], strict=True):
            cells.append(f"{row['floor_ms']:.2f}")
        told = f"floor: the time to read that once, on the {info['device']} found here"
    else:
        told = f"floor: unknown, the read bandwidth of this device ({info['device']}) is not listed"
    batch = f"\nbatch {info['batch']}"
    if (n := info["devices"]) > 1:
        lines.append(
            f"  on {n} devices  {size(info['weight_bytes_per_device'])} {unit} of weights each"
        )
        batch += f", on each of {n} devices"
    return "\n".join([*lines, f"{batch}:", report.table(columns, rows), told])


def _convert(args: argparse.Namespace) -> None:
    mesh = _mesh(args.devices)
    convert(checkpoint.resolve(args.source), args.destination, dtype=args.dtype, mesh=mesh)
    print(f"wrote {args.destination}: carat generate … --model {args.destination}")


def _bench(args: argparse.Namespace) -> None:
    compilation_cache.enable()
    result = args.module.run(args)
    print(args.module.table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
