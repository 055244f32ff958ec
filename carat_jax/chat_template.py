"""A checkpoint's own Jinja chat template, rendered in a sandbox with bounds on work and size."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

# Google's template is 18 KB, and a 262,144-token prompt about 1.2 M characters.
MAX_TEMPLATE_BYTES = 2**20
_MAX_PROMPT_CHARS = 2**24
# Loop steps, calls and the like. Google's template looks back from each message over all before it:
# 1.3 million steps for 1,600 messages. A template that never ends is stopped within seconds.
_MAX_TEMPLATE_STEPS = 3_000_000

# Filters and string methods whose width makes any amount of text in one call.
_PADDING = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})


class ChatTemplate:
    """A chat template, compiled once and rendered in a fresh sandbox each time."""

    def __init__(self, source: str) -> None:
        if (size := len(source.encode("utf-8", "replace"))) > MAX_TEMPLATE_BYTES:
            raise ValueError(
                f"chat template of {size:,} bytes, over the limit of {MAX_TEMPLATE_BYTES:,}"
            )
        sandbox = _Sandbox()
        try:
            tree = _Bounds().visit(sandbox.parse(source))
            self._code: CodeType = sandbox.compile(tree.set_environment(sandbox))
        except Exception as error:
            raise ValueError(f"chat template is not valid: {_one_line(error)}") from error

    def render(self, **variables: Any) -> str:
        sandbox = _Sandbox()
        template = jinja2.Template.from_code(sandbox, self._code, sandbox.globals)
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(**variables):
                pieces.append(piece)
                length += len(piece)
                _check_size(length)
        except Exception as error:  # whatever a template raises is that template's failure
            raise ValueError(f"chat template failed: {_one_line(error)}") from error
        return "".join(pieces)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates, with bounds on work and on sizes.

    Jinja's sandbox keeps a template to the data that it is given; the bounds (see `_Bounds`) stop
    one that goes on or grows without end.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        self._steps = 0
        self.filters = {k: v for k, v in self.filters.items() if k not in _PADDING}
        self.filters |= {"tojson": _to_json, "bounded": self._bounded}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.sandbox.SecurityError(f"operator {operator} is not for chat templates")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                _check_size(len(repeated) * times)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        padding = isinstance(obj, str) and attr in _PADDING
        return not padding and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuses at once; Jinja would let an unsafe attribute pass for an undefined one."""
        raise jinja2.sandbox.SecurityError(f"{type(obj).__name__}.{attribute} is unsafe")

    def wrap_str_format(self, value: Any) -> None:
        """No safer `str.format` in place of the plain one, which is refused like other padding."""
        return None

    @jinja2.pass_context  # so that no call of it is computed at compile time
    def _bounded(self, context: Any, value: Any) -> Any:
        """Counts one step, more for a large value, and refuses an over-large one."""
        size = len(value) if isinstance(value, str | Sequence | Mapping) else 0
        _check_size(size)
        self._steps += 1 + size // 64
        if self._steps > _MAX_TEMPLATE_STEPS:
            raise jinja2.sandbox.SecurityError(f"over {_MAX_TEMPLATE_STEPS:,} steps")
        return value


class _Bounds(jinja2.visitor.NodeTransformer):
    """Sends whatever repeats or grows through the filter `_Sandbox._bounded`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step())
        if node.test is not None:
            node.test = jinja2.nodes.And(_step().node, node.test)
        return node

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.filter = _bounded(node.filter)
        return node

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> list[jinja2.nodes.Node]:
        self.generic_visit(node)
        node.call = node.call.node  # Jinja takes nothing but a bare call here
        return [_step(), node]

    def _visit_value(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Node:
        return _bounded(self.generic_visit(node))

    visit_Add = visit_Mul = visit_Concat = visit_Call = visit_Filter = _visit_value


def _step() -> jinja2.nodes.ExprStmt:
    return jinja2.nodes.ExprStmt(_bounded(jinja2.nodes.Const(True)))


def _bounded(node: jinja2.nodes.Expr | None) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, "bounded", [], [], None, None)


def _check_size(size: int) -> None:
    if size > _MAX_PROMPT_CHARS:
        raise jinja2.sandbox.SecurityError(f"a text or list larger than {_MAX_PROMPT_CHARS:,}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own `tojson`, which escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    return text or type(error).__name__
