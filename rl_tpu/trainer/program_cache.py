"""The directory in which the ranks' compilers keep programs from run to run (`trainer.execution.cache`).

The compilers tell programs apart themselves; a directory below it for every set of versions and every topology keeps those
apart that no run will ask for again. All ranks get the same one, from the driver.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_tpu import __version__
from rl_tpu.config.compose import cache_directory
from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import UserError


def directory(config: RunConfig) -> Path | None:
    """Where the programs of a run with `config` are kept: named by versions and topology. None: nowhere."""
    cache, cluster = config.trainer.execution.cache, config.cluster
    if cache is None:
        return None
    root = Path(cache_directory(), "programs") if cache == "auto" else Path(cache)
    about = {
        "versions": [("rl_tpu", __version__)]
        + [(package, _version(package)) for package in get_device(cluster.device).compiler_packages],
        "topology": [cluster.device, cluster.generation, cluster.hosts, config.trainer_ranks],
    }
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()
    return root.expanduser().resolve() / key


def environment(config: RunConfig) -> dict[str, str]:
    """What a rank must know of it before it compiles anything."""
    kept = directory(config)
    return {} if kept is None else {get_device(config.cluster.device).program_cache_variable: str(kept)}


def check_writable(config: RunConfig) -> None:
    """Make the directory, on this host. Raises UserError where nothing can be written into it."""
    if (kept := directory(config)) is None:
        return
    try:
        kept.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
    except OSError as error:
        raise UserError(
            f"trainer.execution.cache {config.trainer.execution.cache}: {kept} cannot be written ({error.strerror}): name"
            " another directory, auto, or null for none"
        ) from None


def summary(config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """One line on what the step with these metrics compiled and found; None where no programs are kept."""
    if (kept := directory(config)) is None:
        return None
    compiled = int(metrics["train/cache_misses"])
    if "train/cache_hits" not in metrics:
        return f"programs: {compiled} new in the cache {kept}"
    return f"programs: {compiled} compiled, {int(metrics['train/cache_hits'])} from the cache {kept}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
