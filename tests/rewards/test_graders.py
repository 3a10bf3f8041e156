"""The graders besides mathematics, on answers as models write them."""

import math
from fractions import Fraction

import pytest

from rl_tpu.rewards import Response
from rl_tpu.rewards.group import diversity, length_rank, majority
from rl_tpu.rewards.layout import length, repetition, tags
from rl_tpu.rewards.matching import exact, multiple_choice, regex
from rl_tpu.rewards.numeric import gsm8k, plain_number, same_number
from rl_tpu.rewards.units import split_unit
from rl_tpu.types import Prompt

PROMPT = Prompt("p", (1,), None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("-42", -42),
        ("−42", -42),
        ("+42.", 42),
        ("007", 7),
        ("1,234,567", 1234567),
        ("1{,}000", 1000),
        ("1 000", 1000),
        (".5", Fraction(1, 2)),
        ("2.50", Fraction(5, 2)),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac34", Fraction(3, 4)),
    ],
)
def test_plain_numbers(text, number):
    assert plain_number(text)[0] == number


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1,00", "1 34", "1,2,3", "1/0", "x", "1e5", "12 cm", "--1", "1.2.3", "9" * 100]
)
def test_no_plain_numbers(text):
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.33333", False),
        ("2/3", "0.666667", True),
        ("1000000", "1000000.1", False),
        ("0.0000001", "0", False),
        ("0", "0.0000001", False),
        ("12345678901234567890", "12345678901234567891", False),
    ],
)
def test_same_number(one, other, same):
    assert same_number(plain_number(one), plain_number(other)) is same


@pytest.mark.parametrize(
    ("answer", "rest", "unit"),
    [
        (r"12 \text{ cm}", "12", "cm"),
        (r"12\,\mathrm{cm}^2", "12", "cm^2"),
        (r"12 \text{ square centimeters}", "12", "cm^2"),
        ("12 cm²", "12", "cm^2"),
        ("3 hours", "3", "h"),
        (r"50\%", "50", "percent"),
        (r"90^\circ", "90", "degree"),
        (r"\$5", "5", "dollar"),
        ("1011_2", "1011", "base 2"),
        (r"12 \text{ apples}", "12", None),
        ("12 apples", "12 apples", None),
        ("x", "x", None),
        (r"\text{Monday}", r"\text{Monday}", None),
        (r"\frac{1}{2} \text{ m}", r"\frac{1}{2}", "m"),
        ("x_1", "x_1", None),
    ],
)
def test_units(answer, rest, unit):
    assert split_unit(answer) == (rest, unit)


GSM8K_GOLD = "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 1,234"


@pytest.mark.parametrize(
    ("text", "answer_format", "reward"),
    [
        ("So\n#### 1234", "hashes", 1),
        ("#### $1,234.00", "hashes", 1),
        ("#### 5\nno\n#### 1234", "hashes", 1),
        ("#### 1234\n#### 5", "hashes", 0),
        ("#### 1235", "hashes", 0),
        ("#### -1234", "hashes", 0),
        ("#### 1234 or 5", "hashes", 0),
        ("1234", "hashes", 0),
        ("####", "hashes", 0),
        (r"\boxed{1234}", "hashes", 0),
        ("<think>#### 1234</think>", "hashes", 0),
        ("<think>#### 5</think>#### 1234", "hashes", 1),
        (r"\boxed{1{,}234}", "boxed", 1),
        ("Answer: 1234", "answer_line", 1),
        (r"#### 5 no \boxed{1234}", "any", 1),
        (r"\boxed{5} no #### 1234", "any", 1),
        (r"\boxed{1234}", "any", 1),
        ("it is 5 and then $1,234.", "last_number", 1),
        ("it is 1234 of 5", "last_number", 0),
        ("nothing", "last_number", 0),
        ("x1234", "last_number", 0),
    ],
)
def test_gsm8k(text, answer_format, reward):
    assert gsm8k(text, GSM8K_GOLD, PROMPT, answer_format=answer_format) == reward
    assert gsm8k(text, 1234, PROMPT, answer_format=answer_format) == reward


def test_gsm8k_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="is no number"):
        gsm8k("#### 1", "a lot", PROMPT)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"\boxed{B}", 1),
        (r"\boxed{\text{(B)}}", 1),
        (r"\boxed{b}", 1),
        (r"\boxed{B. 12 apples}", 1),
        ("Answer: B", 1),
        ("**Answer:** (B)", 1),
        ("Answer: **B**", 1),
        ("Answer: B) a vitamin called C", 1),
        ("<answer>B</answer>", 1),
        ("B", 1),
        ("(B)", 1),
        ("B.", 1),
        ("I choose (B).", 1),
        ("(A) is wrong, so it is (B).", 1),
        (r"<think>\boxed{A}</think>\boxed{B}", 1),
        (r"<think>\boxed{B}</think>", 0),
        (r"\boxed{A}", 0),
        (r"\boxed{A or B}", 0),
        (r"\boxed{B, C}", 0),
        (r"\boxed{(B) and (C)}", 0),
        (r"\boxed{A}, \boxed{B}", 0),
        ("Answer: A) or B)", 0),
        ("Answer: B or A", 0),
        ("Answer: Bananas", 0),
        (r"\boxed{Z}", 0),
        (r"\boxed{12 apples}", 0),
        ("(B) or rather (A)", 0),
        ("It may be (B), I am not sure.", 0),
        ("", 0),
    ],
)
def test_multiple_choice(text, reward):
    for answer in ("B", "(b)", 1, "B. 12 apples"):
        assert multiple_choice(text, answer, PROMPT) == reward


def test_multiple_choice_outside_the_choices():
    assert multiple_choice(r"\boxed{D}", "D", PROMPT, choices="ABCD") == 1
    for answer in ("E", 4, "12 apples"):
        with pytest.raises(ValueError, match="none of the choices ABCD"):
            multiple_choice("x", answer, PROMPT, choices="ABCD")


def test_exact():
    assert exact("  Paris. ", "paris", PROMPT) == 1
    assert exact(r"It is \boxed{Paris}", "Paris", PROMPT) == 1
    assert exact("<answer>New\n  York</answer>", "new york", PROMPT) == 1
    assert exact("It is Paris", "Paris", PROMPT) == 0
    assert exact("", "", PROMPT) == 0
    assert exact("Paris", ["London", "Paris"], PROMPT) == 1
    assert exact("paris", "Paris", PROMPT, case_sensitive=True) == 0
    assert exact("Paris!", "Paris", PROMPT, punctuation=True) == 0
    assert exact("Paris", "Paris", PROMPT, answer_format="boxed") == 0
    assert exact("<think>Paris</think>", "Paris", PROMPT) == 0
    assert exact("７", "7", PROMPT) == 1
    assert exact("10²", "102", PROMPT) == exact("x²", "x2", PROMPT) == exact("1½", "11⁄2", PROMPT) == 0
    assert exact("10²", "10²", PROMPT) == exact("cafe\u0301", "café", PROMPT) == 1


def test_regex():
    assert regex("the answer is 4.5", "4.5", PROMPT, pattern=r"answer is {answer}\b") == 1
    assert regex("the answer is 4x5", "4.5", PROMPT, pattern=r"answer is {answer}\b") == 0
    assert regex("a\nDone\nb", None, PROMPT, pattern="^Done$") == 1
    assert regex("<think>Done</think>", None, PROMPT, pattern="Done") == 0
    assert regex("<think>Done</think>", None, PROMPT, pattern="Done", whole=True) == 1


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>a\nb</think>\n\n<answer>b</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("hello <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> and <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> bye", 0),
        ("<think></think><answer>b</answer>", 0),
        ("</think>a<think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format(text, reward):
    assert tags(text, None, PROMPT) == reward
    assert tags(text.removeprefix("<think>"), None, PROMPT, opened=True) == (reward if text[:1] == "<" else 0)


def test_format_with_other_tags():
    assert tags("<plan>a</plan><code>b</code>", None, PROMPT, names=["plan", "code"]) == 1


@pytest.mark.parametrize(
    ("tokens", "linear", "cosine"),
    [(0, 0, 0), (100, 0, 0), (150, -0.5, -0.5), (125, -0.25, None), (200, -1, -1), (999, -1, -1)],
)
def test_length(tokens, linear, cosine):
    def of(shape, **options):
        response = Response("x" * (2 * tokens), tokens)
        return length(response, None, PROMPT, free=100, limit=200, shape=shape, **options)

    assert of("linear") == linear
    assert of("linear", penalty=0.5) == linear / 2
    expected = cosine if cosine is not None else -(1 - math.cos(math.pi / 4)) / 2
    assert of("cosine") == pytest.approx(expected)
    assert length(Response("x" * tokens, 1), None, PROMPT, free=100, limit=200, unit="characters") == linear


def test_length_is_that_of_dapo():
    from rl_tpu.algorithms.overlong import soft_overlong_penalty

    for tokens in (0, 80, 81, 90, 99, 100):
        ours = length(Response("", tokens), None, PROMPT, free=80, limit=100)
        assert ours == pytest.approx(soft_overlong_penalty(tokens, 100, 20, 1.0))


def test_repetition():
    assert repetition("one two three four five", None, PROMPT) == 0
    assert repetition("", None, PROMPT) == 0
    assert repetition("a b c", None, PROMPT, words=4) == 0
    assert repetition("a a a a a", None, PROMPT, words=2) == pytest.approx(-0.75)
    assert repetition("a b a b a", None, PROMPT, words=2, penalty=2.0) == pytest.approx(-1.0)


def responses(*texts):
    return [Response(text, len(text)) for text in texts]


def test_majority():
    group = responses(r"\boxed{4}", r"\boxed{5}", r"\boxed{4.0}", "none", r"<think>\boxed{5}</think>")
    assert majority(group, None, PROMPT) == [1, 0, 1, 0, 0]
    assert majority(responses("a", "b"), None, PROMPT) == [0, 0]
    assert majority(responses(r"\boxed{x}", r"\boxed{y}"), None, PROMPT) == [1, 0]


def test_diversity():
    group = responses(r"\boxed{4}", r"\boxed{5}", r"\boxed{4}", "none", r"\boxed{6}")
    assert diversity(group, None, PROMPT) == [0.75, 1.0, 0.75, 0.0, 1.0]
    assert diversity(responses(r"\boxed{4}"), None, PROMPT) == [0.0]


def test_length_rank():
    group = [Response("", tokens) for tokens in (10, 20, 15, 30)]
    assert length_rank(group, None, PROMPT, penalty=2.0) == pytest.approx([0, 0, 0, -1.0])
    assert length_rank(group[:2], None, PROMPT) == pytest.approx([0, -0.5])
    assert length_rank([Response("", 5)] * 3, None, PROMPT) == [0, 0, 0]
