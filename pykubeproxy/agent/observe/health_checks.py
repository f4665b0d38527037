"""The health check ports of Services with externalTrafficPolicy Local (healthCheckNodePort)."""

import heapq
import ipaddress
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from pykubeproxy import http
from pykubeproxy.agent.notices import Notice, SyncReport, SyncsEnded
from pykubeproxy.agent.observe.events import Recorder
from pykubeproxy.config import Config
from pykubeproxy.http.server import Server
from pykubeproxy.objects import Family, Key, Node
from pykubeproxy.pages.kube_proxy import ServiceHealthPage, ServiceReference
from pykubeproxy.rules.context import node_ips, node_port_networks
from pykubeproxy.services.ports import PortName

log = structlog.get_logger()


_EVERY_ADDRESS = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - load balancers connect from outside
# Load balancers probe each Service's port every few seconds.
_CONNECTIONS = 64
# File descriptors for other things: about 160 connections of clients, watches, netlink, pipes to commands.
_RESERVE = 256
_LIMIT_REACHED = "the agent may not open more files; raise its limit of open files"
# A namespace gets more only while it has fewer than this many times the places that are left.
_SHARE = 8


class HealthCheck(NamedTuple):
    """A Service's health check port, and the number of its ready endpoints on this node."""

    port: int
    local_endpoints: int


class DesiredChecks:
    """Track which health checks to serve, from the syncs of all families. Call from the loop thread only."""

    def __init__(self) -> None:
        self._ports: dict[tuple[Family, PortName], tuple[int, frozenset[str]]] = {}

    def sync_succeeded(self, report: SyncReport) -> None:
        """Update the service ports of one sync."""
        for name in report.gone:
            self._ports.pop((report.family, name), None)
        quarantined = {port.port_name for port in report.quarantined}
        for item in report.resolved:
            key = (report.family, item.port.name)
            if item.port.health_check_node_port:
                # A quarantined port counts as one without endpoints: a load balancer should use another node.
                verdicts = () if item.port.name in quarantined else item.selection.verdicts
                endpoints = (verdict.endpoint for verdict in verdicts)
                ready = frozenset(
                    resolved.endpoint.address
                    for resolved in endpoints
                    if resolved.local and resolved.endpoint.ready
                )
                self._ports[key] = item.port.health_check_node_port, ready
            else:
                self._ports.pop(key, None)

    def checks(self) -> dict[Key, HealthCheck]:
        """Return the check of each Service.

        An address counts once over all service ports, and a pod with addresses of both families once.
        """
        addresses: dict[tuple[Key, Family], set[str]] = {}
        ports: dict[Key, int] = {}
        for (family, name), (port, ready) in self._ports.items():
            ports[name.service_key] = port
            addresses.setdefault((name.service_key, family), set()).update(ready)
        return {
            key: HealthCheck(port, max(len(addresses.get((key, family), ())) for family in Family))
            for key, port in ports.items()
        }


def listening_hosts(
    config: Config, node: Node | None, local_addresses: Mapping[Family, Iterable[str]]
) -> tuple[str, ...]:
    """Return the addresses that serve node ports, as hosts for `Server.listen`.

    `local_addresses` are those of this node's interfaces, by served family. A family without networks in
    nodePortAddresses is served on all addresses; see `node_port_networks` for "primary".
    """
    hosts: list[str] = []
    for family, addresses in local_addresses.items():
        cidrs = node_port_networks(config, node_ips(config, node)[family], family)
        networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
        if not networks or any(network.prefixlen == 0 for network in networks):
            hosts.append(_EVERY_ADDRESS[family])
        else:
            local = sorted({ipaddress.ip_address(address) for address in addresses}, key=int)
            hosts += [str(address) for address in local if any(address in network for network in networks)]
    return ("",) if set(hosts) == set(_EVERY_ADDRESS.values()) else tuple(hosts)


class _CheckListener(NamedTuple):
    service: Key
    port: int
    host: str


class HealthChecks:
    """Serve the health checks of Services on all addresses that serve node ports. Call from the loop thread only.

    Report a failed bind once, in the log and as an event on the Service; `retry` tries again. `healthy` returns whether
    the proxy itself is healthy. No port opens before `serve`.
    """

    def __init__(
        self,
        config: Config,
        families: Iterable[Family],
        recorder: Recorder,
        healthy: Callable[[], bool],
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._healthy = healthy
        self._wanted = DesiredChecks()
        # The addresses of this node as of the last sync of each family.
        self._addresses: dict[Family, tuple[str, ...]] = dict.fromkeys(families, ())
        self._server: Server | None = None
        # Replaced, never changed: server threads read it.
        self._checks: Mapping[Key, HealthCheck] = {}
        self._most_listeners = 0
        self._served: set[Key] = set()
        self._unserved: list[Key] = []
        self._desired: set[_CheckListener] = set()
        self._close: dict[_CheckListener, Callable[[], None]] = {}
        self._reported: set[_CheckListener | Key] = set()
        self._limited = False  # and the limit was logged

    def serve(self, open_files: int) -> None:
        """Open ports from now on. Of the `open_files` that the process may open, leave enough for everything else.

        If they do not suffice for all Services, each namespace gets a fair share, and an event on the others says so.
        """
        self._most_listeners = open_files - min(_RESERVE, open_files // 2)
        self._server = Server("health-checks", http.Limits(connections=_CONNECTIONS))

    def notice(self, notice: Notice) -> None:
        """Follow the syncs of all families, and serve what they require when they have ended."""
        match notice:
            case SyncReport():
                self._wanted.sync_succeeded(notice)
                self._addresses[notice.family] = notice.local_addresses
            case SyncsEnded(node=node):
                hosts = listening_hosts(self._config, node, self._addresses)
                self.apply(self._wanted.checks(), hosts)

    def apply(self, checks: Mapping[Key, HealthCheck], hosts: Iterable[str]) -> None:
        """Serve exactly these checks, on these hosts."""
        self._checks = dict(checks)
        hosts = tuple(hosts)
        self._served = fair_share(checks, self._served, self._most_listeners // max(1, len(hosts)))
        self._unserved = sorted(checks.keys() - self._served)
        self._desired = {
            _CheckListener(key, checks[key].port, host) for key in self._served for host in hosts
        }
        for listener in self._close.keys() - self._desired:
            self._close.pop(listener)()
        self._reported &= {*self._desired, *self._unserved}
        self._open()

    def retry(self) -> None:
        """Open the ports that are not open yet; call every syncPeriod."""
        if self._limited and not self._unserved:
            self._limited = False
            log.info("health check ports no longer limited")
        self._open()

    def close(self) -> None:
        """Close all ports."""
        if self._server:
            self._server.close()

    def _open(self) -> None:
        if not self._server:
            return
        for listener in sorted(self._desired - self._close.keys()):
            page = partial(self._answer, listener.service)
            try:
                self._close[listener] = self._server.listen(listener.host, listener.port, page)
            except OSError as error:
                if listener not in self._reported:
                    self._reported.add(listener)
                    self._report(listener, error.strerror or str(error))
            else:
                self._reported.discard(listener)
        self._report_unserved()

    def _report(self, listener: _CheckListener, reason: str) -> None:
        service, port, host = listener
        fields = {"service": str(service), "address": host or "all", "port": port}
        log.error("health check bind failed, retrying", about=service, **fields, reason=reason)
        self._record(service, port, reason)

    def _record(self, service: Key, port: int, reason: str) -> None:
        what = f'failed to start healthcheck "{service}" on port {port}: {reason}'
        self._recorder.on_service(service, "FailedToStartServiceHealthcheck", what, "Listen")

    def _report_unserved(self) -> None:
        if self._unserved and not self._limited:
            self._limited = True
            log.error(
                "health check ports limited",
                served=len(self._served),
                unserved=len(self._unserved),
                reason=_LIMIT_REACHED,
            )
        for service in [key for key in self._unserved if key not in self._reported]:
            self._reported.add(service)
            self._record(service, self._checks[service].port, _LIMIT_REACHED)

    def _answer(self, service: Key, _: http.Request) -> http.Response:
        check, healthy = self._checks.get(service), self._healthy()
        count = check.local_endpoints if check else 0
        content = ServiceHealthPage(ServiceReference(service.namespace, service.name), count, healthy)
        return http.Response(
            json.dumps(msgspec.to_builtins(content), indent="\t").encode(),
            http.JSON,
            200 if count and healthy else 503,
            (("X-Load-Balancing-Endpoint-Weight", str(count)),),
        )


def fair_share(candidates: Iterable[Key], holders: Set[Key], places: int) -> set[Key]:
    """Return the Services that get a place; holders keep theirs as long as there are enough places.

    The others get one in turn, first those of the namespace with fewest. One namespace alone gets 8 of 9 places, and
    those that come later find places too.
    """
    candidates = set(candidates)
    chosen = candidates & holders
    if len(chosen) > places:
        chosen = fair_share(chosen, set(), places)
    waiting: dict[str, list[Key]] = {}
    for key in sorted(candidates - chosen, reverse=True):
        waiting.setdefault(key.namespace, []).append(key)
    held = Counter(key.namespace for key in chosen)
    queue = [(held[namespace], namespace) for namespace in waiting]
    heapq.heapify(queue)
    while queue:
        number, namespace = queue[0]
        if number >= _SHARE * (places - len(chosen)):
            break
        chosen.add(waiting[namespace].pop())
        if waiting[namespace]:
            heapq.heapreplace(queue, (number + 1, namespace))
        else:
            heapq.heappop(queue)
    return chosen
