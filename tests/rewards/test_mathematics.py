r"""The mathematics reward, on answers as models write them."""

import asyncio
import threading

import pytest

from rl_tpu.config.schema import RewardConfig
from rl_tpu.rewards import RewardService
from rl_tpu.rewards.mathematics import score
from rl_tpu.types import Prompt, Sample

PROMPT = Prompt("p", (1,), None)


def grade(text, answer, **options):
    return score(text, answer, PROMPT, **options)


RIGHT = [
    # where the answer stands
    (r"\boxed{4}", "4"),
    (r"2 + 2 = \boxed{4}.", "4"),
    (r"<think>\boxed{5}?</think> \boxed{4}", "4"),
    (r"perhaps 5 ... </think> \boxed{4}", "4"),
    (r"<think>\boxed{5}?</think> \boxed{4} <think>or \boxed{5}", "4"),
    (r"\boxed{4}, \boxed{4}", "4"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
    (r"\boxed{1} \text{ or } \boxed{2}", r"\{1, 2\}"),
    ("so <answer>4</answer>", "4"),
    (r"<answer>\boxed{4}</answer>", "4"),
    (r"<answer>5</answer> no: \boxed{4}", "4"),
    (r"\boxed{3}, no: \boxed{4}", "4"),
    (r"\boxed{4} and then \boxed{7", "4"),
    (r"\fboxed{4}", "4"),
    (r"\boxed {4}", "4"),
    (r"\boxed{\frac{\boxed{1}}{2}} so \boxed{4}", "4"),
    ("Answer: 34", "34"),
    ("So x is 34.\n\nAnswer: $34$", "34"),
    ("**Answer:** 34", "34"),
    ("**Answer: 34**", "34"),
    ("Final Answer: 34.", "34"),
    ("answer : \\(34\\)", "34"),
    ("Answer:\n34", "34"),
    ("Final Answer: The final answer is $34$. I hope it is correct.", "34"),
    ("Answer: 33\nNo.\nAnswer: 34", "34"),
    (r"Answer: $\boxed{34}$", "34"),
    (r"\boxed{3} was wrong. Answer: 34", "34"),
    (r"Answer: 3 was wrong. \boxed{34}", "34"),
    # how it is written
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", "1/2"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000{,}000}", "1000000"),
    (r"\boxed{03}", "3"),
    (r"\boxed{3.0}", "3"),
    (r"\boxed{−3}", "-3"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{12 \text{ cm}}", "12"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\$5}", "5"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{50}", r"50\%"),
    (r"\boxed{1+x^2}", "x^2+1"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{3x}", "3*x"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{x>=5}", r"x \geq 5"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{\text{Monday}}", "Monday"),
    (r"\boxed{34}", 34),
    (r"\boxed{0.25}", 0.25),
]

WRONG = [
    ("", "4"),
    ("4", "4"),
    ("the result is 4", "4"),
    (r"\boxed{}", "4"),
    (r"\boxed{4", "4"),
    (r"\boxed{5}", "4"),
    (r"\boxed{4} no, \boxed{5}", "4"),
    (r"\boxed{4}</think> I am not sure.", "4"),
    (r"<think>no end, but \boxed{4}", "4"),
    (r"\boxed{5} or \boxed{4}", "4"),
    (r"\boxed{4}\boxed{5}", "4"),
    ("Answer: 4\nAnswer: 5", "4"),
    ("Answer:", "4"),
    (r"\boxed{4\sqrt{2}}", "4"),
    (r"\boxed{1}", r"1\sqrt{19}"),
    (r"\boxed{11a+c}", "7=11a+c"),
    (r"\boxed{x<5}", "x>5"),
    (r"\boxed{x>5}", r"x \geq 5"),
    (r"\boxed{28}", r"28 \cdot \frac{1}{100}"),
    (r"\boxed{1 34}", "134"),
    (r"\boxed{33, 34}", "34"),
    (r"\boxed{33 or 34}", "34"),
    (r"\boxed{1 2 3 34}", "34"),
    (r"\boxed{5000}", "50%"),
    (r"\boxed{-3}", "3"),
    (r"\boxed{2.9}", "3"),
    (r"\boxed{3.14159}", r"\pi"),
    (r"\boxed{(2, 1)}", "(1, 2)"),
    (r"\boxed{\text{Tuesday}}", "Monday"),
    (r"\boxed{" + "1+" * 2000 + "1}", "2001"),
]


@pytest.mark.parametrize(("text", "answer"), RIGHT)
def test_right(text, answer):
    assert grade(text, answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), WRONG)
def test_wrong(text, answer):
    assert grade(text, answer) == 0.0


def test_the_asked_format_alone_counts():
    assert grade(r"\boxed{4}", "4", answer_format="boxed") == 1
    assert grade("Answer: 4", "4", answer_format="boxed") == 0
    assert grade(r"\boxed{4}", "4", answer_format="answer_line") == 0
    assert grade("Answer: 4", "4", answer_format="answer_line") == 1
    assert grade(r"\boxed{5} Answer: 4", "4", answer_format="boxed") == 0
    assert grade("so it must be $4$", "4", answer_format="free") == 1
    assert grade("so it must be $5$", "4", answer_format="free") == 0
    assert grade("I have 4 apples and eat 1; 3 are left", "3", answer_format="free") == 1
    assert grade("Answer: The largest $n$ is 34.", "34", answer_format="free") == 1
    assert grade(r"\boxed{5} and $4$", "4", answer_format="free") == 0
    assert grade("<answer>4</answer>", "4", answer_format="tag") == 1
    assert grade(r"\boxed{4}", "4", answer_format="tag") == 0


def test_the_last_line_of_dapo():
    def dapo(text):
        return grade(text, "34", answer_format="last_line")

    assert dapo("Some steps.\n\nAnswer: 34") == 1
    assert dapo("Answer: $34$\n") == 1
    assert dapo("answer : \\boxed{34}") == 1
    assert dapo("Answer: 34\nI hope that helps.") == 0
    assert dapo("The answer is: 34") == 0
    assert dapo("So the Answer: 34") == 0
    assert dapo(r"\boxed{34}") == 0
    assert dapo("Answer:\n34") == 0
    assert dapo("") == 0


def test_templates_that_open_the_thinking_in_the_prompt():
    assert grade(r"cut off in thought \boxed{4}", "4") == 1
    assert grade(r"cut off in thought \boxed{4}", "4", needs_think_end=True) == 0
    assert grade(r"thought</think> \boxed{4}", "4", needs_think_end=True) == 1


def test_scores_are_options():
    assert grade(r"\boxed{4}", "4", correct=2.0, incorrect=-1.0) == 2.0
    assert grade(r"\boxed{5}", "4", correct=2.0, incorrect=-1.0) == -1.0


def test_answer_of_a_type_nobody_can_compare():
    with pytest.raises(TypeError, match=r"\['34'\]"):
        grade(r"\boxed{34}", ["34"])


def test_grades_off_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(grade(*case) for case in RIGHT[:30]))
    thread.start()
    thread.join(60)
    assert scores == [1.0] * 30


PATHOLOGICAL = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{\sum_{k=1}^{10000000} \frac{1}{k^3+k+1}}",
    r"\boxed{\int_0^1 \frac{\sin(x^{x^x})}{\ln(1+x^{17})} dx}",
]


def test_pathological_answers_end_at_their_deadline():
    config = RewardConfig(name="math", workers=2, timeout_s=1.5)
    samples = [Sample([1], [1], [1], [0.0], [], "stop", text=text) for text in [*PATHOLOGICAL, r"\boxed{\frac{2}{6}}"]]
    with RewardService(config) as service:
        asyncio.run(service.score(Prompt("p", (1,), r"\frac{1}{3}"), samples))
        stats = service.take_stats()
    assert [sample.reward for sample in samples] == [0, 0, 0, 1]
    assert stats.timeouts == len(PATHOLOGICAL)
    assert all("1.5 s" in sample.reward_error for sample in samples[:-1])


REPEATED = [r"\boxed{" * 20_000, "Answer: " * 50_000, r"\boxed{1" + " " * 100_000 + "2}", "the answer " * 30_000]
REPEATED += ["Answer:" + " " * 200_000, "Answer: 3" + " " * 200_000 + "x", "Answer: " + "." * 200_000]
REPEATED += [r"\boxed{" * 30_000 + "3" + "}" * 30_000]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", REPEATED)
def test_endless_repetition_is_graded_quickly(text):
    assert grade(text, "4") == 0.0
    assert grade(text + r" so \boxed{4}", "4") == 1.0
