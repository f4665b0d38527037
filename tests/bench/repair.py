"""Measure the repair of a flushed table nat by connections."""

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.bench import connects, workload
from tests.bench.changes import TimedOut
from tests.bench.program import Place

# Try this many Services, evenly spread, with a pause after each pass: the processors are for the repair.
_SAMPLE, _PAUSE = 100, 0.02
_POLL_SECONDS = 0.001
# As many connections as the pods' backlog holds.
_DRAIN = 250


class Served(NamedTuple):
    """Seconds until half of the Services and until all of them accept connections."""

    half: float
    all: float


def after_flush(there: Place, check: Callable[[], None], limit: float) -> Served:
    """Flush table nat, and return when its Services serve again, counted from the moment they fail.

    `check` raises if the program ended. Raise TimedOut after `limit` seconds.
    """
    address = workload.vip(there.cluster.size.services // 2)
    with there.node.entered():
        command = ["iptables", "-t", "nat", "-F"]
        with subprocess.Popen(command, env=dict(there.environment)) as flush:
            while connects.reaches(address):
                if flush.poll():
                    raise RuntimeError(f"iptables -F failed with status {flush.returncode}")
                there.testbed.pods.drain()
                time.sleep(_POLL_SECONDS)
            failed = time.monotonic()
            served = until_served(there, failed, check, limit)
    return served


def until_served(there: Place, since: float, check: Callable[[], None], limit: float) -> Served:
    """Return the seconds from `since` until Services are reachable. Call it in the node's namespace."""
    last = there.cluster.size.services - 1
    count = min(_SAMPLE, last + 1)
    waiting = sorted({last * step // max(count - 1, 1) for step in range(count)})
    some, half = len(waiting), 0.0
    while waiting:
        check()
        waiting = list(_unreachable(there, waiting))
        now = time.monotonic() - since
        if not half and len(waiting) <= some / 2:
            half = now
        if now > limit:
            raise TimedOut(f"Services do not serve after {limit:.0f} s")
        if waiting:
            time.sleep(_PAUSE)
    # The sample serves: usually all do.
    rest = list(range(last + 1))
    while rest := list(_unreachable(there, rest)):
        now = time.monotonic() - since
        if now > limit:
            raise TimedOut(f"{len(rest)} Services do not serve after {limit:.0f} s")
    return Served(half, now)


def _unreachable(there: Place, services: list[int]) -> Iterator[int]:
    for number, service in enumerate(services):
        if not connects.reaches(workload.vip(service)):
            yield service
        if number % _DRAIN == 0:
            there.testbed.pods.drain()
    there.testbed.pods.drain()
