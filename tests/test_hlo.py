"""The optimised program of a decode step writes the caches in place: no copy of their size.

A copy of a cache at every step costs more than the step itself at long contexts, and nothing but
the compiled program shows it.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from random_checkpoints import FULL, SLIDING, config_json

from carat_jax import generate
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, abstract_state
from carat_jax.model import forward
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params

B = 2
COMPACT = GemmaConfig.from_dict(
    config_json(
        layer_types=[SLIDING, SLIDING, FULL],
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        head_dim=22,
        global_head_dim=34,
    )
)
PLAIN_AND_BORROWED = GemmaConfig.from_dict(
    config_json(
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        num_kv_shared_layers=2,
        head_dim=22,
        global_head_dim=34,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=96,
    )
)


# --- The programs --------------------------------------------------------------------------------


def step(params, tokens, state, *, config):
    return forward(params, config, tokens, state)


def greedy_loop(params, tokens, state, *, config):
    """Eight decode steps in one while loop."""

    def body(carry):
        i, token, state = carry
        logits, state = forward(params, config, token, state)
        return i + 1, logits.argmax(-1).astype(jnp.int32), state

    return jax.lax.while_loop(lambda carry: carry[0] < 8, body, (0, tokens, state))[1:]


def reads_the_old_cache(params, tokens, state, *, config):
    """A step that looks into a ring as it was, at a place that only the new logits tell."""
    logits, new = forward(params, config, tokens, state)
    old = jnp.take(state.layers[0].k, logits.argmax() % 64, axis=2)
    return logits + old.sum(), new


def turns_the_ring(params, tokens, state, *, config):
    """A step that keeps the newest key first, as a cache without slots would."""
    logits, new = forward(params, config, tokens, state)
    turned = new.layers[0].replace(k=jnp.roll(new.layers[0].k, 1, axis=2))
    return logits, new.replace(layers=(turned, *new.layers[1:]))


@functools.cache
def compiled(
    function: Callable, config: GemmaConfig, T: int, donate: bool = True
) -> jax.stages.Compiled:
    function = functools.partial(function, config=config)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    jitted = jax.jit(function, donate_argnums=2 if donate else ())
    return jitted.lower(abstract_params(config), tokens, state_of(config)).compile()


def state_of(config: GemmaConfig) -> KVState:
    return abstract_state(config, B, 192)


def cache_sizes(config: GemmaConfig) -> set[int]:
    """Numbers of elements that only caches have (the widths above see to the activations)."""
    sizes = {leaf.size for leaf in jax.tree.leaves(state_of(config).layers)}
    assert not sizes & {leaf.size for leaf in jax.tree.leaves(abstract_params(config))}
    return sizes


def cache_bytes(config: GemmaConfig) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state_of(config)))


# --- Reading them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of an HLO computation: element counts of its results, and what it calls."""

    name: str
    opcode: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    fused: str | None


# What yields an array of a cache's size without moving one.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}
WRITES = {"scatter", "dynamic-update-slice"}

HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")


def computations(hlo: str) -> Iterator[tuple[str, dict[str, Instruction], Instruction]]:
    """Name, instructions by name, and root of each computation of a module's text."""
    name, lines, root = "", {}, None
    for text in hlo.splitlines():
        if header := HEADER.match(text):
            name, lines, root = header[1], {}, None
        elif text == "}":
            yield name, lines, root
        elif line := LINE.match(text):
            shapes = re.findall(r"\w+\[([\d,]*)\]", line[3])
            fused = re.search(r"calls=%?([\w.-]+)", line[5]) if line[4] == "fusion" else None
            instruction = Instruction(
                name=line[2],
                opcode=line[4],
                sizes=tuple(math.prod(map(int, filter(None, s.split(",")))) for s in shapes),
                operands=tuple(re.findall(r"%([\w.-]+)", line[5].split(")")[0])),
                fused=fused and fused[1],
            )
            lines[instruction.name] = instruction
            root = instruction if line[1] else root


def moved_caches(hlo: str, sizes: set[int]) -> list[str]:
    """Instructions that produce an array of a cache's size in any way but writing into it."""
    found = {name: (lines, root) for name, lines, root in computations(hlo)}
    assert len(found) > 1, "not the text of an HLO module"
    fused = {line.fused for lines, _ in found.values() for line in lines.values() if line.fused}
    moved = []
    for name, (lines, _) in found.items():
        if name in fused:  # one kernel: what happens within is in registers
            continue
        for line in lines.values():
            if not sizes & set(line.sizes) or line.opcode in FREE | WRITES:
                continue
            if line.opcode == "fusion":
                inner, root = found[line.fused]
                results = [inner[o] for o in root.operands] if root.opcode == "tuple" else [root]
                if all(r.opcode in WRITES for r in results if sizes & set(r.sizes)):
                    continue
            moved.append(f"{name}: {line.name} = {line.opcode}")
    return moved


# --- Tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "function", "T"),
    [
        pytest.param(COMPACT, step, 1, id="T1"),
        pytest.param(COMPACT, step, 4, id="T4"),
        pytest.param(COMPACT, greedy_loop, 1, id="loop"),
        pytest.param(PLAIN_AND_BORROWED, greedy_loop, 1, id="plain-loop"),
    ],
)
def test_a_decode_step_writes_its_caches_in_place(config, function, T):
    program = compiled(function, config, T)
    assert moved_caches(program.as_text(), cache_sizes(config)) == []
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes(config)


def test_the_decode_loop_of_a_generation_writes_its_caches_in_place():
    rows = jax.ShapeDtypeStruct((B,), jnp.int32)
    options = GenerateOptions(max_new_tokens=8)
    controls = generate.Controls.of(options, generate.row_keys(0, B))
    kv = state_of(COMPACT)
    state = generate.DecodeState(kv, token=rows, generated=rows, finish=rows, controls=controls)
    stopped = jax.ShapeDtypeStruct((B,), jnp.bool_)
    program = generate.decode.lower(
        abstract_params(COMPACT), COMPACT, state, jnp.int32(5), stopped, size=8
    ).compile()
    assert moved_caches(program.as_text(), cache_sizes(COMPACT)) == []
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes(COMPACT)


@pytest.mark.parametrize(
    ("function", "donate", "how"),
    [
        (step, False, "copy"),
        (reads_the_old_cache, True, "copy"),
        (turns_the_ring, True, "(concatenate|fusion)"),
    ],
)
def test_a_step_that_moves_a_cache_is_found_out(function, donate, how):
    program = compiled(function, COMPACT, 1, donate)
    moved = moved_caches(program.as_text(), cache_sizes(COMPACT))
    assert any(re.search(f" = {how}$", line) for line in moved), moved
    assert (program.memory_analysis().alias_size_in_bytes == 0) == (not donate)
