"""The environment of programs on a node: the iptables commands of one backend, and recording what is written."""

import os
import shutil
from pathlib import Path

from pykubeproxy.lab.machine import SYSTEM_PATH

_FAMILIES = ("iptables", "ip6tables")
_COMMANDS = ("", "-save", "-restore")
# Copy the input of each iptables-restore to a file, in the order of the starts.
_RECORDER = """#!/bin/sh
file={folder}/$(date +%s%N).{family}
printf '%s\\n' "$*" > "$file.arguments"
tee "$file" | {real} "$@"
"""


def environment(backend: str, directory: Path, record: Path | None = None) -> dict[str, str]:
    """Return the environment of programs on a node: its own xtables lock, and `iptables` of this backend.

    With `record`, copies of all input of iptables-restore go into that folder. Raise FileNotFoundError if the backend's
    commands are missing.
    """
    commands = directory / f"bin-{backend}"
    if not commands.exists():
        commands.mkdir()
        for family in _FAMILIES:
            for command in _COMMANDS:
                (commands / f"{family}{command}").symlink_to(_real(family, backend, command))
    folders = [str(commands), SYSTEM_PATH]
    if record:
        folders.insert(0, str(_recorders(backend, record)))
    return {**os.environ, "PATH": ":".join(folders), "XTABLES_LOCKFILE": str(directory / "xtables.lock")}


def _real(family: str, backend: str, command: str) -> str:
    real = shutil.which(f"{family}-{backend}{command}", path=SYSTEM_PATH)
    if real is None:
        raise FileNotFoundError(f"{family}-{backend}{command} is not installed")
    return real


def _recorders(backend: str, record: Path) -> Path:
    """Return a folder with recording forms of iptables-restore; it lies beside the records."""
    folder = record.with_name(f"{record.name}-bin-{backend}")
    folder.mkdir(exist_ok=True)
    record.mkdir(exist_ok=True)
    for family in _FAMILIES:
        script = _RECORDER.format(folder=record, family=family, real=_real(family, backend, "-restore"))
        for name in (f"{family}-restore", f"{family}-{backend}-restore"):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
    return folder
