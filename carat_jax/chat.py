"""Chat messages to the prompt that Gemma 4 was tuned on, and thinking apart from the answer.

A checkpoint's own template is rendered in a bounded sandbox; a checkpoint without one gets the
built-in format, which writes what Google's own template writes for text and tools.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from carat_jax.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from carat_jax.tokenizer import Tokenizer

_MAX_CONFIG_BYTES = 64 * 2**20

# The two spellings of a role that different clients use come out as one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_OPEN_THINKING, _CLOSE_THINKING = "<|channel>", "<channel|>"


class ChatFormat:
    """Renders a conversation to a prompt string that begins with `<bos>`.

    Messages are those of the OpenAI and Hugging Face chat APIs: `{"role": …, "content": …}` with
    role system (or developer), user, assistant (or model) or tool, and content a string or a list
    of `{"type": "text", "text": …}` parts. An assistant message may hold `tool_calls`; a tool
    message is the result of one of them, a string or (built-in format) a mapping.

    Control tokens that are written out in a message are control tokens of the prompt, as in every
    renderer of this template: strip them from text that is not trusted.
    """

    def __init__(self, template: str | None = None, *, empty_thought: bool) -> None:
        """
        Args:
          template: a Jinja chat template; None for the built-in format.
          empty_thought: whether the built-in format, with thinking off, opens the reply with an
            empty thought: yes for 12B, 26B-A4B and 31B, no for E2B and E4B.

        Raises:
          ValueError: `template` is over 1 MiB or not valid Jinja.
        """
        self._template = None if template is None else ChatTemplate(template)
        self._empty_thought = empty_thought

    @classmethod
    def from_folder(cls, folder: str | Path, empty_thought: bool) -> Self:
        """The chat format of a checkpoint folder.

        `chat_template.jinja` counts first, then `chat_template` in `tokenizer_config.json` (of
        several named ones, "default"), then the built-in format.

        Raises:
          ValueError: a template or configuration that is too large or not valid.
        """
        template: Any = None
        if (path := Path(folder) / "chat_template.jinja").is_file():
            template = _read(path, MAX_TEMPLATE_BYTES)
        elif (path := Path(folder) / "tokenizer_config.json").is_file():
            template = _read_object(path).get("chat_template")
        if isinstance(template, list):  # several named ones: [{"name": …, "template": …}]
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{path}: chat_template is not a string")
        try:
            return cls(template, empty_thought=empty_thought)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for `messages`.

        Args:
          messages: the conversation, oldest first; at least one.
          thinking: let the model think before it answers.
          tools: JSON schemas, `{"type": "function", "function": {"name": …, "description": …,
            "parameters": …}}`.
          add_generation_prompt: end with the opening of the model's turn.

        Raises:
          ValueError: messages or tools of another form, or a template that fails, steps out of
            its sandbox or goes on without end.
        """
        messages = _checked_messages(messages)
        tools = _checked_tools(tools)
        if self._template is None:
            return _built_in(messages, tools, thinking, add_generation_prompt, self._empty_thought)
        return self._template.render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinking,
            bos_token="<bos>",
            eos_token="<eos>",
        )


def split_thinking(tokenizer: Tokenizer, ids: Iterable[int]) -> tuple[str | None, str]:
    """Takes a reply apart: (thinking, answer), both without control tokens.

    `ids` are those that the model generated. Thinking is what stands between `<|channel>thought`
    and `<channel|>`: None without such a block, "" for an empty one, all that there is for one
    that was cut off; several blocks are joined by a blank line. If the first marker is a closing
    one, the prompt had opened the block. A vocabulary without these tokens has no thinking.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    opening, closing = tokenizer.token_id(_OPEN_THINKING), tokenizer.token_id(_CLOSE_THINKING)
    turn_end = tokenizer.token_id("<turn|>")
    thoughts: list[list[int]] = []
    answer: list[int] = []
    current = answer
    for token_id in ids:
        if token_id == opening:
            current = []
            thoughts.append(current)
        elif token_id == closing:
            if not thoughts:
                thoughts, answer = [answer], []
            current = answer
        elif token_id != turn_end:
            current.append(token_id)
    if not thoughts:
        return None, tokenizer.decode(answer)
    texts = [tokenizer.decode(thought).removeprefix("thought").strip() for thought in thoughts]
    return "\n\n".join(filter(None, texts)), tokenizer.decode(answer)


# --- Messages and tools, checked -----------------------------------------------------------------


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies with one spelling of roles, text content as one string, arguments as mappings."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list of mappings, not {type(messages).__name__}: "
            '[{"role": "user", "content": "…"}]'
        )
    if not messages:
        raise ValueError("no messages: at least one is needed")
    checked: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []  # those that a tool message at this place may answer
    for index, message in enumerate(messages):
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be a mapping, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"{where} has role {role!r}; known are {', '.join(_ROLES)}")
        message = {**message, "role": _ROLES[role]}
        if message["role"] != "tool":
            calls = []
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = _checked_calls(message["tool_calls"], where)
            message["tool_calls"] = calls
        message["content"] = _checked_content(message, where)
        if message["role"] == "tool":
            message["name"] = _answered(message, calls, where)
        checked.append(message)
    return checked


def _checked_content(message: Mapping[str, Any], where: str) -> str | Mapping[str, Any]:
    content, role = message.get("content"), message["role"]
    if content is None and message.get("tool_calls"):
        return ""
    if content is None:
        raise ValueError(f'{where} ({role}) has no content; an empty message has content ""')
    if isinstance(content, str) or (role == "tool" and isinstance(content, Mapping)):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(
            f"{where} has content of type {type(content).__name__}; "
            "a string or a list of text parts is needed"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"{where} has a part of type {kind!r}; this engine runs the text model, "
                "so only 'text' parts can be taken"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a text part without text")
        texts.append(part["text"])
    if role == "tool":
        return "".join(texts)
    # Joined as Google's template joins them, so that every template sees a plain string.
    return (" " if role == "system" else "").join(text.strip() for text in texts)


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise ValueError(f"{where}: tool_calls must be a list")
    checked = []
    for call in calls:
        function = _checked_function(call, f"{where}: a tool call")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):  # the OpenAI API carries them as JSON text
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(
                    f"{where}: arguments of the call of {function['name']} are not JSON: {error}"
                ) from error
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"{where}: arguments of the call of {function['name']} must be a mapping"
            )
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _checked_function(entry: Any, where: str) -> Mapping[str, Any]:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'{where} must have the form {{"function": {{"name": "…", …}}}}')
    return function


def _checked_tools(tools: Any) -> list[Mapping[str, Any]]:
    if isinstance(tools, str | Mapping) or not isinstance(tools or [], Sequence):
        raise ValueError(f"tools must be a list of JSON schemas, not {type(tools).__name__}")
    for index, tool in enumerate(tools or []):
        _checked_function(tool, f"tool {index}")
    return list(tools or [])


def _answered(message: Mapping[str, Any], calls: list[dict[str, Any]], where: str) -> str:
    """The name of the function whose result a tool message is."""
    if not calls:
        raise ValueError(f"{where} is a tool result, but no message before it calls a tool")
    call_id, name = message.get("tool_call_id"), message.get("name")
    for call in calls:
        if call_id is not None and call.get("id") == call_id:
            return call["function"]["name"]
    if isinstance(name, str):
        return name
    if len(calls) == 1:
        return calls[0]["function"]["name"]
    raise ValueError(
        f"{where} does not say which of {len(calls)} calls it answers: give it the tool_call_id of "
        "the call, or a name"
    )


# --- The built-in format -------------------------------------------------------------------------


def _built_in(
    messages: list[dict[str, Any]],
    tools: list[Mapping[str, Any]],
    thinking: bool,
    add_generation_prompt: bool,
    empty_thought: bool,
) -> str:
    prompt = ["<bos>"]
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if system is not None or tools or thinking:
        think = "<|think|>\n" if thinking else ""
        declarations = "".join(map(_declaration, tools))
        prompt.append(f"<|turn>system\n{think}{system or ''}{declarations}<turn|>\n")
        messages = messages[1:] if system is not None else messages

    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    in_model_turn = False  # a call leaves the turn open: its result and the answer belong to it
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            prompt.append(_tool_response(message["name"], content))
        elif role == "assistant":
            prompt.append("" if in_model_turn else "<|turn>model\n")
            calls = message.get("tool_calls") or []
            # Thoughts are dropped from history, except in the tool loop that is under way.
            thought = message.get("reasoning") or message.get("reasoning_content")
            if thought and calls and index > last_user:
                prompt.append(f"{_OPEN_THINKING}thought\n{thought}\n{_CLOSE_THINKING}")
            # The model says what it says and then calls; Google's template puts the text of such a
            # message after the results, where the model never saw it.
            prompt.append(_without_thinking(content))
            prompt += [_tool_call(call["function"]) for call in calls]
            in_model_turn = bool(calls)
            if not calls:
                prompt.append("<turn|>\n")
            elif index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                prompt.append("<|tool_response>")  # what the model ends such a turn with
        else:
            prompt.append(f"<|turn>{role}\n{content.strip()}<turn|>\n")
            in_model_turn = False

    if add_generation_prompt and not in_model_turn:
        prompt.append("<|turn>model\n")
        if empty_thought and not thinking:
            prompt.append(f"{_OPEN_THINKING}thought\n{_CLOSE_THINKING}")
    return "".join(prompt)


def _without_thinking(text: str) -> str:
    return re.sub(r"<\|channel>.*?(<channel\|>|\Z)|<channel\|>", "", text, flags=re.S).strip()


def _tool_call(function: Mapping[str, Any]) -> str:
    return f"<|tool_call>call:{function['name']}{_value(function['arguments'])}<tool_call|>"


def _tool_response(name: str, content: str | Mapping[str, Any]) -> str:
    result = content if isinstance(content, Mapping) else {"value": content}
    return f"<|tool_response>response:{name}{_value(result)}<tool_response|>"


def _declaration(tool: Mapping[str, Any]) -> str:
    function = tool["function"]
    name, parameters = function["name"], function.get("parameters")
    fields = [f"description:{_value(function.get('description') or '')}"]
    if parameters:
        type_field = _type_field(parameters, name)
        fields.append(f"parameters:{_braced([*_object_fields(parameters, name), type_field])}")
    return f"<|tool>declaration:{name}{_braced(fields)}<tool|>"


def _property(schema: Any, where: str) -> str:
    """One property of a declaration, `{description:…,…,type:…}`; the order is the template's."""
    type_field = _type_field(schema, where)
    kind = schema["type"].upper()
    fields = []
    if schema.get("description"):
        fields.append(f"description:{_value(schema['description'])}")
    if kind == "STRING" and schema.get("enum"):
        fields.append(f"enum:{_value(schema['enum'])}")
    if kind == "ARRAY" and schema.get("items"):
        fields.append(f"items:{_items(schema['items'], where)}")
    if schema.get("nullable"):
        fields.append("nullable:true")
    if kind == "OBJECT":
        fields += _object_fields(schema, where) or ["properties:{}"]
    return _braced([*fields, type_field])


def _object_fields(schema: Mapping[str, Any], where: str) -> list[str]:
    fields = []
    if schema.get("properties"):
        fields.append(f"properties:{_properties(schema['properties'], where)}")
    if schema.get("required"):
        fields.append(f"required:{_value(schema['required'])}")
    return fields


def _properties(properties: Mapping[str, Any], where: str) -> str:
    return _braced(f"{k}:{_property(v, f'{where}.{k}')}" for k, v in _sorted(properties))


def _items(items: Mapping[str, Any], where: str) -> str:
    fields = []
    for key, value in _sorted(items):
        if key == "properties":
            fields.append(f"properties:{_properties(value, where)}")
        elif key == "type":
            fields.append(_type_field(items, where))
        elif value is not None:
            fields.append(f"{key}:{_value(value, quote_keys=True)}")
    return _braced(fields)


def _type_field(schema: Any, where: str) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(kind, str):
        raise ValueError(
            f"tool parameter {where} has type {kind!r}; the built-in chat format needs one JSON "
            'schema type, such as "string" (and "nullable": true where null may be given)'
        )
    return f"type:{_value(kind.upper())}"


def _value(value: Any, *, quote_keys: bool = False) -> str:
    """A JSON value in Gemma's notation: strings between `<|"|>`, keys bare and sorted."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return _braced(
            f"{_value(key) if quote_keys else key}:{_value(item, quote_keys=quote_keys)}"
            for key, item in _sorted(value)
        )
    if isinstance(value, Sequence):
        return f"[{','.join(_value(item, quote_keys=quote_keys) for item in value)}]"
    raise ValueError(f"{value!r} of type {type(value).__name__} is no JSON value")


def _sorted(mapping: Any) -> list[tuple[str, Any]]:
    """Items in the order of Jinja's `dictsort`, which does not mind case."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"a tool schema has {mapping!r} where it needs a mapping")
    return sorted(mapping.items(), key=lambda item: str(item[0]).lower())


def _braced(fields: Iterable[str]) -> str:
    return "{" + ",".join(fields) + "}"


# --- Files ---------------------------------------------------------------------------------------


def _read(path: Path, limit: int) -> str:
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{path}: {size:,} bytes, over the limit of {limit:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path, _MAX_CONFIG_BYTES))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value
