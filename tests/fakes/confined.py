"""Run an agent like a restricted container: few capabilities, read-only root, no new privileges."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.process import PROGRAM

# Make all mounts read-only in a new mount namespace, including /proc/sys, as a container runtime does. Only the locks of
# the legacy tables and of agents stay writable, as in the DaemonSet.
_CONFINE = r"""
set -eu
lock=$1; capabilities=$2; shift 2
mount --bind "$lock" "$lock"
mkdir -p /run/pykubeproxy
mount --bind /run/pykubeproxy /run/pykubeproxy
mount --bind /proc/sys /proc/sys
cut -d' ' -f5 /proc/self/mountinfo | while read -r place; do
    case $place in
    "$lock" | /run/pykubeproxy | /dev | /dev/* | /proc) ;;
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
    """Run an agent with only these capabilities, such as net_admin; write its log to a file."""
    lock.touch()
    bounding = "".join(f",+{it}" for it in capabilities)
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
        bounding,
    ]
    extra = {"XTABLES_LOCKFILE": str(lock), **(environment or {})}
    with log.open("wb") as errors:
        process = subprocess.Popen([*command, *PROGRAM, *flags], stderr=errors, env={**os.environ, **extra})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def capabilities_of(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return all capabilities a process has or may get, as bits, and whether no_new_privs is set."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    bits = 0
    for name in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd"):
        bits |= int(fields[name], 16)
    return bits, fields["NoNewPrivs"] == "1"
