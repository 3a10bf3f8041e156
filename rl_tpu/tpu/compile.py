"""Programs compiled by libtpu for a topology that need not be here: does it compile, and what does it take."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from rl_tpu.devices.generations import Generation
from rl_tpu.tpu import hlo
from rl_tpu.tpu.flops import count_flops
from rl_tpu.tpu.jit import jit
from rl_tpu.tpu.offline import silent_libraries
from rl_tpu.tpu.partition import Partition, jax_dtype
from rl_tpu.tpu.report import CompiledProgram
from rl_tpu.tpu.torch_tpu import PINNED
from rl_tpu.tpu.traffic import Traffic, count_traffic
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.programs import Program, Value

GRANTED = 0.975
"""Share of a device's memory that the compiler lets a program use: 94.74 of 96 GiB on TPU7x, 31.25 of 32 on v6e."""
FAILURE = "No feasible span count for single input all reduce scatter fusion"
"""libtpu 0.0.52 gives up on some shapes, for example on the embedding of Qwen3-0.6B over four devices ..."""
WITHOUT_FAILURE = {"xla_tpu_enable_all_reduce_scatter_fusion": False}
"""... and compiles them without that fusion."""
LONGEST_ERROR = 400
"""Characters of a compiler's message that are kept."""


class TpuCompiler:
    """libtpu's compiler for devices of one topology.

    Args:
        topology: libtpu's name, for example `TPU7x:2x2x1`.
        ranks: how many of its devices a program is divided over.
        tensor: how many of these share every matrix.
        cache: directory that keeps results by program, topology and versions.
    """

    def __init__(self, topology: str, generation: Generation, ranks: int, tensor: int = 1, cache: Path | None = None):
        self.topology, self._generation, self._cache = topology, generation, cache
        with silent_libraries():  # libtpu looks for a host with chips
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        self.partition = Partition.over(devices[:ranks], tensor)
        self._ranks = ranks

    def compile(self, program: Program, layout: StackedLayout, rows: int, row_tokens: int | None) -> CompiledProgram:
        """The compiler's figures for one device, or its error."""
        with jax.enable_x64(True):
            lowered = jit(program, layout, self.partition).lower(*map(self._operand, program.operands))
            key = self._key(lowered.as_text())
            if (found := self._cached(key)) is not None:
                return found
            started = time.perf_counter()
            flags: dict[str, bool] = {}
            error, figures = self._attempt(program, lowered, flags)
            if error and FAILURE in error:
                flags = WITHOUT_FAILURE
                error, figures = self._attempt(program, lowered, flags)
            seconds = time.perf_counter() - started
        result = CompiledProgram(
            name=program.name,
            rows=rows,
            row_tokens=row_tokens,
            error=error,
            compile_s=seconds,
            cached=False,
            limit_bytes=int(self._generation.hbm_bytes * GRANTED),
            compiler_flags=tuple(f"--{name}={str(value).lower()}" for name, value in flags.items()),
            program_hash=key,
            **figures,
        )
        self._remember(result)
        return result

    def _attempt(self, program: Program, lowered: Any, flags: dict[str, bool]) -> tuple[str | None, dict[str, Any]]:
        """The compiler's error, if any, and its figures."""
        with tempfile.TemporaryDirectory() as directory:
            try:
                executable = lowered.compile(compiler_options=hlo.written_to(directory) | flags)
            except jax.errors.JaxRuntimeError as failure:
                return shortened(str(failure)), _nothing()
            try:
                traffic = count_traffic(hlo.text_in(directory))
            except ValueError:  # another libtpu may write another text, which says nothing about the program
                traffic = Traffic(None, {})
            return None, self._figures(program, executable, traffic)

    def _figures(self, program: Program, executable: Any, traffic: Traffic) -> dict[str, Any]:
        memory = executable.memory_analysis()
        sizes = {
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
        }
        accessed = traffic.bytes_accessed
        one_device = self.partition.manual and any(value.kind == "row" for value in program.operands)
        flops = count_flops(program.graph) / (1 if one_device else self._ranks)
        return sizes | {
            "total_bytes": sum(sizes.values()) - 2 * sizes["alias_bytes"],
            "flops": flops,
            "bytes_accessed": accessed,
            "collectives": traffic.collectives,
            "compute_s": flops / self._generation.peak_flops,
            "memory_s": accessed / self._generation.hbm_bandwidth if accessed is not None else None,
        }

    def _operand(self, value: Value) -> jax.ShapeDtypeStruct:
        """All devices' operand, of which a program over rows may name one device's."""
        shares = self.partition.mesh.shape["data"] if value.kind == "row" and self.partition.manual else 1
        rows = (value.shape[0] * shares,) if shares > 1 else value.shape[:1]
        return jax.ShapeDtypeStruct((*rows, *value.shape[1:]), jax_dtype(value.dtype))

    def _key(self, text: str) -> str:
        figures = [field.name for field in fields(CompiledProgram)]  # another version may write others
        about = json.dumps([self.topology, self._ranks, sorted(PINNED.items()), figures])
        return hashlib.blake2b((about + text).encode(), digest_size=16).hexdigest()

    def _cached(self, key: str) -> CompiledProgram | None:
        path = self._cache and self._cache / f"{key}.json"
        if not path or not path.exists():
            return None
        return replace(CompiledProgram.from_json(json.loads(path.read_text())), cached=True)

    def _remember(self, result: CompiledProgram) -> None:
        if self._cache:
            self._cache.mkdir(parents=True, exist_ok=True)
            path = self._cache / f"{result.program_hash}.json"
            path.with_suffix(".part").write_text(json.dumps(result.to_json()))
            path.with_suffix(".part").rename(path)


def _nothing() -> dict[str, Any]:
    names = ("argument", "temporary", "output", "alias", "total")
    figures = {f"{name}_bytes": None for name in names}
    return figures | {"flops": None, "bytes_accessed": None, "collectives": {}, "compute_s": None, "memory_s": None}


def shortened(message: str) -> str:
    """What a compiler's message says is wrong, without its status code and where to read more."""
    text = " ".join(message.split())
    text = re.sub(r"^(?:[A-Z_]+: )?(?:E\d+: )?", "", text)
    text = re.split(r" (?:HLO module:|See https)", text)[0]
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 3] + "..."
