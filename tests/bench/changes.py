"""Single changes, each with a pause before it, and the seconds until a connection shows them."""

import time
from collections.abc import Callable, Generator
from contextlib import closing

from tests.bench import workload
from tests.bench.program import Place
from tests.bench.served import until_reached

# A proxy writes nothing for minSyncPeriod after a sync.
_PAUSE = 1.6


def within(seconds: float, changes: Callable[[int], Generator[float]]) -> tuple[float, ...]:
    """Return as many seconds of changes as fit into this time, at least one."""
    deadline, taken = time.monotonic() + seconds, []
    with closing(changes(int(seconds / _PAUSE) + 1)) as series:
        for value in series:
            taken.append(value)
            if time.monotonic() > deadline:
                break
    return tuple(taken)


def changed_endpoints(there: Place, count: int, limit: float) -> Generator[float]:
    """Give one endpoint of another Service each time another address; yield the seconds until a connection reaches it.

    Raise TimedOut. Restore the endpoints at the end.
    """
    cluster, size = there.cluster, there.cluster.size
    try:
        for number in range(count):
            service, address = number * size.services // count, workload.new_pod(number)
            time.sleep(_PAUSE)
            written = time.monotonic()
            cluster.replace(service, {size.endpoints // 2: address})
            yield until_reached(there, service, {address}, written, limit)
    finally:
        cluster.restore()


def new_services(there: Place, count: int, limit: float) -> Generator[float]:
    """Create Services one by one; yield the seconds until a connection to the new one succeeds.

    Raise TimedOut. Their EndpointSlices exist before: a proxy writes a Service that has no endpoints yet, and then pauses.
    Delete all of them at the end.
    """
    cluster, size = there.cluster, there.cluster.size
    numbers = range(size.services, size.services + count)
    slices = [item for number in numbers for item in workload.slices(size, number)]
    services = [workload.cluster_ip_service(number) for number in numbers]
    try:
        cluster.create(*slices)
        for number, service in zip(numbers, services, strict=True):
            time.sleep(_PAUSE)
            written = time.monotonic()
            cluster.create(service)
            pods = {workload.pod(number * size.endpoints + i) for i in range(size.endpoints)}
            yield until_reached(there, number, pods, written, limit)
    finally:
        cluster.delete(*services, *slices)
