"""What the Python tool answers, and what becomes of programs that do not stay within their limits. Real processes."""

from __future__ import annotations

import asyncio
import os
import resource
import time

import pytest
from sandboxes import answer, answers, ask, left_over, own_temporary_directory  # noqa: F401

from rl_tpu.environments.tools.python import Python

TIMEOUT_S = 4.0
"""Of the programs here."""
OVERHEAD_S = 4.0
"""What starting and ending may take on a busy machine."""


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("6 * 7", "42"),
        ("print('a')\nprint('b')", "a\nb"),
        ("x = 3\nprint('x is')\nx ** 2", "x is\n9"),
        ("def double(n):\n    return 2 * n\n\n[double(n) for n in range(4)]", "[0, 2, 4, 6]"),
        ("None", ""),
        ("", ""),
        ("import sys\nprint('to stderr', file=sys.stderr)\nprint('ü 数')", "to stderr\nü 数"),
        ("import math, fractions\nmath.comb(10, 3) + fractions.Fraction(1, 2)", "Fraction(241, 2)"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)"),
        ("import sys\nsys.exit(0)", ""),
        ("open('a', 'w').write('kept')\nopen('a').read()", "'kept'"),
        ("import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()", "1"),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 5\nasyncio.run(f())", "5"),
        ("__name__", "'__main__'"),
    ],
)
def test_a_program_is_answered_like_a_cell_of_a_notebook(program, text):
    found = answer(program)
    assert (found.text, found.failed) == (text, False)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero (line 2)"),
        ("def f():\n    return [][1]\nf()", "IndexError: list index out of range (line 2)"),
        ("x = (", "SyntaxError: '(' was never closed (line 1)"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' (line 1)"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines (line 1)"),
        ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "E: <exception str() failed> (line 4)"),
        ("input()", "EOFError: EOF when reading a line (line 1)"),
        ("import sys\nsys.exit(3)", "The program ended with exit code 3."),
        ("import sys\nsys.exit('no use')", "no use\nThe program ended with exit code 1."),
        ("import os\nprint('before')\nos._exit(7)", "before\nThe program ended with exit code 7."),
        ("import os\nos.kill(os.getpid(), 9)", "The program was ended by SIGKILL."),
        ("import os\nos.kill(os.getpid(), 40)", "The program was ended by signal 40."),
        ("print(1)\nexit(3)", "1\nThe program ended with exit code 3."),
        ("import ctypes\nctypes.string_at(0)", "The program was ended by SIGSEGV."),
        ("import os\nos.abort()", "The program was ended by SIGABRT."),
        ("def f():\n    f()\nf()", "RecursionError: maximum recursion depth exceeded (line 2)"),
        ("'\\ud800' + '1'\nprint('\\ud800')\n[][0]", "?\nIndexError: list index out of range (line 3)"),
    ],
)
def test_a_program_that_fails_says_so_in_its_last_line(program, text):
    found = answer(program)
    assert (found.text, found.failed) == (text, True)


HOSTILE = {
    "loops": ("while True: pass", f"The program was stopped after {TIMEOUT_S:g} s."),
    "sleeps": ("print('soon')\nimport time\ntime.sleep(60)", f"soon\nThe program was stopped after {TIMEOUT_S:g} s."),
    "ignores signals": (
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        f"The program was stopped after {TIMEOUT_S:g} s.",
    ),
    "closes its output and goes on": (
        "import os, time\nprint('bye')\nos.close(1)\nos.close(2)\ntime.sleep(60)",
        f"bye\nThe program was stopped after {TIMEOUT_S:g} s.",
    ),
    "prints 100 MB": (
        "for _ in range(1000): print('x' * 100_000)",
        "x" * 2000 + "\nThe program printed more than 2000 characters; the rest is cut off.",
    ),
    "returns 100 MB": (
        "'x' * 100_000_000",
        "'" + "x" * 1999 + "\nThe program printed more than 2000 characters; the rest is cut off.",
    ),
    "allocates 10 GB": ("x = bytearray(10 ** 10)", "MemoryError (line 1)"),
    "allocates bit by bit": ("x = []\nwhile True: x.append(bytearray(10 ** 7))", "MemoryError (line 2)"),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
    "starts a shell": (
        "import subprocess\nsubprocess.Popen('sleep 60', shell=True, start_new_session=True)",
        "PermissionError: [Errno 1] Operation not permitted (line 2)",
    ),
    "becomes another program": (
        "import os\nos.execv('/bin/sleep', ['sleep', '60'])",
        "PermissionError: [Errno 1] Operation not permitted (line 2)",
    ),
    "fills the disk": (
        "data = bytes(10 ** 6)\nfor n in range(10 ** 6): open(str(n), 'wb').write(data)",
        "The program was stopped: its files take more than 16 MB, or are too many.",
    ),
    "makes many files": (
        "for n in range(10 ** 7): open(str(n), 'w').close()",
        "The program was stopped: its files take more than 16 MB, or are too many.",
    ),
    "writes one large file": (
        "with open('a', 'wb', buffering=0) as file:\n    while True: file.write(bytes(10 ** 6))",
        "OSError: [Errno 27] File too large (line 2)",
    ),
    "opens many files": (
        "files = []\nwhile True: files.append(open('a', 'w'))",
        "OSError: [Errno 24] Too many open files: 'a' (line 2)",
    ),
}


def test_each_ends_within_its_budget_and_costs_only_its_own_call():
    """All at the same time, with honest programs between them."""
    honest = [f"sum(range({n}))" for n in range(1, 9)]
    programs = [program for program, _ in HOSTILE.values()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = answers(*programs, *honest, timeout_s=TIMEOUT_S, workers=len(programs) + len(honest))
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    )  # kilobytes: no output is kept in memory
    for (name, (_, text)), got in zip(HOSTILE.items(), found[: len(programs)], strict=True):
        assert (got.text, got.failed) == (text, True), name
        assert got.seconds < TIMEOUT_S + OVERHEAD_S, name
    assert [(got.text, got.failed) for got in found[len(programs) :]] == [
        (str(sum(range(n))), False) for n in range(1, 9)
    ]


def test_threads_are_bounded_by_memory():
    program = (
        "import threading, time\nfor n in range(1000):\n    print(n)\n"
        "    threading.Thread(target=time.sleep, args=(9,)).start()"
    )
    found = answer(program, timeout_s=1.5)
    assert found.failed
    assert "can't start new thread" in found.text or "stopped after" in found.text
    assert "\n200\n" not in found.text
    assert found.seconds < TIMEOUT_S + OVERHEAD_S


def test_no_more_than_so_many_run_at_a_time_and_all_are_answered():
    started = time.monotonic()
    found = answers(*["import time\ntime.sleep(0.3)\n1"] * 6, workers=2)
    assert time.monotonic() - started > 0.9
    assert [got.text for got in found] == ["1"] * 6


def test_the_time_of_a_program_counts_from_its_start_not_from_the_call():
    found = answers(*["import time\ntime.sleep(0.6)\n1"] * 3, workers=1, timeout_s=1.0)
    assert [got.text for got in found] == ["1"] * 3
    assert found[2].seconds > 1.8


def test_the_same_program_answers_the_same():
    program = "hash('a'), list({'a', 'b', 'c', 'd'})"
    first, second = answers(program, program)
    assert first.text == second.text


def test_packages_are_found_only_if_they_are_allowed():
    program = "import numpy as np\nfloat(np.linalg.inv(np.eye(3) * 2).sum())"
    assert answer(program).text == "ModuleNotFoundError: No module named 'numpy' (line 1)"
    assert answer(program, site_packages=True, timeout_s=30.0).text == "1.5"


def test_a_cancelled_call_ends_its_program():
    async def run() -> None:
        tool = Python(timeout_s=30)
        await tool.open()
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tool.call(code="while True: pass"), 0.5)
            cancelled = time.monotonic()
            while any(name.startswith("process") for name in left_over()):
                assert time.monotonic() - cancelled < 5
                await asyncio.sleep(0.02)
            assert (await ask(tool, "1")).text == "1"
        finally:
            await tool.close()

    asyncio.run(run())
    assert not left_over()


def test_a_tool_that_was_never_opened_can_be_closed():
    asyncio.run(Python().close())


def test_nothing_is_inherited(monkeypatch, tmp_path):
    """Not the environment, not open files, not the working directory."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        found = answer(
            "import os\nfds = []\nfor fd in range(64):\n    try:\n        fds.append(os.fstat(fd) and fd)\n"
            "    except OSError: pass\nprint(fds)\nprint(sorted(os.environ))\nprint(os.listdir())"
        )
    descriptors, names, files = found.text.splitlines()
    assert len(eval(descriptors)) <= 4  # standard input, output and errors, and /dev/null once more
    assert set(eval(names)) <= {"HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "LD_LIBRARY_PATH"} | {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    }
    assert files == "[]"
