"""Wait until Services answer: after a start, a restart, a flushed table or a change."""

import http.client
import itertools
import re
import subprocess
import time
from collections.abc import Callable, Set

from tests.bench import connects, workload
from tests.bench.program import Place, Running

_LOOK_SECONDS = 0.001
_CHECK_SECONDS = 0.005
_PAGE_SECONDS = 0.1
_METRICS = ("127.0.0.1", 10249)
_SYNCED = re.compile(r"^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{[^}]*\} (\S+)$", re.MULTILINE)
_FAMILIES = 2


class TimedOut(RuntimeError):
    """Services did not answer within so many seconds."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} after {seconds:g} s")
        self.seconds = seconds


def until_served(there: Place, since: float, check: Callable[[], None], limit: float) -> float:
    """Return the seconds from `since` until the last Service answers; `check` raises if the program ended.

    Raise TimedOut. Before that, ask only a few Services, one at a time, so as not to disturb the program: it may
    write Services in any order. When they answer, connect once to each of all Services, in random order. Those that
    answer at once do not count, so that the time of these connections does not: a Service that has to be waited for
    would be among them unless all are served.
    """
    last = there.cluster.size.services - 1
    some = {last * step // 8 for step in range(9)} if last >= 0 else set()
    waiting = [*workload.KUBERNETES, *map(workload.vip, sorted(some))]
    pods = there.testbed.pods

    def pause() -> None:
        check()
        if time.monotonic() - since > limit:
            raise TimedOut("not all services answer", limit)
        time.sleep(_CHECK_SECONDS)

    with there.node.entered():
        while waiting:
            if connects.reaches(waiting[-1]):
                waiting.pop()
            else:
                pause()
        moment = time.monotonic()
        pods.drain()
        for batch in connects.batches(workload.shuffled(there.cluster.size)):
            missing = connects.unanswered(pods, batch)
            while missing:
                pause()
                missing = connects.unanswered(pods, missing)
                moment = time.monotonic()
    return moment - since


def until_synced(there: Place, process: Running, limit: float) -> float:
    """Return the seconds from the start of the process until it has synced both families and all Services answer.

    Raise TimedOut and Ended.
    """
    while len(times := _synced_at(there)) < _FAMILIES or not all(times):
        process.check()
        if time.monotonic() - process.started > limit:
            raise TimedOut("no sync succeeded", limit)
        time.sleep(_PAGE_SECONDS)
    synced = max(times) - time.time() + time.monotonic()
    until_served(there, process.started, process.check, limit)
    return synced - process.started


def _synced_at(there: Place) -> list[float]:
    """Return the time of the last successful sync of each family, in seconds since 1970, as in its metrics."""
    connection = http.client.HTTPConnection(*_METRICS, timeout=10)
    with there.node.entered():
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        except OSError:  # it does not listen yet
            return []
        finally:
            connection.close()
    return [float(value) for value in _SYNCED.findall(page)]


def after_flush(there: Place, check: Callable[[], None], limit: float) -> float:
    """Flush table nat, and return the seconds from the moment its Services fail until all answer. Raise TimedOut."""
    address = workload.vip(there.cluster.size.services // 2)
    with there.node.entered():
        command = ["iptables", "-t", "nat", "-F"]
        with subprocess.Popen(command, env=dict(there.environment)) as flush:
            while connects.reaches(address):
                if flush.poll():
                    raise RuntimeError(f"iptables -F failed with status {flush.returncode}")
                there.testbed.pods.drain()
                time.sleep(_LOOK_SECONDS)
            failed = time.monotonic()
    return until_served(there, failed, check, limit)


def until_reached(there: Place, service: int, wanted: Set[str], since: float, limit: float) -> float:
    """Return the seconds from `since` until a connection to a Service reaches one of these pods. Raise TimedOut.

    Pause only after as many connections as the Service has endpoints: they are spread over all of them.
    """
    pods, address, endpoints = there.testbed.pods, workload.vip(service), there.cluster.size.endpoints
    with there.node.entered():
        for number in itertools.count(1):
            if connects.reaches(address) and wanted & pods.drain():
                break
            if time.monotonic() - since > limit:
                raise TimedOut(f"no connection to {address} reaches the new endpoint", limit)
            if number % endpoints == 0:
                time.sleep(_LOOK_SECONDS)
    return time.monotonic() - since
