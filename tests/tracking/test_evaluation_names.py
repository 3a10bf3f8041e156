"""What of an evaluation's many metrics the console, the table and the curves show."""

from __future__ import annotations

import re

from rl_tpu.tracking import RunDirectory, curves
from rl_tpu.tracking.evaluation_names import headline

METRICS = {
    "reward_mean": 0.6,
    "pass@1": 0.5,
    "pass@2": 0.6,
    "pass@16": 0.9,
    "maj@16": 0.7,
    "response_tokens_mean": 120.0,
    "mean@16": 0.5,
    "pass@1_low": 0.4,
    "pass@1_high": 0.65,
    "response_tokens_p50": 100.0,
    "response_tokens_p90": 220.0,
    "response_tokens_max": 256.0,
    "truncated_share": 0.02,
}


def test_the_line_has_the_main_numbers_and_the_table_no_details(open_tracker, capsys):
    with open_tracker() as tracker:
        tracker.evaluation(0, 0, {"sums": METRICS})
    output = capsys.readouterr().out
    assert output.splitlines()[0].endswith("sums: reward_mean 0.6, pass@1 0.5, pass@16 0.9, maj@16 0.7")
    table = re.findall(r"│ sums\s*│ (\S+)", output)
    details = (
        "mean@16",
        "pass@1_low",
        "pass@1_high",
        "response_tokens_p50",
        "response_tokens_p90",
        "response_tokens_max",
    )
    assert table == [name for name in METRICS if name not in details]


def test_metrics_of_another_kind_are_all_shown():
    assert headline(["f1", "f1_low", "recall"]) == ["f1", "recall"]


def test_the_panel_shows_pass_at_one_with_its_interval():
    from matplotlib.figure import Figure

    rows = [{"step": step, "version": step, **{f"eval/sums/{n}": v for n, v in METRICS.items()}} for step in (0, 5)]
    ax = Figure().subplots()
    curves._evaluation(ax, [], rows)
    _, labels = ax.get_legend_handles_labels()
    assert labels == ["sums/pass@1: 0.5 → 0.5", "sums/pass@16: 0.9 → 0.9"]
    (bars,) = ax.containers
    (segments,) = (collection.get_segments() for collection in bars.lines[2])
    assert [segment.tolist() for segment in segments] == [[[0, 0.4], [0, 0.65]], [[5, 0.4], [5, 0.65]]]


def test_curves_with_intervals_are_drawn(open_tracker, tmp_path):
    with open_tracker() as tracker:
        for step in (0, 4):
            tracker.evaluation(step, step, {"sums": METRICS})
    assert RunDirectory(tmp_path / "run").curves.stat().st_size > 20_000
