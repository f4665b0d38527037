"""The healthCheckNodePort servers: they tell load balancers whether a Service has endpoints on this node."""

import ipaddress
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import structlog

from pykubeproxy.agent import http
from pykubeproxy.agent.http_server import Server
from pykubeproxy.agent.observe.events import Recorder, port_taken
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.config import Config
from pykubeproxy.objects import Family, Key, Node, family_of
from pykubeproxy.rules.context import node_ips
from pykubeproxy.services.ports import PortName

_EVERY_ADDRESS = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - balancers ask from outside
# Balancers ask each Service's port every few seconds, and there may be many of both.
_CONNECTIONS = 64

log = structlog.get_logger()


class Check(NamedTuple):
    """What a Service's health check port is, and how many endpoints on this node are ready."""

    port: int
    local_endpoints: int


class Wanted:
    """The health checks that follow from the syncs of all families. For one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[Family, PortName], tuple[int, frozenset[str]]] = {}

    def follow(self, report: Report) -> None:
        """Take in what one sync of one family looked at."""
        for name in report.gone:
            self._known.pop((report.family, name), None)
        aside = {it.name for it in report.aside}
        for item in report.served:
            where = (report.family, item.port.name)
            if item.port.health_check_node_port:
                # Who is refused here is better off with another node.
                verdicts = () if item.port.name in aside else item.selection.verdicts
                backends = (verdict.backend for verdict in verdicts)
                ready = frozenset(b.endpoint.address for b in backends if b.local and b.endpoint.ready)
                self._known[where] = item.port.health_check_node_port, ready
            else:
                self._known.pop(where, None)

    def checks(self) -> dict[Key, Check]:
        """The port of each Service and its ready endpoints here: distinct addresses over all service ports.

        A pod of two families counts once.
        """
        addresses: dict[tuple[Key, Family], set[str]] = {}
        ports: dict[Key, int] = {}
        for (family, name), (port, ready) in self._known.items():
            ports[name.service_key] = port
            addresses.setdefault((name.service_key, family), set()).update(ready)
        return {
            key: Check(port, max(len(addresses.get((key, family), ())) for family in Family))
            for key, port in ports.items()
        }


def listening_hosts(
    config: Config, node: Node | None, local_addresses: Mapping[Family, Iterable[str]]
) -> tuple[str, ...]:
    """Where node ports are to be had, as hosts for `Server.listen`.

    `local_addresses` are those of this node's interfaces, in the families that are served. All addresses of a family
    unless nodePortAddresses names some of it; "primary" stands for the node's own.
    """
    if config.node_port_addresses == ("primary",):
        wanted = tuple(node_ips(config, node)[family] for family in local_addresses)
    else:
        wanted = config.node_port_addresses
    hosts: list[str] = []
    for family, addresses in local_addresses.items():
        networks = [ipaddress.ip_network(it) for it in wanted if family_of(it) is family]
        if not networks or any(network.prefixlen == 0 for network in networks):
            hosts.append(_EVERY_ADDRESS[family])
        else:
            found = sorted({ipaddress.ip_address(address) for address in addresses}, key=int)
            hosts += [str(it) for it in found if any(it in network for network in networks)]
    return ("",) if set(hosts) == set(_EVERY_ADDRESS.values()) else tuple(hosts)


class HealthChecks:
    """Listens for the health checks of Services, wherever node ports are served.

    A port that cannot be had is told once, in the log and as an event on the Service, and tried again by `retry`.
    `healthy` says whether the proxy itself is well. `apply` and `retry` are for one thread.
    """

    def __init__(self, node_name: str, recorder: Recorder, healthy: Callable[[], bool]) -> None:
        self._node_name = node_name
        self._recorder = recorder
        self._healthy = healthy
        self._server = Server("health-checks", _CONNECTIONS)
        self._lock = threading.Lock()
        self._checks: Mapping[Key, Check] = {}
        self._wanted: set[tuple[Key, int, str]] = set()
        self._open: dict[tuple[Key, int, str], Callable[[], None]] = {}
        self._told: set[tuple[Key, int, str]] = set()

    def apply(self, checks: Mapping[Key, Check], hosts: Iterable[str]) -> None:
        """Serve exactly these checks from now on, at these hosts."""
        with self._lock:
            self._checks = dict(checks)
        hosts = tuple(hosts)
        self._wanted = {(key, check.port, host) for key, check in checks.items() for host in hosts}
        for place in self._open.keys() - self._wanted:
            self._open.pop(place)()
        self._told &= self._wanted
        self.retry()

    def retry(self) -> None:
        """Open what is still to be opened."""
        for place in sorted(self._wanted - self._open.keys()):
            key, port, host = place
            try:
                self._open[place] = self._server.listen(host, port, self._page(key))
            except OSError as error:
                self._tell(place, error.strerror or str(error))
            else:
                self._told.discard(place)

    def close(self) -> None:
        """Close all ports."""
        self._server.close()

    def _tell(self, place: tuple[Key, int, str], reason: str) -> None:
        if place not in self._told:
            self._told.add(place)
            key, port, host = place
            log.error(
                "a health check port cannot be served; it will be tried again",
                service=str(key),
                address=host or "all",
                port=port,
                reason=reason,
            )
            self._recorder.record(port_taken(self._node_name, key, port, reason))

    def _page(self, key: Key) -> http.Page:
        def page(_: http.Request) -> http.Answer:
            with self._lock:
                check = self._checks.get(key)
            return _answer(key, check.local_endpoints if check else 0, self._healthy())

        return page


def _answer(key: Key, count: int, healthy: bool) -> http.Answer:
    content = {
        "service": {"namespace": key.namespace, "name": key.name},
        "localEndpoints": count,
        "serviceProxyHealthy": healthy,
    }
    return http.Answer(
        json.dumps(content, indent="\t").encode(),
        http.JSON,
        200 if count and healthy else 503,
        (("X-Load-Balancing-Endpoint-Weight", str(count)),),
    )
