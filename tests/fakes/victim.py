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
from typing import Any

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, SERVICES
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.rules import names
from pykubeproxy.services.ports import PortName
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.process import inside_a_namespace, running
from tests.fakes.waiting import eventually

_PORT = PortName("default", "victim", "", "TCP")
_COMMANDS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
# Pauses in seconds. Those between the victim's changes are random, so that minSyncPeriod (1 s) delays each differently.
_BETWEEN_ACTS = 0.2
_BETWEEN_CHANGES = (0.1, 1.1)


def dual_stack(*addresses: str) -> dict[str, object]:
    """Return the fields of a Service for its cluster IPs of both families."""
    families = {"ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack"}
    return {"clusterIP": addresses[0], "clusterIPs": list(addresses), **families}


class Victim:
    """default/victim at port 80 of 10.96.9.9 and fd00:96::9:9, and an agent that serves it.

    `api` has its objects and those that a test creates. `log` is the agent's log, `pid` its process. Up to 250 changes.
    """

    def __init__(self, api: FaultyApiServer, backend: str, log: Path) -> None:
        self.api, self.backend, self.log, self.pid = api, backend, log, 0
        self._count = 1
        # Most of a change is the rest of a minSyncPeriod of 1 s.
        self._usual = 1.0
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("victim", **dual_stack("10.96.9.9", "fd00:96::9:9")))
        self._slices = [api.store.create(self._slice(family)) for family in Family]
        # A lock of its own: listing rules does not delay the agent.
        self._environment = {**os.environ, "XTABLES_LOCKFILE": str(log.with_name("listing.lock"))}
        self._commands = {
            family: (f"{_COMMANDS[family]}-{backend}", "-w", "-t", "nat", "-S", names.cluster_chain(_PORT))
            for family in Family
        }

    def is_served(self) -> bool:
        """Return whether the rules lead to the current endpoint."""
        return all(map(self._has, Family))

    def change(self) -> float:
        """Replace the victim's endpoint and return after how many seconds its rules have the new one."""
        self._count += 1
        begun = time.monotonic()
        self._slices = [
            self.api.store.replace(made | {"endpoints": self._slice(family)["endpoints"]})
            for family, made in zip(Family, self._slices, strict=True)
        ]
        eventually(self.is_served)
        return time.monotonic() - begun

    def median_while(self, act: Callable[[], None], changes: int = 5) -> float:
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
                times.append(self.change())
        finally:
            ended.set()
            thread.join()
        return statistics.median(times)

    def measure(self) -> None:
        """Measure the usual time of a change: that while another tenant changes an ordinary Service."""
        self.api.store.create(service("neighbour", clusterIP="10.96.9.8"))
        made = self.api.store.create(slice_of("neighbour", "10.244.8.1"))
        count = itertools.count()

        def act() -> None:
            nonlocal made
            endpoints = slice_of("neighbour", f"10.244.8.{next(count) % 250}")["endpoints"]
            made = self.api.store.replace(made | {"endpoints": endpoints})

        self._usual = max(self._usual, self.median_while(act))
        self.api.store.delete(SERVICES, "default", "neighbour")
        self.api.store.delete(ENDPOINT_SLICES, "default", "neighbour")

    def assert_usual(self, seconds: float, factor: float = 1.0) -> None:
        """Fail if a change took more than three times the usual time, measured again if the machine may be slower now."""
        if seconds > 3 * factor * self._usual:
            self.measure()
        assert seconds <= 3 * factor * self._usual

    def assert_undisturbed(self, act: Callable[[], None], factor: float = 1.0) -> None:
        """Fail if changes take more than three times the usual time while another tenant calls `act` all the time."""
        self.assert_usual(self.median_while(act), factor)

    def _endpoint(self, family: Family) -> str:
        return f"10.244.9.{self._count}" if family is Family.IPV4 else f"fd00:244:9::{self._count}"

    def _slice(self, family: Family) -> dict[str, Any]:
        made = slice_of("victim", self._endpoint(family))
        metadata = made["metadata"] | {"name": f"victim-{family.value.lower()}"}
        return made | {"metadata": metadata, "addressType": family.value}

    def _has(self, family: Family) -> bool:
        command = self._commands[family]
        listed = subprocess.run(command, capture_output=True, text=True, env=self._environment)
        target = address_and_port(self._endpoint(family), 8080)
        return names.endpoint_chain(_PORT, target) in listed.stdout


@contextmanager
def victim(
    backend: str,
    folder: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    server_address: str = "127.0.0.1",
    before: Callable[[Victim], object] = lambda made: None,
) -> Iterator[Victim]:
    """Run an agent that serves the victim, in a network namespace for the test; `folder` gets its log.

    Call `before` before the agent starts, to create objects. The API server listens at `server_address`, which becomes
    an address of that namespace.
    """
    log = folder / "agent.log"
    settings = {"XTABLES_LOCKFILE": str(folder / "lock"), **(environment or {})}
    with inside_a_namespace(server_address), server(address=server_address) as api:
        made = Victim(api, backend, log)
        before(made)
        common = ("--hostname-override=node1", f"--iptables-backend={backend}", "--master", api.url)
        with running(log, *common, *flags, environment=settings) as process:
            made.pid = process.pid
            eventually(made.is_served)
            yield made
