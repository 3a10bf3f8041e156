"""How fast the mathematics reward grades in worker processes, beside Math-Verify in one process, on this machine.

    python benchmarks/rewards.py --json FILE

Both grade the same 1,000 responses: `groups` are 125 problems answered 8 times each, as in training, where answers repeat;
`distinct` are 1,000 problems answered once, where nothing does. Rounds of both follow each other, each in a fresh process
or pool. `ratio` is (seconds of Math-Verify / cores) / seconds of the workers: 1 means that the workers cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_tpu.config.schema import RewardConfig
from rl_tpu.rewards import RewardService
from rl_tpu.types import Prompt, Sample

RESPONSES = 1000
STEP = (
    "Let $x_{%d} = %d$. Then $\\frac{x_{%d} + %d}{2} = %d$, so that \\[ y = \\sqrt{%d} \\cdot x_{%d}^2 - %d. \\]"
    " This holds for every value we need.\n"
)
Responses = list[tuple[Prompt, list[str]]]


def make_responses(problems: int, seed: int) -> Responses:
    """Problems with about as many right as wrong answers, each behind some 1,500 characters of reasoning."""
    draw = random.Random(seed)
    made = []
    for index in range(problems):
        answer, spellings, wrong = _problem(draw)
        texts = []
        for _ in range(RESPONSES // problems):
            final = draw.choice(spellings) if draw.random() < 0.5 else draw.choice(wrong)
            steps = "".join(STEP % tuple(draw.randint(2, 99) for _ in range(8)) for _ in range(12))
            texts.append(f"{steps}\nSo the answer is $\\boxed{{{final}}}$.")
        made.append((Prompt(str(index), (1,), answer), texts))
    return made


def _problem(draw: random.Random) -> tuple[str, list[str], list[str]]:
    """An expected answer, ways to write it, and wrong answers. Six in ten are integers."""
    a, b, c = (draw.randint(2, 999) for _ in range(3))
    kinds = {
        "integer": (6, (str(a), [str(a), f"{a}.0", f"x = {a}"], [str(a + b), f"-{a}"])),
        "fraction": (1, (f"\\frac{{{a}}}{{{b}}}", [f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}"], [f"{b}/{a + 1}", str(a)])),
        "radical": (1, (f"{a}\\sqrt{{{b}}}", [f"\\sqrt{{{b}}} \\cdot {a}"], [f"{a}\\sqrt{{{b + 1}}}", str(a)])),
        "expression": (1, (f"{a}x+{b}", [f"{b} + {a}x", f"{a} \\cdot x + {b}"], [f"{a}x-{b}", f"{b}x+{a}"])),
        "pair": (1, (f"({a}, {b})", [f"({a},{b})", f"\\left({a}, {b}\\right)"], [f"({b}, {a + 1})", f"({a}, {c})"])),
    }
    weights = [weight for weight, _ in kinds.values()]
    return draw.choices([problem for _, problem in kinds.values()], weights)[0]


def single_process(responses: Responses, results: multiprocessing.Queue) -> None:
    """Seconds and verdicts of Math-Verify, called as its README says."""
    from math_verify import parse, verify

    verify(parse("$1$"), parse("$1$"))
    start = time.perf_counter()
    verdicts = [verify(parse(f"${prompt.answer}$"), parse(text)) for prompt, texts in responses for text in texts]
    results.put((time.perf_counter() - start, verdicts))


def time_math_verify(responses: Responses) -> tuple[float, list[bool]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=single_process, args=(responses, results))
    process.start()
    measured = results.get()
    process.join()
    return measured


def time_workers(responses: Responses, workers: int) -> tuple[float, list[bool]]:
    """The same of the reward service, once its workers are up."""
    groups = [
        (prompt, [Sample([1], [1], [1], [0.0], [], "stop", text=text) for text in texts]) for prompt, texts in responses
    ]

    async def grade(service: RewardService) -> float:
        await asyncio.gather(*(service.score(Prompt("warm", (1,), "1"), groups[0][1][:1]) for _ in range(4 * workers)))
        start = time.perf_counter()
        await asyncio.gather(*(service.score(prompt, samples) for prompt, samples in groups))
        return time.perf_counter() - start

    with RewardService(RewardConfig(name="math", workers=workers)) as service:
        seconds = asyncio.run(grade(service))
    return seconds, [sample.reward > 0 for _, samples in groups for sample in samples]


def measure(problems: int, cores: int, rounds: int) -> dict[str, float]:
    ours, theirs, agreement = [], [], []
    for seed in range(rounds):
        responses = make_responses(problems, seed)
        seconds, verdicts = time_math_verify(responses)
        theirs.append(seconds)
        seconds, graded = time_workers(responses, cores)
        ours.append(seconds)
        agreement.append(statistics.fmean(one == other for one, other in zip(verdicts, graded, strict=True)))
    ours_s, theirs_s = statistics.median(ours), statistics.median(theirs)
    return {
        "workers_s": ours_s,
        "math_verify_s": theirs_s,
        "math_verify_per_core_s": theirs_s / cores,
        "ratio": theirs_s / cores / ours_s,
        "same_verdicts": statistics.fmean(agreement),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="worker processes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    workloads = {"groups": RESPONSES // 8, "distinct": RESPONSES}
    found = {name: measure(problems, options.cores, options.rounds) for name, problems in workloads.items()}
    about = {"responses": RESPONSES, "cores": options.cores, "rounds": options.rounds, "machine": platform.processor()}
    options.json.write_text(json.dumps(about | found, indent=2) + "\n")
    table = Table("1,000 responses", "workers s", "Math-Verify s", "/ cores", "ratio", "same verdicts")
    for name, numbers in found.items():
        values = [f"{value:.3f}" for value in numbers.values()]
        table.add_row(name, *values)
    Console().print(table)


if __name__ == "__main__":
    main()
