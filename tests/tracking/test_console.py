"""What the reader sees, in a log file and on a real terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

from rl_tpu.tracking.console import number, step_line

METRICS = {
    "reward/mean": 0.8125,
    "rollout/response_tokens_mean": 143.25,
    "rollout/total_tokens": 5000,
    "train/loss": -0.01234,
    "train/grad_norm": 0.5,
    "train/logprob_diff_mean": 1.25e-5,
    "perf/step_s": 12.34,
    "perf/generate_s": 8.1,
    "perf/train_s": 3.9,
    "perf/sync_s": 0.25,
    "perf/tokens_per_s": 405.2,
}


def test_a_step_is_one_line_with_the_numbers_that_matter():
    assert step_line(11, 20, METRICS) == (
        "[12/20] step 11  reward 0.812  length 143  loss -0.0123  grad norm 0.5  logprob diff 1.25e-05"
        "  12.3 s (generate 8.1, train 3.9, sync 0.25)  405 tokens/s"
    )
    assert step_line(0, 1, {}) == "[1/1] step 0"


def test_numbers():
    assert [number(value) for value in (0, 12041.3, 0.25, 1 / 3, float("nan"), 999.6)] == [
        "0",
        "12041",
        "0.25",
        "0.333",
        "nan",
        "1e+03",
    ]


def test_in_a_log_every_step_is_one_plain_line(open_tracker, capsys):
    with open_tracker() as tracker:
        tracker.message("a [bold]message[/bold]")
        tracker.evaluation(0, 0, {"sums": {"reward_mean": 0.5, "pass@1": 0.25, "prompts": 64.0}, "own": {"f1": 0.1}})
        tracker.log(0, METRICS)
        print("something else")
        tracker.log(3, METRICS)
        tracker.evaluation(4, 4, {"sums": {"reward_mean": 0.75, "pass@1": 0.5, "prompts": 64.0}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a [bold]message[/bold]"
    assert lines[1] == "evaluation at step 0 (policy version 0)  sums: reward_mean 0.5, pass@1 0.25; own: f1 0.1"
    assert re.fullmatch(re.escape(step_line(0, 4, METRICS)) + r"  ETA \d+:\d\d:\d\d", lines[2])
    assert lines[3:5] == ["something else", step_line(3, 4, METRICS)]
    table = "\n".join(lines[6:-1])
    assert re.search(r"sums\s*│ pass@1\s*│\s*0.25\s*│\s*0.5\s*│\s*\+0.25", table)
    assert re.search(r"own\s*│ f1\s*│\s*0.1\s*│\s*–\s*│\s*–", table)
    assert lines[-1].startswith("finished after 4 steps; everything is in ")
    assert "\x1b" not in "".join(lines)


ON_A_TERMINAL = """
import logging, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import run_config
from rl_tpu.tracking import Tracker
logging.basicConfig()
with Tracker.open(run_config(), Path({run!r}), total_steps=4) as tracker:
    handler = logging.getLogger().handlers[0]
    assert handler.stream is sys.stderr, "log lines would break into the bar"
    for step in range(4):
        with tracker.timer("generate"):
            time.sleep(0.3)
        print("printed", step)
        logging.warning("logged %d", step)
        tracker.log(step, {{"reward/mean": step}})
assert handler.stream is sys.stderr is sys.__stderr__
"""


def test_on_a_terminal_a_bar_stays_below_all_other_output(tmp_path):
    code = ON_A_TERMINAL.format(tests=os.path.dirname(__file__), run=str(tmp_path / "run"))
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = read_until_closed(master, deadline=time.monotonic() + 120)
    assert process.wait(timeout=30) == 0, shown
    screen = Screen(shown).lines()
    wanted = [line for step in range(4) for line in (f"printed {step}", f"WARNING:root:logged {step}")]
    assert [line for line in screen if line.startswith(("printed", "WARNING"))] == wanted
    steps = [f"[{step + 1}/4] step {step}  reward {step}" for step in range(4)]
    assert [line for line in screen if line.startswith("[")] == steps
    assert "━" in shown  # there was a bar
    assert re.search(r"3/4.*generate", shown)
    assert "ETA 0:00:0" in shown
    assert not any("━" in line for line in screen)  # and it is gone


def read_until_closed(master, deadline):
    shown = b""
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1.0)[0]:
            continue
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the last writer closed it
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    return shown.decode()


class Screen:
    """As much of a terminal as a progress bar needs: carriage return, line feed, cursor up, erase line."""

    def __init__(self, text):
        self.rows, self.row, self.column = [""], 0, 0
        for control, argument, kind, plain in re.findall(r"(\x1b\[([?\d;]*)([A-Za-z]))|([^\x1b])", text):
            if not control:
                self._put(plain)
            elif kind == "A":
                self.row = max(0, self.row - int(argument or 1))
            elif kind == "K":
                self.rows[self.row] = "" if argument == "2" else self.rows[self.row][: self.column]

    def _put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            if self.row == len(self.rows):
                self.rows.append("")
        else:
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def lines(self):
        return [line.rstrip() for line in self.rows]
