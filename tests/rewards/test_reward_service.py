"""Rewards that hang, crash, raise or return nonsense: the run goes on, or ends with one line that says why."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import faulty_rewards
import psutil
import pytest

from rl_tpu.config.schema import RewardConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.rewards import RewardService
from rl_tpu.rewards.plan import make_plan
from rl_tpu.rewards.pool import WorkerPool
from rl_tpu.rewards.registry import Response
from rl_tpu.rewards.worker import Job, Setup
from rl_tpu.types import Prompt, Sample

HERE = Path(__file__).parent
PROMPT = Prompt("p", (1, 2), [1], metadata={"k": "v"})


def samples_of(*texts):
    return [Sample([1], [1], [1], [0.0], [], "stop", text=text) for text in texts]


def workers():
    """Reward workers of this process; it may have other children, living and dead, of other tests."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "rl_tpu.rewards import worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture(scope="module")
def service():
    """Two workers, a short deadline, errors are scored."""
    config = RewardConfig(
        name="faulty_rewards:by_text", workers=2, timeout_s=1.0, failure_reward=-1.0, on_error="score"
    )
    with RewardService(config) as service:
        yield service


def score(service, *texts):
    samples = samples_of(*texts)
    service.take_stats()
    asyncio.run(service.score(PROMPT, samples))
    return samples, service.take_stats()


def test_numbers_parts_and_context(service):
    samples, stats = score(service, "0.5", "parts", "context", "-3")
    assert [sample.reward for sample in samples] == [0.5, 1.25, 1.0, -3.0]
    assert samples[0].reward_parts == {"by_text": 0.5}
    assert samples[1].reward_parts == {"right": 1.0, "brief": 0.25}
    assert [sample.reward_error for sample in samples] == [None] * 4
    assert (stats.scored, stats.timeouts, stats.crashes, stats.errors) == (4, 0, 0, 0)
    assert 0 < stats.mean_seconds < 1


@pytest.mark.parametrize("text", ["hang", "hang in C"])
def test_late_worker_is_replaced_and_the_sample_counted(service, text):
    score(service, "0")  # workers are up: what follows measures the deadline
    started = time.monotonic()
    samples, stats = score(service, "1", text, "2", "3")
    assert time.monotonic() - started < 5
    assert [sample.reward for sample in samples] == [1.0, -1.0, 2.0, 3.0]
    assert samples[1].reward_error == "no reward within 1 s"
    assert samples[1].reward_parts == {"by_text": -1.0}
    assert (stats.scored, stats.timeouts, stats.crashes) == (4, 1, 0)
    assert 1 <= len(workers()) <= 2


@pytest.mark.parametrize(("text", "exit_code"), [("segfault", "-11"), ("exit", "3"), ("quiet exit", "0")])
def test_crashed_worker_is_replaced_and_the_sample_counted(service, text, exit_code):
    samples, stats = score(service, *["1"] * 10, text, *["2"] * 10)
    assert [sample.reward for sample in samples] == [1.0] * 10 + [-1.0] + [2.0] * 10
    assert samples[10].reward_error == f"the reward worker died with exit code {exit_code}"
    assert (stats.scored, stats.crashes, stats.timeouts) == (21, 1, 0)


def test_a_function_that_forks_scores_nobody_else(service):
    for _ in range(3):
        samples, stats = score(service, "fork", *"23456789")
        assert [sample.reward for sample in samples] == [0.5, *range(2, 10)]
        assert stats.crashes == 0


def test_what_a_late_function_started_ends_with_it(service, tmp_path):
    _, stats = score(service, f"hang in a child {tmp_path / 'pid'}")
    assert stats.timeouts == 1
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(10)


def test_many_crashes_and_hangs_in_a_row(service):
    samples, stats = score(service, *["exit", "hang", "1"] * 4)
    assert [sample.reward for sample in samples] == [-1.0, -1.0, 1.0] * 4
    assert (stats.crashes, stats.timeouts) == (4, 4)


def test_what_is_handed_over_with_a_bad_one_is_scored(service):
    """Quick jobs go to a worker several at a time: each is still charged with what it did itself."""
    score(service, *["0"] * 40)
    texts = [str(number) for number in range(60)]
    texts[10], texts[30] = "exit", "hang"
    samples, stats = score(service, *texts)
    assert [sample.reward for sample in samples] == [-1.0 if i in (10, 30) else float(i) for i in range(60)]
    assert (stats.scored, stats.crashes, stats.timeouts) == (60, 1, 1)


def test_only_what_cannot_be_handed_over_ends_the_run():
    """Found out by handing over one at a time what could not go together."""
    pool = WorkerPool(1, 1.0, Setup(make_plan(RewardConfig(name="faulty_rewards:by_text")).terms, None, os.getpid()))

    def submit(number, prompt):
        return pool.submit(Job((0,), [Response(str(number), 1, "stop")], prompt))

    try:
        for warm in [submit(0, PROMPT) for _ in range(40)]:
            warm.result(60)
        bad = Prompt("bad", (1,), [1], metadata={"k": lambda: None})
        futures = [submit(number, bad if number == 20 else PROMPT) for number in range(40)]
        failed = [number for number, future in enumerate(futures) if future.exception(60)]
    finally:
        pool.close()
    assert failed == [20]


def test_nobody_scores_what_was_given_up(service, tmp_path):
    async def give_up_while_it_waits():
        hanging = asyncio.create_task(service.score(PROMPT, samples_of("hang", "hang")))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(service.score(PROMPT, samples_of(f"hang in a child {tmp_path / 'pid'}")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await hanging
        await asyncio.sleep(0.5)  # in which a worker would have begun

    asyncio.run(give_up_while_it_waits())
    assert score(service, "1")[0][0].reward == 1.0
    assert not (tmp_path / "pid").exists()


def test_killed_idle_worker_costs_nothing(service):
    score(service, "0", "0")
    for worker in workers():
        worker.kill()
    samples, stats = score(service, "1", "2", "3")
    assert [sample.reward for sample in samples] == [1.0, 2.0, 3.0]
    assert stats.scored == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", r"KeyError: 'no such\nkey'"),
        ("raise unpicklable", "LocalError: made on the spot"),
        ("sys.exit", "SystemExit: 5"),
        ("none", "None"),
        ("text", "'1.0'"),
        ("empty", "empty dict"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("bad part", "'brief'"),
        ("what?", "ValueError: could not convert"),
    ],
)
def test_errors_are_counted_and_never_poison_the_group(service, text, message):
    samples, stats = score(service, "1", text, "0")
    assert [sample.reward for sample in samples] == [1.0, -1.0, 0.0]
    assert message in samples[1].reward_error
    assert (stats.errors, stats.timeouts, stats.crashes) == (1, 0, 0)


def test_failing_function_ends_the_run_with_one_line():
    config = RewardConfig(name="faulty_rewards:by_text", on_error="fail")
    with RewardService(config) as service:
        with pytest.raises(RunError) as error:
            asyncio.run(service.score(PROMPT, samples_of("1", "raise")))
        message = str(error.value)
        assert "\n" not in message
        source = Path(faulty_rewards.__file__).read_text().splitlines()
        line = next(number for number, text in enumerate(source, start=1) if "raise KeyError" in text)
        for part in (
            "faulty_rewards:by_text",
            "'p'",
            "KeyError",
            f"{faulty_rewards.__file__}:{line}",
            "on_error=score",
        ):
            assert part in message
        with pytest.raises(RunError, match="not a finite number"):
            asyncio.run(service.score(PROMPT, samples_of("nan")))


def test_time_out_does_not_end_the_run_even_with_on_error_fail():
    config = RewardConfig(name="faulty_rewards:by_text", on_error="fail", timeout_s=0.5)
    with RewardService(config) as service:
        samples, stats = score(service, "hang", "1")
    assert [sample.reward for sample in samples] == [0.0, 1.0]
    assert stats.timeouts == 1


def test_options_reach_the_function():
    config = RewardConfig(name="faulty_rewards:by_text", options={"scale": 2.0})
    with RewardService(config) as service:
        assert [sample.reward for sample in score(service, "3")[0]] == [6.0]


def test_bad_names_and_options_fail_before_anything_starts():
    with pytest.raises(UserError, match="did you mean 'math'"):
        RewardService(RewardConfig(name="maths"))
    with pytest.raises(UserError, match=r"faulty_rewards.py has no 'by_txt', did you mean 'by_text'"):
        RewardService(RewardConfig(name="faulty_rewards:by_txt"))
    with pytest.raises(UserError, match="did you mean 'scale'"):
        RewardService(RewardConfig(name="faulty_rewards:by_text", options={"scales": 2}))
    with pytest.raises(UserError, match="'boxed'"):
        RewardService(RewardConfig(name="math", options={"answer_format": "box"}))


def test_function_that_loads_in_the_driver_alone(monkeypatch):
    monkeypatch.setenv("FAULTY_REWARDS_BREAK", "1")
    with (
        RewardService(RewardConfig(name="faulty_rewards:fails_to_import_only_in_workers")) as service,
        pytest.raises(RunError, match="broken in workers alone"),
    ):
        asyncio.run(service.score(PROMPT, samples_of("1")))


def test_close_ends_hanging_workers_and_what_waits_for_them():
    before = {worker.pid for worker in workers()}
    service = RewardService(RewardConfig(name="faulty_rewards:by_text", workers=2, timeout_s=600))

    async def close_in_the_middle():
        await service.score(PROMPT, samples_of("0"))
        large = "0" * 100_000  # more than the pipe to the workers holds
        waiting = asyncio.create_task(service.score(PROMPT, samples_of("hang in C", "hang", *[large] * 50)))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(service.close)
        with pytest.raises(RunError, match="closed"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(close_in_the_middle())
    service.close()
    assert {worker.pid for worker in workers()} <= before
    with pytest.raises(RunError, match="closed"):
        asyncio.run(service.score(PROMPT, samples_of("0")))


def test_workers_die_with_a_killed_driver():
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "kill_driver.py")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    try:
        worker = psutil.Process(int(driver.stdout.readline()))
        time.sleep(0.3)  # it is in its endless match now
        driver.send_signal(signal.SIGKILL)
        driver.wait(10)
        worker.wait(10)
    finally:
        driver.kill()
        driver.stdout.close()
    assert not worker.is_running()


def test_workers_import_no_torch(service):
    score(service, "0")
    found = workers()
    assert found
    for worker in found:
        assert not any("libtorch" in mapped.path for mapped in worker.memory_maps())
