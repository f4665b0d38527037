"""A process as a container of few rights has it: capabilities by name, a root that cannot be written, no new rights."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.process import PROGRAM

# What is mounted is made read-only in a mount namespace of its own, as a container runtime does, /proc/sys too; the
# lock of the legacy tables alone can be written, as it is with a DaemonSet that mounts it.
_CONFINE = r"""
set -eu
lock=$1; capabilities=$2; shift 2
mount --bind "$lock" "$lock"
mount --bind /proc/sys /proc/sys
cut -d' ' -f5 /proc/self/mountinfo | while read -r place; do
    case $place in
    "$lock" | /dev | /dev/* | /proc) ;;
    *) mount -o remount,bind,ro "$place" 2>/dev/null || echo "$place cannot be made read-only" >&2 ;;
    esac
done
if touch /read-only-root 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi
exec setpriv --bounding-set="-all$capabilities" --inh-caps=-all --ambient-caps=-all --no-new-privs -- "$@"
"""


@contextmanager
def confined(
    log: Path,
    lock: Path,
    capabilities: tuple[str, ...],
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A running agent with just these capabilities, such as net_admin, that writes its log there."""
    lock.touch()
    wanted = "".join(f",+{it}" for it in capabilities)
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        _CONFINE,
        "sh",
        str(lock),
        wanted,
    ]
    added = {"XTABLES_LOCKFILE": str(lock), **(environment or {})}
    with log.open("wb") as errors:
        process = subprocess.Popen([*command, *PROGRAM, *flags], stderr=errors, env={**os.environ, **added})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def rights(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """The capabilities that a process may use, or ever get, as bits; and whether it can get no new ones."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    bits = 0
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd"):
        bits |= int(told[name], 16)
    return bits, told["NoNewPrivs"] == "1"
