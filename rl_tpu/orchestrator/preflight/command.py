"""The command line of preflight: the configuration of a run, checked as far as one can without running it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_tpu.config.compose import check_command_line, load_config, resource
from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.inputs import check_names
from rl_tpu.orchestrator.interrupt import interrupt_by_sigterm
from rl_tpu.orchestrator.job import exit_code
from rl_tpu.orchestrator.preflight import report
from rl_tpu.orchestrator.preflight.advice import advise
from rl_tpu.orchestrator.preflight.chart import draw_memory
from rl_tpu.orchestrator.preflight.environment import check_environment
from rl_tpu.orchestrator.preflight.memory import Memory, assess
from rl_tpu.orchestrator.preflight.model import ModelSizes, find_model, measure
from rl_tpu.orchestrator.preflight.report import Findings
from rl_tpu.orchestrator.preflight.topology import generation_of, topology_of
from rl_tpu.tpu import programs
from rl_tpu.tpu.report import CompiledProgram
from rl_tpu.tracking import RunDirectory
from rl_tpu.tracking.json_files import to_json, write_atomically

USAGE = """usage: python -m rl_tpu.preflight +experiment=NAME [KEY=VALUE ...]

  +experiment=NAME      one of: {experiments}
  KEY=VALUE             any setting of docs/configuration.md, as for rl_tpu.train
  preflight.topology=T  slice to compile for, for example TPU7x:2x2x1, v6e:2x4, v5p:2x2x1
  preflight.only=[...]  compile some of logprobs, reference, backward, update
  run_dir=DIR           where preflight.json and memory.png go; default: runs/NAME/preflight-TIME
  --config-dir DIR      also look for experiments and groups in DIR

Compiles the run's programs, adds up the memory of every device, and checks the machine it is called on. No weights and no
TPU are needed. Exit code 0: everything compiles, fits and is there; 1: something does not; 2: bad input.
"""


def preflight() -> None:
    """Exit codes: 0 all is well, 1 something does not compile, fit or work, 2 bad input, 128 + signal when interrupted."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        names = sorted(file.stem for file in resource("configs/experiment").glob("*.yaml"))
        print(USAGE.format(experiments=", ".join(names)), end="")
        return
    found: list[Findings] = []
    code = exit_code(lambda: found.append(run_preflight(arguments)))
    sys.exit(code or int(not found[0].fits))


def run_preflight(arguments: Sequence[str]) -> Findings:
    """Look, print, and write preflight.json and memory.png.

    Raises UserError for bad input; nothing was compiled then.
    """
    started = time.monotonic()
    load = Overrides(arguments)
    config = load()
    check_names(config)
    ahead = get_device(config.cluster.device).compiled_ahead or config.preflight.topology
    topology = topology_of(config) if ahead else None
    model = find_model(config.model.path, config.model.make)
    interrupt_by_sigterm()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = Path(config.run_dir or Path("runs") / config.name / f"preflight-{stamp}").expanduser().resolve()
    console = report.make_console()
    findings = Findings(config.name, config.model.path, model, measure(config, model.directory), topology)
    console.print(f"preflight of [bold]{config.name}[/]", *report.model_lines(findings), sep="\n", soft_wrap=True)
    RunDirectory(directory).create()
    findings.checks = check_environment(config, findings.sizes, directory)
    console.print(report.environment_table(findings.checks))

    def write() -> None:
        findings.seconds = time.monotonic() - started
        write_atomically(directory / "preflight.json", to_json(findings.to_json(), indent=2) + "\n")

    if topology:
        if config.trainer.execution.mode != "graph":
            mode = config.trainer.execution.mode
            console.print(f"compiling the programs of trainer.execution.mode=graph; {mode} may keep more in memory")
        compiler = Compiler(findings, load, lambda text: console.print(text, style="dim", soft_wrap=True, markup=False))
        compiler.judge(config)
        draw_memory(findings.memory, directory / "memory.png", f"{config.name}, {topology}")
        console.print(report.program_table(findings.programs, topology), report.memory_table(findings.memory), sep="\n")
        for line in report.rollout_lines(findings.memory):
            console.print(line, soft_wrap=True)
        write()  # what follows may take as long again
        findings.advice = advise(config, findings.memory, compiler.with_trainer, compiler.with_rollout)
    write()
    for line in report.verdict_lines(findings):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"written to {directory} in {findings.seconds:.0f} s", soft_wrap=True)
    return findings


class Overrides:
    """The command line, checked as training checks it, to which further overrides can be added."""

    def __init__(self, arguments: Sequence[str]):
        check_command_line(arguments)
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd", action="append", default=[])
        known, self._overrides = parser.parse_known_args(arguments)
        self._directories = known.config_dir
        if options := [argument for argument in self._overrides if argument.startswith("-")]:
            raise UserError(f"command line: preflight takes one configuration and no {options[0]}")

    def __call__(self, more: Sequence[str] = ()) -> RunConfig:
        """The configuration with `more` overrides. Raises UserError where they contradict it."""
        return load_config([*self._overrides, *more], self._directories)


class Compiler:
    """Compiles the run's programs, as it is configured and with further overrides."""

    def __init__(self, findings: Findings, load: Overrides, progress: Callable[[str], None]):
        self._findings, self._load, self._progress = findings, load, progress

    def judge(self, config: RunConfig) -> None:
        """Programs and memory of the run, into the findings."""
        wanted = programs.wanted_programs(config)
        left_out = [each.name for each in programs.step_programs(config) if each not in wanted]
        self._findings.left_out = tuple(dict.fromkeys(left_out))
        self._findings.programs = self._compiled(config)
        self._findings.memory = self._memory(config, self._findings.sizes, self._findings.programs)

    def with_trainer(self, more: Sequence[str]) -> Memory:
        """The verdict with `more` overrides, compiled anew."""
        self._progress(f"trying {' '.join(more)}")
        config = self._load(more)
        return self._memory(config, measure(config, self._findings.model.directory), self._compiled(config))

    def with_rollout(self, more: Sequence[str]) -> Memory:
        """The verdict with `more` overrides that change no program."""
        config = self._load(more)
        return self._memory(config, measure(config, self._findings.model.directory), self._findings.programs)

    def _compiled(self, config: RunConfig) -> list[CompiledProgram]:
        directory = self._findings.model.directory
        return programs.compile_programs(config, directory, topology=topology_of(config), progress=self._progress)

    @staticmethod
    def _memory(config: RunConfig, sizes: ModelSizes, compiled: Sequence[CompiledProgram]) -> Memory:
        return assess(config, sizes, compiled, generation_of(config).hbm_bytes)
