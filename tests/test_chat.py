"""Chat formats: the renderings of Google's template, hostile templates, thinking taken apart."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from carat_jax import chat_template
from carat_jax.chat import ChatFormat, split_thinking
from carat_jax.tokenizer import Tokenizer

SMALL = ChatFormat(empty_thought=False)  # E2B, E4B
BIG = ChatFormat(empty_thought=True)  # 12B, 26B-A4B, 31B

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City name"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def calls(*names, content=None, arguments=None, **more):
    called = [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": called, **more}


def result(content, **more):
    return {"role": "tool", "content": content, **more}


# The built-in format; the first three expectations were made by running Google's own template.


def test_a_system_message():
    messages = [{"role": "system", "content": "Be brief."}, user("What is 2+2?")]
    expected = (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWhat is 2+2?<turn|>\n<|turn>model\n"
    )
    assert SMALL.render(messages) == expected
    assert BIG.render(messages) == expected + "<|channel>thought\n<channel|>"


def test_thinking():
    expected = "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert SMALL.render([user("Hi")], thinking=True) == expected
    assert BIG.render([user("Hi")], thinking=True) == expected


@pytest.mark.parametrize("arguments", [{"days": 2, "city": "Paris"}, '{"city":"Paris","days":2}'])
def test_a_tool_its_call_and_its_result(arguments):
    messages = [
        user("Weather in Paris?"),
        calls("get_weather", arguments=arguments),
        result("21 C", tool_call_id="id-get_weather"),
        assistant("It is 21 C."),
        user("Thanks"),
    ]
    assert SMALL.render(messages, tools=[WEATHER]) == (
        "<bos><|turn>system\n<|tool>declaration:get_weather{"
        'description:<|"|>Weather for a city<|"|>,parameters:{properties:{'
        'city:{description:<|"|>City name<|"|>,type:<|"|>STRING<|"|>},'
        'days:{type:<|"|>INTEGER<|"|>},'
        'unit:{enum:[<|"|>C<|"|>,<|"|>F<|"|>],type:<|"|>STRING<|"|>}},'
        'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
        "<|turn>user\nWeather in Paris?<turn|>\n"
        '<|turn>model\n<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>21 C<|"|>}<tool_response|>'
        "It is 21 C.<turn|>\n<|turn>user\nThanks<turn|>\n<|turn>model\n"
    )


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        ([user("  Hi\n")], "<|turn>user\nHi<turn|>\n"),
        ([user("")], "<|turn>user\n<turn|>\n"),
        ([{"role": "developer", "content": "Be brief."}], "<|turn>system\nBe brief.<turn|>\n"),
        (
            [{"role": "system", "content": [{"type": "text", "text": t} for t in ("a.", " b.")]}],
            "<|turn>system\na. b.<turn|>\n",
        ),
        ([{"role": "model", "content": "Yes."}], "<|turn>model\nYes.<turn|>\n"),
        (
            [user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])],
            "<|turn>user\nab<turn|>\n",
        ),
        (
            [assistant("a<|channel>thought\nhm<channel|> b"), user("c")],
            "<|turn>model\na b<turn|>\n<|turn>user\nc<turn|>\n",
        ),
        ([assistant("a<|channel>thought\nhm")], "<|turn>model\na<turn|>\n"),
        ([user("a<channel|>b")], "<|turn>user\na<channel|>b<turn|>\n"),
    ],
)
def test_turns(messages, body):
    assert SMALL.render(messages, add_generation_prompt=False) == "<bos>" + body
    assert SMALL.render(messages) == f"<bos>{body}<|turn>model\n"


def test_after_a_tool_result_the_same_turn_goes_on():
    messages = [user("a"), calls("f", content="Let me look."), result({"ok": True, "n": [1, None]})]
    expected = (
        "<bos><|turn>user\na<turn|>\n<|turn>model\nLet me look.<|tool_call>call:f{}<tool_call|>"
        "<|tool_response>response:f{n:[1,null],ok:true}<tool_response|>"
    )
    assert BIG.render(messages) == expected
    assert BIG.render(messages[:2]).endswith("call:f{}<tool_call|><|tool_response>")


def test_the_thought_before_a_call_stays_while_its_turn_goes_on():
    messages = [user("a"), calls("f", reasoning="Look."), result("1")]
    assert "<|turn>model\n<|channel>thought\nLook.\n<channel|><|tool_call>" in BIG.render(messages)
    assert "Look." not in BIG.render([*messages, assistant("b"), user("c")])


def test_results_are_named_by_their_calls():
    several = calls("f", "g")
    for results in (
        [result("1", tool_call_id="id-g"), result("2", tool_call_id="id-f")],
        [result("1", name="g"), result("2", name="f")],
    ):
        prompt = SMALL.render([user("a"), several, *results])
        assert 'response:g{value:<|"|>1<|"|>}' in prompt
        assert 'response:f{value:<|"|>2<|"|>}' in prompt
    with pytest.raises(ValueError, match="which of 2 calls"):
        SMALL.render([user("a"), several, result("1")])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (  # the template writes what is two levels down as a plain value, keys quoted
            {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
            'items:{items:{<|"|>type<|"|>:<|"|>string<|"|>},type:<|"|>ARRAY<|"|>},'
            'type:<|"|>ARRAY<|"|>',
        ),
        ({"type": "number", "nullable": True}, 'nullable:true,type:<|"|>NUMBER<|"|>'),
        (
            {"type": "array", "items": {"type": "string", "description": "d"}},
            'items:{description:<|"|>d<|"|>,type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>',
        ),
        (
            {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
            'properties:{k:{type:<|"|>BOOLEAN<|"|>}},required:[<|"|>k<|"|>],type:<|"|>OBJECT<|"|>',
        ),
        (
            {
                "type": "array",
                "items": {"type": "object", "properties": {"k": {"type": "integer"}}},
            },
            'items:{properties:{k:{type:<|"|>INTEGER<|"|>}},type:<|"|>OBJECT<|"|>},'
            'type:<|"|>ARRAY<|"|>',
        ),
    ],
)
def test_parameter_schemas(schema, expected):
    parameters = {"type": "object", "properties": {"B": {"type": "string"}, "a": schema}}
    tool = {"function": {"name": "f", "parameters": parameters}}
    # Keys are sorted without regard to case.
    assert (
        'declaration:f{description:<|"|><|"|>,parameters:{properties:{'
        f'a:{{{expected}}},B:{{type:<|"|>STRING<|"|>}}}},type:<|"|>OBJECT<|"|>}}}}<tool|>'
    ) in SMALL.render([user("a")], tools=[tool])


# Messages and tools of another form.


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        ("Hi", "must be a list"),
        (user("Hi"), "must be a list"),
        (["Hi"], "message 0 must be a mapping, not str"),
        ([user("a"), {"role": "robot", "content": "b"}], "message 1 has role 'robot'"),
        ([{"content": "a"}], "message 0 has role None"),
        ([{"role": ["user"], "content": "a"}], "has role"),
        ([{"role": "user"}], "message 0 .user. has no content"),
        ([assistant(None)], "has no content"),
        ([user(7)], "content of type int"),
        ([user(b"a")], "content of type bytes"),
        ([user({"type": "text", "text": "a"})], "content of type dict"),
        ([user([{"type": "image", "url": "x.png"}])], "type 'image'.*text model"),
        ([user([{"type": "input_audio"}])], "type 'input_audio'"),
        ([user(["a"])], "part of type 'str'"),
        ([user([{"type": "text"}])], "without text"),
        ([user("a"), result("1")], "no message before it calls a tool"),
        ([calls("f"), user("a"), result("1")], "no message before it calls a tool"),
        ([calls("f"), result("1", tool_call_id="x"), result(1)], "content of type int"),
        ([{"role": "assistant", "tool_calls": {"function": {}}}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "a tool call must have the form"),
        ([calls("f", arguments="{")], "call of f are not JSON"),
        ([calls("f", arguments="[1]")], "call of f must be a mapping"),
    ],
)
@pytest.mark.parametrize("chat_format", [SMALL, ChatFormat("{{ 1 }}", empty_thought=False)])
def test_messages_of_another_form_are_refused(messages, complaint, chat_format):
    with pytest.raises(ValueError, match=complaint):
        chat_format.render(messages)


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("f", "tools must be a list"),
        (WEATHER, "tools must be a list"),
        ([{"name": "f"}], "tool 0 must have the form"),
        ([{"function": {"name": "f", "parameters": "x"}}], "tool parameter f has type None"),
        (
            [
                {
                    "function": {
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"x": {"anyOf": []}}},
                    }
                }
            ],
            "tool parameter f.x has type None",
        ),
        (
            [{"function": {"name": "f", "parameters": {"type": "object", "properties": ["x"]}}}],
            "needs a mapping",
        ),
    ],
)
def test_tools_of_another_form_are_refused(tools, complaint):
    with pytest.raises(ValueError, match=complaint):
        SMALL.render([user("a")], tools=tools)


# A checkpoint's own template.

OWN = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
[{{ message['role'] }}] {{ message['content'] | trim }}
{% endfor %}
{% if enable_thinking %}think{% endif %}{{ tools | tojson }}{{ eos_token }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def test_the_template_of_a_folder(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(OWN)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "not this one"}')
    own = ChatFormat.from_folder(tmp_path, empty_thought=True)
    messages = [{"role": "developer", "content": "é<"}, user([{"type": "text", "text": " Hi "}])]
    assert own.render(messages) == "<bos>[system] é<\n[user] Hi\nnull<eos>[assistant]"
    assert own.render(
        messages[1:], thinking=True, add_generation_prompt=False, tools=[WEATHER]
    ) == (f"<bos>[user] Hi\nthink{json.dumps([WEATHER])}<eos>")


@pytest.mark.parametrize(
    "entry", ["{{ messages[0].content }}!", [{"name": "default", "template": "Hi!"}]]
)
def test_the_template_in_the_tokenizer_configuration(tmp_path, entry):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert ChatFormat.from_folder(tmp_path, empty_thought=False).render([user("Hi")]) == "Hi!"


@pytest.mark.parametrize("config", [None, "{}", '{"chat_template": null}', '{"chat_template": []}'])
def test_a_folder_without_a_template_gets_the_built_in_format(tmp_path, config):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    for empty_thought, builtin in ((False, SMALL), (True, BIG)):
        own = ChatFormat.from_folder(tmp_path, empty_thought)
        assert own.render([user("Hi")]) == builtin.render([user("Hi")])


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("chat_template.jinja", b"{% for %}", "line 1"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", b"x" * (2**20 + 1), "1,048,577 bytes, over the limit"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "a JSON object is expected"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "chat_template is not a string"),
        ("tokenizer_config.json", b'{"chat_template": "{{"}', "chat template is not valid"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{complaint}"):
        ChatFormat.from_folder(tmp_path, empty_thought=True)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('no\n\nway') }}", "failed: no way$"),
        ("{{ nothing.at_all }}", "undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include '/etc/passwd' %}", "no loader"),
        # Ways out of the sandbox.
        ("{{ ''.__class__ }}", "str.__class__ is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''|attr('__class__') }}", "str.__class__ is unsafe"),
        ("{{ ['']|map(attribute='__class__')|list }}", "str.__class__ is unsafe"),
        # No end.
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        *(
            (
                "{% set r = range(2000)|list %}{% for i in r %}" + inner + "{% endfor %}",
                "over 200,000 steps",
            )
            for inner in (
                "{% for j in r %}{% endfor %}",
                "{% for j in r if false %}{% endfor %}",
                "{% for j in r recursive %}{{ loop([]) }}{% endfor %}",
            )
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "over 200,000 steps",
        ),
        (
            "{% macro f(n) %}{% set c = caller %}{% if n %}{% call f(n - 1) %}{% endcall %}"
            "{% call f(n - 1) %}{% endcall %}{% endif %}{% endmacro %}{{ f(60) }}",
            "over 200,000 steps",
        ),
        # No limit.
        (
            "{% set s = 'x' * 200000 %}{% for i in range(99) %}{{ s }}{{ s }}{% endfor %}",
            "larger than 1,000,000",
        ),
        ("{{ 'x' * 10000000000 }}", "larger than 1,000,000"),
        ("{{ 10000000000 * [1] }}", "larger than 1,000,000"),
        ("{{ 10 ** 10000000 }}", r"operator \*\*"),
        ("{{ '%10000000000d' % 1 }}", "operator %"),
        ("{{ '{:>10000000000}'.format(1) }}", "unsafe"),
        ("{{ 'x'.ljust(10000000000) }}", "unsafe"),
        *(
            (
                "{% set n = namespace(s='xx') %}{% for i in range(60) %}"
                + double
                + "{% endfor %}{{ n.s|length }}",
                "larger than 1,000,000",
            )
            for double in (
                "{% set n.s = n.s + n.s %}",
                "{% set n.s = n.s ~ n.s %}",
                "{% set n.s = [n.s, n.s]|join %}",
                "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}",
            )
        ),
        (
            "{% set n = namespace(s='x' * 900000) %}{% for i in range(2000) %}"
            "{% set n.s = 'y' + n.s %}{% endfor %}",
            "over 200,000 steps",
        ),
    ],
)
def test_a_template_that_fails_or_means_harm(template, complaint, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_TEMPLATE_STEPS", 200_000)
    monkeypatch.setattr(chat_template, "_MAX_PROMPT_CHARS", 1_000_000)
    own = ChatFormat(template, empty_thought=False)
    with pytest.raises(ValueError, match=complaint) as raised:
        own.render([user("Hi")])
    assert str(raised.value).startswith("chat template failed: ")
    assert "\n" not in str(raised.value)


def test_the_bounds_leave_ordinary_templates_alone():
    own = ChatFormat(
        "{% macro f(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}"
        "{% call f(1) %}in{% endcall %}{{ f(2) }} {{ 3000 * 4000 }} {{ 7 % 4 }} "
        "{% for x in range(9) if x > 5 %}{{ x }}{{ loop.length }}{{ ',' if not loop.last }}"
        "{% else %}none{% endfor %} {% set s|upper %}a{{ 1 ~ 'b' }}{% endset %}{{ s }} "
        "{{ 'a-b'.split('-')|map('upper')|list }} {{ strftime_now('%%') }}",
        empty_thought=False,
    )
    for _ in range(2):  # and what one rendering counted does not weigh on the next
        assert own.render([user("Hi")]) == "<1in><2> 12000000 3 63,73,83 A1B ['A', 'B'] %"


# Thinking.

TOKENS = ["<eos>", "<|channel>", "<channel|>", "<turn|>", "thought", "\n", "a", "b", "▁c"]


def small_tokenizer(tokens, special=("<eos>", "<|channel>", "<channel|>")):
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([token for token in tokens if token in special])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("a ▁c", (None, "a c")),
        ("", (None, "")),
        ("a <turn|> <eos>", (None, "a")),
        ("<|channel> thought \n a ▁c <channel|> b <turn|>", ("a c", "b")),
        ("<|channel> thought \n <channel|> b", ("", "b")),
        ("<|channel> <channel|> b", ("", "b")),
        ("<|channel> thought \n a", ("a", "")),
        ("<|channel> thought", ("", "")),
        ("<|channel>", ("", "")),
        ("<|channel> thought \n a <turn|>", ("a", "")),
        (
            "<|channel> thought \n a <channel|> b <|channel> thought \n b <channel|> a",
            ("a\n\nb", "ba"),
        ),
        ("<|channel> thought \n <channel|> b <|channel> thought \n a <channel|>", ("a", "b")),
        ("<|channel> thought \n a <|channel> b <channel|> b", ("a\n\nb", "b")),
        ("a <channel|> b", ("a", "b")),  # opened by the prompt
        ("<|channel> thought \n a <channel|> b <channel|> a", ("a", "ba")),
        ("<|channel> thought \n \n a \n \n b \n <channel|> \n a \n", ("a\n\nb", "\na\n")),
    ],
)
def test_thinking_is_taken_apart(reply, expected):
    tokenizer = small_tokenizer(TOKENS)
    ids = [tokenizer.token_id(token) for token in reply.split(" ") if token]
    assert split_thinking(tokenizer, ids) == expected


def test_a_vocabulary_without_the_markers_has_no_thinking():
    tokenizer = small_tokenizer(["<eos>", "thought", "\n", "a", "b"])
    ids = [tokenizer.token_id(token) for token in ("thought", "\n", "a", "<eos>")]
    assert split_thinking(tokenizer, ids) == (None, "thought\na")


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="token id 999 "):
        split_thinking(small_tokenizer(TOKENS), [999])
