"""How libtpu is told that there is no device to look for: imported before it is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask the cloud which machine it is on, and wait
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling takes no chip: others may compile, or compute


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Within it, what libraries write to the process's standard error is dropped; their exceptions say what went wrong."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
