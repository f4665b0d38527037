"""The clients that session affinity remembers, in the lists of the iptables match `recent`."""

import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_ENTRY = re.compile(r"src=(\S+).*\blast_seen: (\d+)")
_JIFFIES = re.compile(r"^jiffies: (\d+)", re.MULTILINE)
# linux/jiffies.h: what the kernel counts from at its start, 300 seconds before 32 bits overflow.
_WRAP, _SECONDS_TO_WRAP = 1 << 32, 300
_RATES = (100, 250, 300, 1000)


def recent_lines(proc: Path = _PROC) -> Iterator[str]:
    """Yield a line for each client in each list, such as "KUBE-SEP-A: src=10.0.0.1 age=12", with its age in seconds.

    The age is missing if the kernel does not show its clock. Raises OSError without permission.
    """
    lists = proc / "thread-self/net/xt_recent"
    if not lists.is_dir():  # no rule has this match
        return
    clock = None
    for path in sorted(lists.iterdir()):
        for source, seen in _ENTRY.findall(path.read_text()):
            clock = clock or _clock(proc)
            age = f" age={max(0, clock[0] - int(seen)) // clock[1]}" if clock[0] else ""
            yield f"{path.name}: src={source}{age}"


def _clock(proc: Path) -> tuple[int, int]:
    """Return the kernel's jiffies and how many there are in a second; (0, 1) if that is unknown."""
    try:
        found = _JIFFIES.search((proc / "timer_list").read_text())
        uptime = float((proc / "uptime").read_text().split()[0])
    except OSError:
        return 0, 1
    if found is None:
        return 0, 1
    now = int(found[1])
    # At this rate the kernel would have started when it did.
    return now, min(_RATES, key=lambda rate: abs((now - _WRAP) / rate + _SECONDS_TO_WRAP - uptime))
