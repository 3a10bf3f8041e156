"""The confined process: it binds itself, then runs the policy's program like a cell of a notebook.

Started by `rl_tpu.environments.tools.sandbox`, alone in its interpreter: it imports nothing but the standard library and
the modules beside it. Reads from standard input a line with the bounds as JSON and then the program; writes to standard
output first one line, `READY` or what the kernel lacks, then whatever the program writes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import sys
import traceback

from confinement import Bounds, Missing, confine

READY = "confined"
SAID_WHY = 86
NAME = "<program>"


def main() -> None:
    with open(0, "rb", closefd=False) as source:
        bounds = Bounds(**json.loads(source.readline()))
        code = source.read().decode()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + bounds.packages
    try:
        confine(bounds)
    except Missing as missing:
        print(missing, flush=True)
        sys.exit(1)
    print(READY, flush=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # what was written before a time-out is kept
    try:
        run(code)
    except SystemExit:
        raise
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            print(describe(error), file=sys.__stderr__, flush=True)
        sys.exit(SAID_WHY)


def run(code: str) -> None:
    """Execute the program; if its last statement is an expression, print its value unless that is None."""
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    builtins.exit = builtins.quit = sys.exit  # which the module `site` makes elsewhere
    names = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(tree, NAME, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
        if value is not None:
            print(repr(value))


def describe(error: BaseException) -> str:
    """The error in one line, with the program's line where it happened."""
    said = " ".join(traceback.format_exception_only(error)[-1].split())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    if isinstance(error, SyntaxError) and error.filename == NAME:
        lines = [error.lineno]
    return f"{said} (line {lines[-1]})" if lines else said


if __name__ == "__main__":
    main()
