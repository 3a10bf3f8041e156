"""What preflight found: tables on the console, and the same in preflight.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_tpu.orchestrator.preflight.advice import Advice
from rl_tpu.orchestrator.preflight.environment import Check
from rl_tpu.orchestrator.preflight.memory import Memory
from rl_tpu.orchestrator.preflight.model import ModelSizes, ModelSource
from rl_tpu.tpu.report import CompiledProgram
from rl_tpu.tracking.versions import package_versions

WIDTH_OF_A_LOG = 160
STYLES = {"ok": "green", "failed": "bold red", "note": "yellow", "skipped": "dim"}


@dataclass
class Findings:
    """Everything that preflight found, in the order in which it does."""

    name: str
    """Of the run."""
    model_path: str
    model: ModelSource
    sizes: ModelSizes
    topology: str | None
    """What was compiled for; None where nothing is compiled ahead of time."""
    checks: list[Check] = field(default_factory=list)
    programs: list[CompiledProgram] = field(default_factory=list)
    memory: Memory | None = None
    advice: list[Advice] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    """Programs that a run has and `preflight.only` left out."""
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Everything compiles and fits, and no check of the machine failed."""
        machine = all(check.status != "failed" for check in self.checks)
        programs = self.topology is None or (self.memory is not None and self.memory.fits and not self.left_out)
        return machine and programs

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fits": self.fits,
            "topology": self.topology,
            "model": {
                "path": self.model_path,
                "config": str(self.model.directory / "config.json"),
                "bundled": self.model.bundled,
                "parameters": self.sizes.parameters,
            },
            "environment": [asdict(check) for check in self.checks],
            "programs": [program.to_json() for program in self.programs],
            "memory": self.memory.to_json() if self.memory else None,
            "left_out": list(self.left_out),
            "advice": [asdict(each) for each in self.advice],
            "seconds": round(self.seconds, 1),
            "versions": package_versions(),
        }


def make_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_LOG
    return console


def model_lines(findings: Findings) -> list[str]:
    """What the sizes are counted from."""
    config, bundled = findings.model.directory / "config.json", " (bundled: the model itself is not on this machine)"
    lines = [
        f"model {findings.model_path}: {findings.sizes.parameters:,} parameters by {config}"
        + bundled * findings.model.bundled
    ]
    return lines + ([f"compiling for {findings.topology}"] if findings.topology else [])


def environment_table(checks: Sequence[Check]) -> Table:
    table = Table("check", "", "found", title="The machine", title_justify="left")
    table.columns[2].overflow = "fold"
    for check in checks:
        table.add_row(check.name, f"[{STYLES[check.status]}]{check.status}[/]", check.detail)
    return table


def program_table(programs: Sequence[CompiledProgram], topology: str) -> Table:
    """One line per program and row length; memory, work and time are those of one device."""
    table = Table(title=f"Programs for {topology}, per device", title_justify="left")
    table.add_column("program")
    for column in (
        "compile",
        "arguments",
        "temporary",
        "output",
        "total",
        "TFLOP",
        "GB moved",
        "peak flops",
        "bandwidth",
    ):
        table.add_column(column, justify="right")
    table.add_column("collectives", overflow="fold")
    for program in programs:
        if program.error is not None:
            table.add_row(program.label, _compile(program), "[bold red]does not compile[/]", *[""] * 8)
            continue
        sizes = (program.argument_bytes, program.temporary_bytes, program.output_bytes, program.total_bytes)
        table.add_row(
            program.label,
            _compile(program),
            *map(_gib, sizes),
            _scaled(program.flops, 1e12),
            _scaled(program.bytes_accessed, 1e9),
            _milliseconds(program.compute_s),
            _milliseconds(program.memory_s),
            ", ".join(f"{count} {kind} {size / 1e9:.3g} GB" for kind, (count, size) in program.collectives.items())
            or "none",
        )
    return table


def memory_table(memory: Memory) -> Table:
    """A trainer device under each program, and a rollout device."""
    table = Table(title="Memory of one device, GiB", title_justify="left")
    table.add_column("device")
    for column in ("weights", "gradients", "optimizer", "reference", "activations", "KV cache", "in all", "limit"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for each in memory.trainer:
        parts = [each.parts.get(name) for name in ("weights", "gradients", "moments", "reference", "activations")]
        verdict = "[green]fits[/]" if each.fits else "[bold red]does not fit[/]"
        table.add_row(f"trainer, {each.program}", *map(_gib, parts), "", _gib(each.peak), _gib(each.limit), verdict)
    rollout = memory.rollout
    in_all = rollout.weights + rollout.kv_bytes
    verdict = "[green]fits[/]" if rollout.fits else "[bold red]does not fit[/]"
    numbers = (_gib(rollout.kv_bytes), _gib(in_all), _gib(rollout.limit * rollout.static_share))
    table.add_row("rollout", _gib(rollout.weights), "", "", "", "", *numbers, verdict)
    return table


def rollout_lines(memory: Memory) -> list[str]:
    """What the engines' memory means in tokens and samples."""
    rollout = memory.rollout
    share = (
        f"{rollout.static_share:g} of the device"
        + " (assumed; mem_fraction_static is not set)" * rollout.static_share_is_assumed
    )
    lines = [
        f"engines: {rollout.kv_tokens:,} tokens of key-value cache each ({rollout.kv_bytes_per_token:,} bytes a token and"
        f" device) in {share}: {rollout.kv_tokens // rollout.context_tokens} samples of the full {rollout.context_tokens:,}"
        f" tokens, or {rollout.requests} half as long"
    ]
    if rollout.fits and rollout.kv_tokens < rollout.wanted_tokens:
        lines.append(
            f"engines: rollout.max_running_requests asks for more: {rollout.wanted_tokens:,} tokens at half the context each;"
            " the others wait, or are computed again"
        )
    return lines


def verdict_lines(findings: Findings) -> list[str]:
    """The end of the report, one sentence each."""
    lines = [f"{program.label} does not compile: {program.error}" for program in findings.programs if program.error]
    flags = sorted({flag for program in findings.programs for flag in program.compiler_flags})
    if flags:
        lines.append(
            f"libtpu fails on a program without these flags, so set them on the TPU: LIBTPU_INIT_ARGS={' '.join(flags)!r}"
        )
    for each in findings.advice:
        change = " ".join(each.overrides)
        result = "then it fits" if each.fits else "not enough"
        lines.append(f"{each.side}: {each.before}; with {change}: {each.after}: {result}")
    for side in dict.fromkeys(each.side for each in findings.advice):
        if not any(each.fits for each in findings.advice if each.side == side):
            lines.append(
                f"{side}: nothing that was tried suffices; more chips, a smaller model or shorter samples will"
            )
    if findings.left_out:
        lines.append(f"not compiled, by preflight.only: {', '.join(findings.left_out)}")
    failed = [check.name for check in findings.checks if check.status == "failed"]
    if failed:
        lines.append(f"the machine is not as the configuration needs it: {', '.join(failed)}")
    if findings.fits and findings.topology:
        lines.append("everything compiles and fits")
    elif findings.fits:
        lines.append("the machine is as the configuration needs it; nothing is compiled ahead of time for this device")
    else:
        lines.append("not ready")
    return lines


def _compile(program: CompiledProgram) -> str:
    return f"{program.compile_s:.0f} s" + (" (cached)" if program.cached else "")


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def _scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.4g}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.4g} ms"
