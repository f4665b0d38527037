"""A Service whose changes are timed while another tenant attacks the agent."""

import itertools
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.lab.apiserver import SERVICES
from pykubeproxy.rules import names
from pykubeproxy.services.ports import PortName
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import eventually
from tests.fakes.process import inside_a_namespace, running

_PORT = PortName("default", "victim", "", "TCP")
# Pauses in seconds. Those between the victim's changes are random, so that minSyncPeriod (1 s) delays each differently.
_BETWEEN_ACTS = 0.2
_BETWEEN_CHANGES = (1.0, 2.0)


class Victim:
    """default/victim at 10.96.9.9:80, and an agent that serves it next to the objects that a test creates in `api`.

    `log` is the agent's log, `pid` its process. Up to 250 changes.
    """

    def __init__(self, api: FaultyApiServer, backend: str, log: Path) -> None:
        self.api, self.log, self.pid = api, log, 0
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("victim", clusterIP="10.96.9.9"))
        self._slice = api.store.create(slice_of("victim", "10.244.9.1"))
        # A lock of its own: listing rules does not delay the agent.
        self._environment = {**os.environ, "XTABLES_LOCKFILE": str(log.with_name("listing.lock"))}
        self._command = (f"iptables-{backend}", "-w", "-t", "nat", "-S", names.cluster_chain(_PORT))
        self._count = 1

    def is_served(self) -> bool:
        """Return whether the rules lead to the current endpoint."""
        return self._has(self._address())

    def change(self, seconds: float = 120.0) -> float:
        """Replace the victim's endpoint and return after how many seconds its rules have the new one."""
        self._count += 1
        endpoints = slice_of("victim", self._address())["endpoints"]
        begun = time.monotonic()
        self._slice = self.api.store.replace(self._slice | {"endpoints": endpoints})
        eventually(self.is_served, seconds)
        return time.monotonic() - begun

    def median_while(self, act: Callable[[], None], changes: int = 8, seconds: float = 120.0) -> float:
        """Return the median time of some changes, in seconds, while another tenant calls `act` all the time."""
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(_BETWEEN_ACTS):
                act()

        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            times = []
            for _ in range(changes):
                time.sleep(random.uniform(*_BETWEEN_CHANGES))
                times.append(self.change(seconds))
        finally:
            ended.set()
            thread.join()
        return statistics.median(times)

    def allowed(self, changes: int = 8) -> float:
        """Return twice the usual median time, in seconds: that while another tenant changes an ordinary Service.

        Most of it is the rest of a minSyncPeriod of 1 s, which is 0.5 s on average; few changes may show less.
        """
        self.api.store.create(service("neighbour", clusterIP="10.96.9.8"))
        made = self.api.store.create(slice_of("neighbour", "10.244.8.1"))
        count = itertools.count()

        def act() -> None:
            nonlocal made
            endpoints = slice_of("neighbour", f"10.244.8.{next(count) % 250}")["endpoints"]
            made = self.api.store.replace(made | {"endpoints": endpoints})

        median = self.median_while(act, changes)
        self.api.store.delete(SERVICES, "default", "neighbour")
        return 2 * max(median, 0.5)

    def _address(self) -> str:
        return f"10.244.9.{self._count}"

    def _has(self, address: str) -> bool:
        listed = subprocess.run(self._command, capture_output=True, text=True, env=self._environment)
        return names.endpoint_chain(_PORT, f"{address}:8080") in listed.stdout


@contextmanager
def victim(
    backend: str,
    folder: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    server_address: str = "127.0.0.1",
) -> Iterator[Victim]:
    """Run an agent that serves the victim, in a network namespace for the test; `folder` gets its log.

    The API server listens at `server_address`, which becomes an address of that namespace.
    """
    log = folder / "agent.log"
    settings = {"XTABLES_LOCKFILE": str(folder / "lock"), **(environment or {})}
    with inside_a_namespace(server_address), server(address=server_address) as api:
        made = Victim(api, backend, log)
        common = ("--hostname-override=node1", f"--iptables-backend={backend}", "--master", api.url)
        with running(log, *common, *flags, environment=settings) as process:
            made.pid = process.pid
            eventually(made.is_served, 30)
            yield made
