"""What is tried where it does not fit, in which order, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiled import GIB, compiled
from test_memory_verdict import SIZES

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.preflight.advice import advise
from rl_tpu.orchestrator.preflight.memory import assess

EAGER = ["trainer.execution.mode=eager"]
PLAIN = ["trainer.kernels.attention=plain", "trainer.kernels.head=plain"]


class Compiler:
    """Says how many GiB the backward takes, by the overrides that are among its answers."""

    def __init__(self, arguments: list[str], answers: dict[str, float | None], sizes=SIZES):
        self.arguments, self.answers, self.sizes, self.asked = arguments, answers, sizes, []

    def __call__(self, more=()):
        config = load_config(["+experiment=qwen3_4b_dapo", *self.arguments, *more])
        self.asked.append(tuple(more))
        total = next((size for override, size in self.answers.items() if override in more), self.answers[""])
        program = compiled("backward", None if total is None else int(total * GIB))
        return assess(config, self.sizes, [program], 96 * GIB)

    def advise(self):
        config = load_config(["+experiment=qwen3_4b_dapo", *self.arguments])
        return advise(config, self(), self, self)


def test_nothing_is_tried_where_all_fits():
    assert Compiler([], {"": 50}).advise() == []


def test_nothing_is_tried_where_the_compiler_refuses_for_another_reason_than_memory():
    error = "UNIMPLEMENTED: No feasible span count for single input all reduce scatter fusion"  # libtpu 0.0.52's
    config = load_config(["+experiment=qwen3_4b_dapo"])
    memory = assess(config, SIZES, [compiled("backward", None, error=error)], 96 * GIB)
    assert not memory.fits
    assert advise(config, memory, pytest.fail, pytest.fail) == []


def test_the_first_change_that_mends_it_ends_the_search():
    compiler = Compiler(PLAIN, {"trainer.kernels.attention=splash": 60, "": None})
    (advice,) = compiler.advise()
    assert advice.fits
    assert advice.overrides == ("trainer.kernels.attention=splash",)
    assert advice.before == "backward 4x22528: CompileTimeHbmOom: 107.64G exceeds 94.74G"
    assert advice.after == "backward 4x22528 needs 85.00 GiB of 94.00 GiB"
    assert len(compiler.asked) == 2


def test_a_second_change_comes_on_top_and_there_is_no_third():
    compiler = Compiler(PLAIN, {"trainer.kernels.head=fused": 90, "trainer.kernels.attention=splash": 150, "": 200})
    first, second = compiler.advise()
    assert second.overrides == (*first.overrides, "trainer.kernels.head=fused")
    assert not first.fits
    assert not second.fits
    assert compiler.asked[1:] == [first.overrides, second.overrides]


def test_settings_that_are_chosen_already_are_not_advised():
    (advice,) = Compiler([], {"": 200}, replace(SIZES, reference=0)).advise()
    assert advice.overrides == ("trainer.optimizer.name=muon",)


def test_chips_that_nobody_has_are_advised_last():
    free = ["cluster.trainer_chips=1", "trainer.optimizer.name=muon", "cluster.rollout_chips=2"]
    (advice,) = Compiler(free, {"cluster.trainer_chips=2": 30, "": 200}, replace(SIZES, reference=0)).advise()
    assert advice.overrides == ("cluster.trainer_chips=2",)
    assert advice.fits


def test_where_the_state_is_too_large_smaller_activations_are_not_tried():
    sizes = replace(SIZES, weights=40 * GIB, gradients=40 * GIB, moments=80 * GIB)
    compiler = Compiler([*EAGER, *PLAIN], {"": 90}, sizes)
    first, second = compiler.advise()
    assert first.overrides == ("trainer.offload_reference=true",)
    assert second.overrides[1:] == ("trainer.optimizer.name=muon",)


def test_a_larger_share_for_the_cache_is_advised_where_no_sample_fits():
    compiler = Compiler(["++rollout.server_options.mem_fraction_static=0.11"], {"": 50})
    (advice,) = compiler.advise()
    assert advice.side == "rollout"
    assert advice.fits
    assert advice.overrides == ("++rollout.server_options.mem_fraction_static=0.85",)
    assert advice.before == "20,971 tokens of key-value cache, one sample may need 22,528"
