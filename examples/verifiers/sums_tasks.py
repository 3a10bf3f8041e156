"""A taskset of the package verifiers: sums, scored by its own reward, with a metric."""

import re

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", trace.last_reply)
        return float(found[-1:] == [self.data.answer])

    @vf.metric
    async def worked_out(self, trace: vf.Trace) -> float:
        return float("=" in trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 64


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            a, b, c = number % 10, number * 7 % 10, number * 3 % 10
            question = f"State the final answer to the following arithmetic problem: {a} + {b} - {c} ="
            yield SumsTask(SumsData(prompt=question, answer=str(a + b - c)), self.config.task)
