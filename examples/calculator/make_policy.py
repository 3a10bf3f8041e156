"""Makes the calculator example's starting policy: a tiny Qwen3 that knows how to call a calculator, and often does not.

    python examples/calculator/make_policy.py --out DIRECTORY

The demonstrations are sums of numbers of three and four digits. At first all of them call the calculator and repeat what it
answers. Then a part does; the others state the sum at once, as all do where the prompt names no tool. Every demonstration
is right, but a million parameters cannot learn in so short a time to add such numbers in their head. Nothing says which way
is better: that is left to reinforcement learning. Problems of the held-out part are never shown.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rl_tpu.config.schema import OptimizerConfig, PromptSourceConfig, TrainerConfig
from rl_tpu.data import load_prompts
from rl_tpu.environments.chat import Chat
from rl_tpu.environments.tools.calculator import Calculator, calculate
from rl_tpu.environments.transcript import Transcript
from rl_tpu.types import Completion, Prompt, Sample, VersionSpan

sys.path.append(str(Path(__file__).parents[1]))  # what the examples share

from tiny_model import imitate, main, make_tokenizer

STEPS = 600
BATCH = 64
"""Demonstrations per step."""
LESSONS = 0.7
"""Share of the steps in which every demonstration calls the calculator; the mixed ones follow."""
NO_TOOL_SHARE = 0.2
"""Share of the mixed demonstrations whose prompt names no tool."""
CALL_SHARE = 0.5
"""Share of the others that call the calculator."""

PROBLEMS = PromptSourceConfig(
    kind="reasoning_gym",
    task="chain_sum",
    task_options={"min_terms": 2, "max_terms": 3, "min_digits": 3, "max_digits": 4},
    size=6000,
    part="train",
)
TRAINER = TrainerConfig(
    steps=STEPS,
    row_tokens=[128],
    microbatch_tokens=1024,
    param_dtype="float32",
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=20, decay="linear"),
    threads_per_rank=1,  # on a busy machine two of them wait for each other most of the time
)

# ChatML; a first message names the tools that there are.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL_START = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
# What the vocabulary is learned from: each of these becomes one token.
PIECES = [
    "State the final answer to the following arithmetic problem: ",
    "system\nTools: calculator",
    *("user\n", "assistant\n", "tool\n"),
    *(" + ", " - ", " =", "<answer>", "</answer>"),
    *(CALL_START, CALL_END),
]


def demonstration(prompt: Prompt, chat: Chat, calls: bool) -> Sample:
    """`prompt` answered with the calculator, or at once. The tool's answer is not learned: the policy never writes it."""
    transcript = Transcript(prompt)
    if calls:
        expression = prompt.metadata["notes"]["expression"]
        transcript.add_completion(_turn(f"{CALL_START}{expression}{CALL_END}", chat))
        answer = {"role": "tool", "name": Calculator.name, "content": calculate(expression)}
        transcript.add_messages(transcript.render(chat, [answer]))
    transcript.add_completion(_turn(f"<answer>{prompt.answer}</answer>", chat))
    return transcript.finish(chat.tokenizer)


def _turn(text: str, chat: Chat) -> Completion:
    ids = [*chat.tokenizer.encode(text, add_special_tokens=False), chat.tokenizer.eos_token_id]
    return Completion(ids, [0.0] * len(ids), "stop", [VersionSpan(0, 0, len(ids))])


def demonstrations(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[list[Sample]]:
    """A batch of answered prompts per step."""
    with_tool = {"tools": [Calculator.schema]}
    chats = [Chat(tokenizer, with_tool), Chat(tokenizer)]
    shown, hidden = (
        load_prompts(PROBLEMS, tokenizer, max_prompt_tokens=64, too_long="fail", template_options=options).prompts
        for options in (with_tool, None)
    )
    dice = random.Random(seed)
    for step in range(steps):
        lesson = step < LESSONS * steps
        batch = []
        for _ in range(BATCH):
            no_tool = not lesson and dice.random() < NO_TOOL_SHARE
            calls = lesson or (not no_tool and dice.random() < CALL_SHARE)
            batch.append(demonstration(dice.choice(hidden if no_tool else shown), chats[no_tool], calls))
        yield batch


def warm_up(out: Path, steps: int, seed: int) -> float:
    """Make the model, train it for `steps` steps and write it to `out`; the last step's loss, in nats per token."""
    tokenizer = make_tokenizer(PIECES, CHAT_TEMPLATE)
    batches = demonstrations(tokenizer, steps, seed)
    return imitate(out, tokenizer, batches, TRAINER.model_copy(update={"steps": steps}), seed)


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], warm_up, STEPS))
