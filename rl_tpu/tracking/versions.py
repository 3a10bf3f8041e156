"""What exactly ran: versions of the packages and the commit of the checkout."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from rl_tpu import __version__

_ROOT = Path(__file__).resolve().parents[2]


def package_versions() -> dict[str, str]:
    """Versions of Python, rl_tpu (with the commit, if this is a checkout) and every installed package it asks for."""
    versions = {"python": platform.python_version(), "rl_tpu": __version__}
    try:
        names = {re.match(r"[\w.-]+", line).group() for line in metadata.requires("rl_tpu") or []}
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        names = set()
    if commit := _git_commit():
        versions["rl_tpu"] += f" ({commit})"
    for name in sorted(names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an extra that this machine does not have
            continue
    return versions


def _git_commit() -> str | None:
    """Commit of the checkout this package lies in, with ``+changes`` if files differ from it; None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # Installed into an environment inside somebody else's checkout, that checkout's commit would be a lie.
        if Path(git("rev-parse", "--show-toplevel")) != _ROOT:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
