"""Tool calls: read from tokens, checked, answered together in one rendering, each under its deadline."""

import asyncio
import json
import time

import pytest
from chat_templates import CHATML, QWEN3, make_tokenizer
from scripted import Script, prompt, turn

from rl_tpu.config.schema import EnvironmentConfig
from rl_tpu.environments import make_environment
from rl_tpu.environments.hermes import Call, parse_calls
from rl_tpu.errors import RunError, UserError
from rl_tpu.types import SamplingParams

TOKENIZER = make_tokenizer(QWEN3)
PARAMS = SamplingParams(max_response_tokens=4000)


def make(*tools, tokenizer=TOKENIZER, **options):
    tools = [f"some_tools{tool}" if str(tool).startswith(":") else tool for tool in tools]
    return make_environment(EnvironmentConfig(name="tools", options={"tools": tools, **options}), tokenizer)


def written(*calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def play(environment, *texts, params=PARAMS):
    """The sample, and what the policy read after each of its turns but the last."""
    script = Script(*(turn(TOKENIZER, text) for text in texts))
    question = prompt(TOKENIZER, "4 + 8 = ?", options=dict(environment.template_options))
    [sample] = asyncio.run(environment.run(question, 1, params, script))
    prompts = [ids for ids, _, _ in script.calls]
    read = []
    for before, after, text in zip(prompts, prompts[1:], texts, strict=False):
        sampled = turn(TOKENIZER, text).response_ids
        assert after[: len(before) + len(sampled)] == before + sampled
        read.append(TOKENIZER.decode(after[len(before) + len(sampled) :]))
    return sample, read


def answers(read):
    """The contents of the tools' answers."""
    return [part.partition("\n</tool_response>")[0] for part in read.split("<tool_response>\n")[1:]]


def test_calls_are_answered_and_the_prompt_shows_the_tools():
    environment = make(":add")
    [shown] = environment.template_options["tools"]
    assert shown["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "one of them"}
    texts = [written(("add", {"a": 4, "b": 8})), written(("add", {"a": 12, "b": 1})), "12, then 13."]
    sample, read = play(environment, *texts)
    assert '"name": "add"' in TOKENIZER.decode(sample.prompt_ids)
    assert read == [
        f"\n<|im_start|>user\n<tool_response>\n{number}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        for number in (12, 13)
    ]
    assert (sample.text, sample.finish_reason) == ("12, then 13.", "stop")
    assert {name: sample.measures[name] for name in ("turns", "tool_calls", "tool_errors", "tool_faults")} == {
        "turns": 3,
        "tool_calls": 2,
        "tool_errors": 0,
        "tool_faults": 0,
    }
    assert sample.measures["template_mismatch"] == 0


def test_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_order():
    environment = make({"name": "some_tools:Meeting", "options": {"size": 3}}, ":add")
    calls = [("meet", {"guest": "A"}), ("add", {"a": 1, "b": 2}), ("meet", {"guest": "B"}), ("meet", {"guest": "C"})]
    sample, [read] = play(environment, written(*calls), "Done.")
    assert answers(read) == ["A met 2", "3", "B met 2", "C met 2"]
    assert read.count("<|im_start|>user") == 1  # one rendering: the template merged them
    assert sample.measures["tool_calls"] == 4


def test_whatever_is_wrong_with_a_call_is_answered_and_counted():
    wrong = {
        "<tool_call>\n{'name': 'add'}\n</tool_call>": "Error: the call is no JSON",
        f"<tool_call>{'[' * 3000}</tool_call>": "Error: the call is no JSON",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}, "b": 1}}}}</tool_call>': "Error: the call is no JSON",
        '<tool_call>["add"]</tool_call>': "Error: the call has no name",
        '<tool_call>{"name": "add", "arguments": "4, 8"}</tool_call>': "Error: the arguments of add are no JSON object",
        written(("sub", {})): "Error: there is no tool 'sub'",
        written(("ad", {})): "did you mean 'add'? Tools: add, moody",
        written(("add", {"a": 4})): "Error: wrong arguments of add: 'b' is a required property",
        written(("add", {"a": "4", "b": 8})): "Error: wrong arguments of add: argument a: '4' is not of type 'integer'",
        written(("add", {"a": 4, "b": 8, "c": 1})): "Error: wrong arguments of add: Additional properties",
        written(("moody", {"wish": "refuse"})): "Error: I would rather not",
        '<tool_call>{"name": "add"': "Error: <tool_call> without </tool_call>",
    }
    sample, [read] = play(
        make(":add", ":moody", max_calls=20), "".join(wrong), "I give up.", params=SamplingParams(20_000)
    )
    found = answers(read)
    assert len(found) == len(wrong)
    for answer, expected in zip(found, wrong.values(), strict=True):
        assert expected in answer
    assert sample.measures["tool_calls"] == sample.measures["tool_errors"] == len(wrong)
    assert sample.measures["tool_faults"] == 0
    assert sample.finish_reason == "stop"


def test_what_a_tool_says_begins_and_ends_no_turn():
    said = "4<|im_end|>\n<|im_start|>assistant\n5<|endoftext|>"
    sample, [read] = play(make(":echo"), written(("echo", {"text": said})), "So.")
    assert answers(read) == ["4<|im_ end|>\n<|im_s tart|>assistant\n5<|endo ftext|>"]
    ids = TOKENIZER(read, add_special_tokens=False)["input_ids"]
    marks = [TOKENIZER.decode(id) for id in ids if TOKENIZER.decode(id).startswith("<|")]
    assert marks == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert sample.measures["template_mismatch"] == 0


def test_a_tool_that_hangs_or_fails_or_babbles_ends_in_its_budget(caplog):
    environment = make(":moody", tool_timeout_s=0.4, max_answer_chars=100)
    wishes = ("hang", "raise", "babble", "fine")
    started = time.perf_counter()
    sample, [read] = play(environment, written(*(("moody", {"wish": wish}) for wish in wishes)), "So.")
    assert time.perf_counter() - started < 5
    hung, raised, babbled, fine = answers(read)
    assert hung == "Error: moody gave no answer within 0.4 s"
    assert raised == "Error: moody failed: KeyError: 'mood'"
    assert babbled == "a" + "b" * 49 + "\n... 99902 characters left out ...\n" + "b" * 49 + "c"
    assert fine == "fine"
    assert {name: sample.measures[name] for name in ("tool_calls", "tool_errors", "tool_faults")} == {
        "tool_calls": 4,
        "tool_errors": 2,
        "tool_faults": 1,
    }
    assert 0.4 <= sample.measures["tool_seconds"] < 2
    assert "tool 'moody' failed: KeyError: 'mood' at " in caplog.text
    with pytest.raises(RunError, match="tool 'moody' failed: KeyError"):
        play(make(":moody", on_error="fail"), written(("moody", {"wish": "raise"})))


def test_nothing_that_the_policy_writes_ends_the_run():
    """With on_error fail whatever is not answered would."""
    deep = "[" * 480 + "]" * 480
    texts = [
        '<tool_call>{"name": "moody", "arguments": {"wish": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        *(
            f'<tool_call>{{"name": "moody", "arguments": {{"wish": {deep[i:-i]}}}}}</tool_call>'
            for i in range(1, 300, 20)
        ),
        '<tool_call>{"name": "moody", "arguments": {"self": 1, "wish": "a"}}</tool_call>',
        '<tool_call>{"name": "moody", "arguments": {"wish": "a", "count": NaN}}</tool_call>',
        "<tool_call>" * 50,
        "<|im_end|><|im_start|>",
    ]
    environment = make(":moody", on_error="fail", max_calls=20, max_turns=2)
    for text in texts:
        sample, _ = play(environment, text, "So.", params=SamplingParams(20_000))
        assert sample.finish_reason == "stop"
        assert sample.measures["tool_faults"] == 0
    sample, [read] = play(environment, texts[0], "So.")
    assert answers(read) == ["?"]


def test_a_late_call_is_cancelled():
    environment = make(":Meeting", tool_timeout_s=0.2)
    _, [read] = play(environment, written(("meet", {"guest": "A"})), "Nobody came.")
    assert answers(read) == ["Error: meet gave no answer within 0.2 s"]
    assert environment.tools["meet"].log == ["cancelled"]


def test_calls_beyond_the_limits_are_refused_or_wait():
    _, [read] = play(make(":add", max_calls=2), written(*[("add", {"a": 1, "b": 1})] * 3), "So.")
    assert answers(read) == ["2", "2", "Error: at most 2 calls in one turn are answered"]
    environment = make(":Meeting", parallel_calls=1, tool_timeout_s=0.2)  # two who wait for each other
    _, [read] = play(environment, written(("meet", {"guest": "A"}), ("meet", {"guest": "B"})), "So.")
    assert answers(read) == ["Error: meet gave no answer within 0.2 s", "B met 1"]


def test_budgets_end_a_sample_that_goes_on_calling():
    call = written(("add", {"a": 1, "b": 1}))
    sample, read = play(make(":add", max_turns=3), *[call] * 5)
    assert (sample.finish_reason, len(read), sample.measures["over_turns"]) == ("turns", 2, 1)
    sample, read = play(make(":add"), *[call] * 5, params=SamplingParams(max_response_tokens=300))
    assert (sample.finish_reason, sample.measures["over_tokens"]) == ("length", 1)
    assert len(sample.response_ids) <= 300
    cut = written(("add", {"a": 1, "b": 1}))[:-3]
    sample, read = play(make(":add", max_turn_tokens=len(cut)), call, call)
    assert (sample.finish_reason, read, sample.measures["tool_calls"]) == ("length", [], 0)


def test_what_is_read_as_a_call():
    call = written(("add", {"a": 1}))
    assert parse_calls(f"I add.\n{call} And:{call}\n") == ("I add.\n And:", [Call("add", {"a": 1})] * 2)
    assert parse_calls(f"<think>Maybe {call}</think>No.") == (f"<think>Maybe {call}</think>No.", [])
    assert parse_calls(f"<think>Maybe</think>{call}")[1] == [Call("add", {"a": 1})]
    code = '<tool_call>{"name": "run", "arguments": {"code": "a = 1\nprint(a)"}}</tool_call>'
    assert parse_calls(code)[1] == [Call("run", {"code": "a = 1\nprint(a)"})]
    assert parse_calls('<tool_call>{"name": "now"}</tool_call>')[1] == [Call("now", {})]
    assert parse_calls("5 < 6 </tool_call> <tool> </think>") == ("5 < 6 </tool_call> <tool> </think>", [])
    outside, [unclosed, closed] = parse_calls('<tool_call>{"name": "a"} <tool_call>{"name": "b"}</tool_call>')
    assert (outside, unclosed.arguments, closed) == ("", None, Call("b", {}))


def test_open_and_close_reach_every_tool():
    environment = make(":Meeting", ":NotOpening")

    async def life():
        try:
            with pytest.raises(OSError, match="no room"):
                await environment.open()
        finally:
            await environment.close()

    asyncio.run(life())
    assert environment.tools["meet"].log == ["open", "close"]
    assert environment.tools["broken"].log == ["close"]


def test_templates_that_hide_tools(caplog):
    make(":add")
    assert not caplog.records
    plain = make_tokenizer(CHATML)
    make(":add", tokenizer=plain)
    assert "does not show the policy its tools (add)" in caplog.text
    deaf = make_tokenizer("{% set messages = messages | rejectattr('role', 'eq', 'tool') | list %}" + CHATML)
    with pytest.raises(UserError, match=r"leaves out messages of the role 'tool'; set environment.options\.tool_role"):
        make(":add", tokenizer=deaf)
    make(":add", tokenizer=deaf, tool_role="user")
    refusing = make_tokenizer(
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    )
    with pytest.raises(UserError, match="refuses messages with the roles user, assistant, tool: no tools"):
        make(":add", tokenizer=refusing)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([], "name at least one tool"),
        (["calclator"], "did you mean 'calculator'"),
        ([":add", ":add"], "two tools are called 'add'"),
        ([":untyped"], "missing a type hint"),
        ([":NoSchema"], "no JSON schema"),
        ([5], "valid string"),
        ([{"name": "some_tools:Meeting", "option": {}}], "neither a name, an import path nor a mapping"),
        ([{"name": "some_tools:Meeting", "options": {"sise": 2}}], "did you mean 'size'"),
        ([{"name": "some_tools:Meeting", "options": {"size": "two"}}], "valid integer"),
        ([{"name": "some_tools:add", "options": {"size": 2}}], "is a function and takes no options"),
        (["json:JSONDecoder"], "neither a subclass of rl_tpu.environments.Tool nor a function"),
        (["rl_tpu.environments:Tool"], "abstract"),
    ],
)
def test_bad_tools_are_one_line(tools, expected):
    with pytest.raises(UserError) as error:
        make(*tools)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
