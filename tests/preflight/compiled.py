"""Results of compiling as a test wants them; here no compiler is asked."""

from __future__ import annotations

from typing import Any

from rl_tpu.tpu.report import CompiledProgram

GIB = 2**30


def compiled(name: str, total: int | None, limit: int = 94 * GIB, **more: Any) -> CompiledProgram:
    """A program of so many bytes in all (None: it did not compile), temporaries only unless `more` says otherwise."""
    figures = {
        "argument_bytes": 0,
        "temporary_bytes": total,
        "output_bytes": 0,
        "alias_bytes": 0,
        "total_bytes": total,
        "flops": 1e12,
        "bytes_accessed": 1e9,
        "compute_s": 0.01,
        "memory_s": 0.002,
    }
    if total is None:
        figures = dict.fromkeys(figures)
    fixed = {
        "name": name,
        "rows": 0 if name == "update" else 4,
        "row_tokens": None if name == "update" else 22528,
        "error": "CompileTimeHbmOom: 107.64G exceeds 94.74G" if total is None else None,
        "compile_s": 1.0,
        "cached": False,
        "limit_bytes": limit,
        "collectives": {"all-gather": (2, 1000)},
        "compiler_flags": (),
        "program_hash": f"{name}-{total}",
    }
    return CompiledProgram(**fixed | figures | more)
