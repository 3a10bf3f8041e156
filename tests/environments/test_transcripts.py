"""Transcripts against chat templates: the next prompt is what was sampled and read, and what templates make of it."""

import copy
import logging
import random

import pytest
from chat_templates import CHATML, LLAMA3, QWEN2_5, QWEN3, make_tokenizer
from scripted import encode, prompt, turn

from rl_tpu.environments import Chat, Transcript
from rl_tpu.environments.template_check import TemplateCheck
from rl_tpu.errors import UserError
from rl_tpu.types import Completion, VersionSpan

TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}
USER = {"role": "user", "content": "Once more."}
ANSWERS = [{"role": "tool", "name": "add", "content": "12"}, {"role": "tool", "name": "add", "content": '"é" <b>\n 3'}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    return make_tokenizer(TEMPLATES[request.param])


def grow(transcript, chat, *steps):
    """Turns of the policy as texts or completions, and lists of messages in between."""
    for step in steps:
        if isinstance(step, list):
            transcript.add_messages(transcript.render(chat, step))
        else:
            transcript.add_completion(turn(chat.tokenizer, step) if isinstance(step, str) else step)
    return transcript


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}])
def test_the_next_prompt_is_what_the_template_writes_of_the_whole_conversation(tokenizer, options):
    chat = Chat(tokenizer, options)
    transcript = Transcript(prompt(tokenizer, "Be brief.", "4 + 8 = ?", options=options))
    calls = '<tool_call>{"name": "add"}</tool_call>\n<tool_call>{}</tool_call>'
    for answer, messages in [(calls, ANSWERS), ("12", [USER]), ("A.", [ANSWERS[0], USER, ANSWERS[1]])]:
        grow(transcript, chat, answer, messages)
        conversation = transcript.conversation(chat)
        assert conversation[-len(messages) - 1 :] == [{"role": "assistant", "content": answer}, *messages]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
        assert transcript.ids == encode(tokenizer, text)
    check = TemplateCheck(chat)
    assert check.differs(transcript) is False  # of what was read before the last turn
    assert check.differs(grow(transcript, chat, "The end.")) is False


def test_answers_of_tools_become_one_turn_of_qwen():
    chat = Chat(make_tokenizer(QWEN3))
    text, _ = chat.after_turn(ANSWERS)
    assert text == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n"
        '"é" <b>\n 3\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_a_turn_is_closed_whatever_it_ended_with(tokenizer):
    """Cut off, stopped at another token, ended with the end token of a base model: the next prompt is well-formed."""
    chat = Chat(tokenizer)
    whole = turn(tokenizer, "12")
    end = whole.response_ids[-1]
    other = next(i for i in tokenizer.all_special_ids if i != end)
    for ids in ([*whole.response_ids[:-1]], [*whole.response_ids[:-1], other], whole.response_ids, []):
        transcript = Transcript(prompt(tokenizer, "4 + 8 = ?"))
        transcript.add_completion(Completion(ids, [-1.0] * len(ids), "stop", [VersionSpan(0, 0, len(ids))]))
        rendered = transcript.render(chat, [USER])
        transcript.add_messages(rendered)
        text = tokenizer.decode(transcript.ids)
        after = text.removeprefix(tokenizer.decode(list(transcript._prompt.ids)) + tokenizer.decode(ids))
        assert after == rendered.text
        assert (tokenizer.decode(ids) + after).count(
            tokenizer.decode([end])
        ) == 2  # of the policy's turn and the user's
        sample = transcript.finish(tokenizer)
        assert sample.loss_mask == [1] * len(ids) + [0] * len(rendered.ids)


def test_the_end_token_of_a_base_model_is_no_part_of_its_text_and_is_reported(caplog):
    chat = Chat(make_tokenizer(CHATML, end="<|endoftext|>"))
    transcript = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, "12", [USER], "12")
    assert transcript.conversation(chat)[1] == {"role": "assistant", "content": "12"}
    assert TemplateCheck(chat).differs(transcript) is True
    assert "where the transcript has '<|endoftext|><|im_end|>" in caplog.text


def test_sampled_ids_stay_as_sampled_over_turns():
    """`he` + `llo` is what was sampled; the tokenizer spells `hello` with another token."""
    tokenizer = make_tokenizer(CHATML, words=["he", "hello", "llo"])
    chat = Chat(tokenizer)
    he, llo, hello = (tokenizer.convert_tokens_to_ids(word) for word in ("he", "llo", "hello"))
    assert encode(tokenizer, "hello") == [hello]
    sampled = [he, llo, tokenizer.eos_token_id]
    transcript = Transcript(prompt(tokenizer, "Greet."))
    held = list(transcript.ids)
    for _ in range(4):
        transcript.add_completion(Completion(sampled, [-1.0, -2.0, -3.0], "stop", [VersionSpan(0, 0, 3)]))
        held += sampled
        assert transcript.ids == held
        grow(transcript, chat, [USER])
        held = list(transcript.ids)
    text = tokenizer.apply_chat_template(transcript.conversation(chat), tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.decode(held)
    assert encode(tokenizer, text) != held  # as rendering messages at every turn would have it
    assert encode(tokenizer, text).count(hello) == 4
    sample = transcript.finish(tokenizer)
    written = [i for i, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert written == sampled * 4
    assert [sample.response_ids[each.start : each.end] for each in sample.turns] == [sampled] * 4
    assert TemplateCheck(chat).differs(transcript) is False  # the text is the same, which is all a template knows


def test_random_conversations_keep_every_token(tokenizer):
    chat = Chat(tokenizer)
    for seed in range(30):
        draw = random.Random(seed)
        transcript = Transcript(prompt(tokenizer, "Go."))
        expected, mask = list(transcript.ids), []
        for _ in range(draw.randint(1, 5)):
            ids = [
                draw.randrange(len(tokenizer)) for _ in range(draw.randint(0, 20))
            ]  # special tokens and broken UTF-8
            transcript.add_completion(Completion(ids, [-1.0] * len(ids), "stop", [VersionSpan(0, 0, len(ids))]))
            rendered = transcript.render(chat, draw.choice([[USER], ANSWERS, [ANSWERS[1]]]))
            transcript.add_messages(rendered)
            expected += ids + rendered.ids
            mask += [1] * len(ids) + [0] * len(rendered.ids)
        sample = transcript.finish(tokenizer)
        assert transcript.ids == sample.prompt_ids + sample.response_ids == expected
        assert sample.loss_mask == mask
        if tokenizer.chat_template in (CHATML, QWEN2_5):  # these leave the assistant's text alone
            assert not TemplateCheck(chat).differs(transcript)


def test_qwen3_drops_earlier_reasoning_and_says_so_once(caplog):
    chat = Chat(make_tokenizer(QWEN3))
    thought = "<think>\nFour and eight.\n</think>\n\n12"
    check = TemplateCheck(chat)
    for _ in range(3):
        transcript = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, thought, [USER], thought)
        held = chat.tokenizer.decode(transcript.ids)
        assert held.count("Four and eight.") == 2
        assert chat.render(transcript.conversation(chat)).count("Four and eight.") == 1
        assert check.differs(transcript) is True
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    message = record.getMessage()
    assert "turn 1 of the policy" in message
    assert "writes '12<|im_end|>" in message
    assert "has '<think>\\nFour and eight." in message
    assert "reasoning of earlier turns" in message
    assert "Training uses the transcript" in message


def test_qwen3_keeps_reasoning_between_answers_of_tools(caplog):
    chat = Chat(make_tokenizer(QWEN3))
    call = '<think>\nI add.\n</think>\n\n<tool_call>{"name": "add"}</tool_call>'
    transcript = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, call, ANSWERS, call, ANSWERS, "12")
    assert TemplateCheck(chat).differs(transcript) is False
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "options", "answer", "expected"),
    [
        (LLAMA3, {}, " 12 \n", "turn 1 of the policy"),
        (QWEN3, {"enable_thinking": False}, "12", "the prompt"),
        (QWEN3, {}, "</think>", "turn 1 of the policy"),
    ],
)
def test_other_differences_are_reported_where_they_are(caplog, template, options, answer, expected):
    chat = Chat(make_tokenizer(template), options)
    start = prompt(chat.tokenizer, "4 + 8 = ?", options=options)
    assert TemplateCheck(chat).differs(grow(Transcript(start), chat, answer, [USER], "12")) is True
    assert f"at {expected} it writes" in caplog.text


def test_a_template_that_refuses_is_reported(caplog):
    alternating = "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    chat = Chat(make_tokenizer(alternating))
    transcript = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, "12", [USER], "12", [USER], "12")
    assert TemplateCheck(chat).differs(transcript) is True
    assert "too many" in caplog.text
    with pytest.raises(UserError, match="refuses messages with the roles user, assistant, user, user: too many"):
        transcript.render(chat, [USER, USER])


def test_nothing_is_compared_where_there_is_nothing_to_compare():
    chat = Chat(make_tokenizer(CHATML))
    check = TemplateCheck(chat)
    alone = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, "12")
    assert check.differs(alone) is None
    alone.add_environment_ids([1, 2])
    assert check.differs(grow(alone, chat, "12")) is None


def test_a_template_without_the_assistant_is_refused():
    chat = Chat(make_tokenizer("{% for message in messages %}{{ message.role }}{% endfor %}"))
    with pytest.raises(UserError, match="leaves out a turn of the assistant"):
        chat.after_turn([USER])


def test_a_deep_copy_is_a_branch():
    chat = Chat(make_tokenizer(CHATML))
    trunk = grow(Transcript(prompt(chat.tokenizer, "4 + 8 = ?")), chat, "12", [USER])
    branch = copy.deepcopy(trunk)
    before = list(trunk.ids)
    grow(branch, chat, "13")
    assert trunk.ids == before
    assert branch.ids == before + turn(chat.tokenizer, "13").response_ids
    assert len(trunk.turns) == 1


def test_renderings_are_remembered():
    """The same words after other turns are not rendered again, and nobody can spoil what is remembered."""
    tokenizer = make_tokenizer(QWEN3)
    chat = Chat(tokenizer)
    _, ids = chat.after_turn([USER])
    ids.clear()
    tokenizer.chat_template = "{{ raise_exception('rendered again') }}"
    text, ids = chat.after_turn([dict(USER)])
    assert tokenizer.decode(ids) == text
    with pytest.raises(UserError, match="rendered again"):
        chat.after_turn(ANSWERS)
