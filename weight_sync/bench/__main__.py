"""``python -m weight_sync.bench --payload qwen3_0_6b --transport shm,disk,disk_delta,ici --json out.json``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from weight_sync.bench import baselines, limits, report, transfer
from weight_sync.bench.payload import QWEN3, Payload
from weight_sync.bench.processes import WorkerError
from weight_sync.bench.timing import make_row
from weight_sync.errors import WeightSyncError
from weight_sync.transport import TRANSPORTS, find_transport

ALIASES = {"shm": "shared_memory"}
Row = dict[str, Any]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m weight_sync.bench", description=__doc__)
    add = parser.add_argument
    add("--payload", default="100MB", help=f"{', '.join(QWEN3)}, or a size such as 100MB (default: %(default)s)")
    add("--transport", default="shm,disk,disk_delta,ici", help="names or import paths, or none (default: %(default)s)")
    add("--senders", default="1", help="numbers of sender processes, for example 1,2 (default: %(default)s)")
    add("--receivers", default="1", help="numbers of receiver processes (default: %(default)s)")
    add("--repeats", type=int, default=5, help="rounds after one warm-up (default: %(default)s)")
    add("--changed", type=float, default=0.01, help="share of elements a round changes (default: %(default)s)")
    add("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where disk transports write (%(default)s)")
    add(
        "--baselines",
        default="",
        help="Python files or modules with other ways; FILE:TEXT takes those with TEXT in the name",
    )
    add("--no-limits", dest="limits", action="store_false", help="leave out the machine's limits")
    add("--timeout", type=float, default=600, help="deadline of every step in seconds (default: %(default)s)")
    add("--json", type=Path, help="write the rows there, after every measurement")
    add("--plot", type=Path, help="draw a chart there (PNG, SVG, PDF; needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        options.payload = Payload.parse(options.payload, options.changed)
        options.senders, options.receivers = _counts(options.senders), _counts(options.receivers)
        options.transport = _transports(options.transport)
        options.baselines = _baselines(options.baselines, options.payload)
    except (ValueError, WeightSyncError, ImportError, AttributeError, OSError) as error:
        parser.error(str(error))
    if not 0 <= options.changed <= 1 or options.repeats < 1:
        parser.error("--changed must lie between 0 and 1, --repeats must be at least 1")
    places = {"--directory": options.directory, "--json": options.json, "--plot": options.plot}
    for option, place in places.items():
        directory = place if option == "--directory" or place is None else place.parent
        if directory is not None and not directory.is_dir():
            parser.error(f"{option} {place}: {directory} is not a directory")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return options


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdigit()]
    if not counts or min(counts) < 1 or len(counts) != text.count(",") + 1:
        raise ValueError(f"numbers of processes must be given as in 1,2, not {text!r}")
    return counts


def _transports(text: str) -> list[str]:
    """Those that can be imported. Raises WeightSyncError for one that is no built-in."""
    found = []
    for name in [] if text == "none" else text.split(","):
        name = ALIASES.get(name, name)
        try:
            find_transport(name)
        except WeightSyncError as error:
            if name not in TRANSPORTS:
                raise
            _say(f"skipped {name}: {error}\n")
            continue
        found.append(name)
    return found


def _baselines(text: str, payload: Payload) -> list[tuple[str, str]]:
    """(file or module, name) of each."""
    found = []
    for part in text.split(",") if text else []:
        source, _, wanted = part.partition(":")
        names = [name for name in baselines.find(source, payload) if wanted in name]
        if not names:
            raise ValueError(f"{source} has no baseline with {wanted!r} in its name")
        found += [(source, name) for name in names]
    return found


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _progress(what: str) -> Callable[[str], None]:
    """Says what is measured, and on a terminal where it is, in one line that the next overwrites."""
    if sys.stderr.isatty():
        return lambda text: _say(f"\x1b[2K{what}: {text}\r")
    _say(f"{what}\n")
    return lambda text: None


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, one by one. A row whose measurement failed has ``error``."""
    payload, repeats, timeout_s = options.payload, options.repeats, options.timeout
    with tempfile.TemporaryDirectory(
        dir=options.directory, prefix="weight_sync-bench-", ignore_cleanup_errors=True
    ) as directory:
        if options.limits:
            try:
                yield from limits.measure(payload, Path(directory), repeats, timeout_s, _progress("limits"))
            except WorkerError as error:
                yield make_row("limit", "limits", payload.nbytes, [], error=str(error))
        for senders in options.senders:
            for receivers in options.receivers:
                yield from _transfers(options, Path(directory), senders, receivers)
        for source, name in options.baselines:
            yield _baseline(options, Path(directory), source, name)


def _transfers(options: argparse.Namespace, directory: Path, senders: int, receivers: int) -> Iterator[Row]:
    group = None
    try:
        for case in (case for name in options.transport for case in transfer.cases_of(name, senders)):
            progress = _progress(f"{report.name_of(case.transport, case.hashing)}, {senders} to {receivers}")
            try:
                if group is None:
                    progress("starting processes")
                    group = transfer.Group(options.payload, senders, receivers, directory, options.timeout)
                yield group.measure(case, options.repeats, progress)
            except WorkerError as error:
                if group is not None:
                    group.close()
                    group = None
                more = {"hashing": case.hashing, "error": str(error)}
                yield make_row("transport", case.transport, options.payload.nbytes, [], senders, receivers, **more)
    finally:
        if group is not None:
            group.close()


def _baseline(options: argparse.Namespace, directory: Path, source: str, name: str) -> Row:
    progress = _progress(f"baseline {name}")
    progress("starting processes")
    try:
        with closing(transfer.Group(options.payload, 1, 1, directory, options.timeout)) as group:
            return baselines.measure(group, source, name, options.repeats, progress)
    except WorkerError as error:
        return make_row("baseline", name, options.payload.nbytes, [], error=str(error))


def main(arguments: list[str] | None = None) -> int:
    """0 if all that was asked for was measured, 1 if something failed, 2 for wrong arguments."""
    options = parse(arguments)
    rows = []
    for row in measure(options):
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    _say("\x1b[2K" if sys.stderr.isatty() else "")
    print(report.table(rows))
    measured = [row for row in rows if "error" not in row]
    if options.plot and measured:
        report.draw(measured, options.plot)
    return 0 if measured and len(measured) == len(rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is open is closed
    sys.exit(main())
