"""`dry_run=true`: what a run would do, with the numbers, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_tpu.config.schema import RunConfig
from rl_tpu.data import describe_source, files_exist
from rl_tpu.orchestrator.inputs import missing_files, read_inputs
from rl_tpu.orchestrator.placement import environments, plan


def describe(config: RunConfig, run_dir: Path) -> None:
    """Print placement, batch arithmetic and files.

    Raises:
        UserError: files that are there are broken.
    """
    console = Console(highlight=False, width=160)
    console.print(f"dry run of [bold]{config.name}[/bold]; run directory {run_dir}", soft_wrap=True)
    console.print(_placement(config))
    for line in _environments(config):
        console.print(line, soft_wrap=True, markup=False)
    console.print(_arithmetic(config))
    console.print(_files(config))
    missing = missing_files(config)
    if missing:
        console.print("not on this machine: " + "; ".join(missing), soft_wrap=True)
    console.print("nothing was started")


def _placement(config: RunConfig) -> Table:
    cluster = config.cluster
    kind = " ".join(filter(None, (cluster.device, cluster.generation)))
    chips = f"{cluster.hosts} host(s) x {cluster.chips_per_host} chips x {cluster.devices_per_chip} device(s)"
    table = Table(title=f"Placement: {kind}, {chips}", title_justify="left")
    for column in ("role", "host", "chips", "devices", "processes"):
        table.add_column(column)
    rank = engine = 0
    for slot in plan(config):
        if slot.role == "trainer":
            what = f"trainer ranks {rank}-{rank + slot.devices - 1}" if slot.devices > 1 else f"trainer rank {rank}"
            rank += slot.devices
        else:
            what, engine = f"engine {engine}, tensor parallel {slot.devices}", engine + 1
        table.add_row(slot.role, str(slot.host), ", ".join(map(str, slot.chips)), str(slot.devices), what)
    return table


def _environments(config: RunConfig) -> Iterator[str]:
    """What the processes of each part are told of their chips: once what they share, then what each has of its own."""
    hosts = config.cluster.hosts
    parts = environments(config, ["localhost"] if hosts == 1 else [f"HOST{host}" for host in range(hosts)])
    yield from _part("trainer rank", parts.trainer)
    for engine, workers in enumerate(parts.engines):
        yield from _part(f"engine {engine} worker", workers)


def _part(name: str, processes: Sequence[dict[str, str]]) -> Iterator[str]:
    if not any(processes):
        return
    same = {key for key in processes[0] if len({process[key] for process in processes}) == 1}
    shared = " ".join(f"{key}={processes[0][key]}" for key in processes[0] if key in same)
    yield f"{name}s 0-{len(processes) - 1}: {shared}"
    for number, process in enumerate(processes):
        own = " ".join(f"{key}={value}" for key, value in process.items() if key not in same)
        yield f"  {name} {number}: {own}"


def _arithmetic(config: RunConfig) -> Table:
    rollout, trainer = config.rollout, config.trainer
    minibatches, epochs = config.algorithm.minibatches, config.algorithm.epochs
    samples = config.samples_per_step
    longest = config.max_sample_tokens
    lines = {
        "samples per step": f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} answers = {samples}",
        "samples per optimizer step": f"{samples} / {minibatches} minibatch(es) = {samples // minibatches}",
        "samples per data rank": f"{samples // minibatches} / {config.data_ranks} of {config.trainer_ranks} rank(s) ="
        f" {samples // minibatches // config.data_ranks} per optimizer step",
        "longest sample": f"{config.data.max_prompt_tokens} prompt + {rollout.max_response_tokens} response ="
        f" {longest} tokens; rows of {', '.join(map(str, trainer.row_tokens))}; engine context {rollout.context_tokens}",
        "largest step": f"{samples} x {longest} = {samples * longest:,} tokens",
        "optimizer steps": f"{trainer.steps} steps x {minibatches} minibatch(es) x {epochs} epoch(s) ="
        f" {trainer.steps * minibatches * epochs:,}",
        "samples in the run": f"{trainer.steps} x {samples} = {trainer.steps * samples:,}",
        "staleness": f"at most {rollout.max_staleness} policy version(s)",
    }
    table = Table(title="Batch arithmetic", title_justify="left", show_header=False)
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def _files(config: RunConfig) -> Table:
    table = Table(title="Files", title_justify="left")
    for column in ("what", "path", "here"):
        table.add_column(column, overflow="fold")
    model = Path(config.model.path).expanduser()
    if model.exists():
        inputs = read_inputs(config) if not missing_files(config) else None
        table.add_row("model", str(model), "yes")
        found = inputs.found if inputs else {}
    else:
        makes = f"no; will be made by {config.model.make}" if config.model.make else "no"
        table.add_row("model", str(model), makes)
        found = {}
    for place, source in config.prompt_sources.items():
        if place in found:
            here = str(found[place])
        elif source.kind == "file":
            here = "yes" if files_exist(source) else "no"
        else:
            here = f"{source.size:,} problems of part {source.part}, to be generated"
        table.add_row(place, describe_source(source), here)
    return table
