"""The status of an agent: the values behind /statusz, its JSON form and `pykubeproxy status`."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.frontend import Frontend, policy_frontends
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import Reason, ResolvedPort, Verdict


class Sync(msgspec.Struct, frozen=True, rename="camel"):
    """One sync of one family: its end in seconds since 1970, its duration, the rules written, and the failure or ""."""

    time: float
    family: str
    full: bool
    seconds: float
    rules: int = 0
    failure: str = ""


class Repair(msgspec.Struct, frozen=True, rename="camel"):
    """A repair of drift, its end in seconds since 1970, and the seconds since the drift was detected.

    `writers` are the processes that may have caused it, with process IDs of the first process namespace, if known.
    """

    time: float
    family: str
    seconds: float
    drift: tuple[TableDrift, ...]
    writers: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Return the drift as text: "nat: 2 chains, 7 rules missing; 1 rule added"."""
        return ", ".join(f"{drift.table}: {drift}" for drift in self.drift)


class Unwatched(msgspec.Struct, frozen=True, rename="camel"):
    """Objects whose watch has failed since `since`, in seconds since 1970."""

    objects: str
    since: float
    reason: str


class FamilyStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One family as of its last successful sync, at `last_updated` in seconds since 1970, None before the first.

    `overdue`: a change has waited too long for a sync, or syncs keep failing. `contested`: another program keeps
    undoing the rules. `rejected_tree`: why iptables rejects the dispatch tree, so that a flat chain takes its place; "" if
    it does not. `endpoints` are all endpoints of its services, used or not; `rules` counts our rules by table.
    """

    family: str
    overdue: bool
    last_updated: float | None = None
    services: int = 0
    endpoints: int = 0
    rules: Mapping[str, int] = {}
    quarantined: tuple[Quarantined, ...] = ()
    contested: bool = False
    rejected_tree: str = ""


class EndpointStatus(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """An endpoint, its share of new connections (0 to 1), and the reason."""

    address: str
    port: int
    share: float
    used: bool
    state: str


class PortStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A service port in one family under one traffic policy, with the addresses that this policy applies to."""

    namespace: str
    name: str
    port: str
    protocol: str
    family: str
    policy: str
    frontends: tuple[Frontend, ...]
    endpoints: tuple[EndpointStatus, ...]

    @property
    def title(self) -> str:
        """The name used in rules and logs: namespace/name:port."""
        return str(PortName(self.namespace, self.name, self.port, self.protocol))


class Filter(msgspec.Struct, frozen=True, rename="camel"):
    """Select services by namespace and name, where not empty, and return at most `limit` of them."""

    namespace: str = ""
    service: str = ""
    limit: int = 200


class Status(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An agent at one moment.

    Keys may be added. Times are seconds since 1970.

    - `healthy`, `ready`, `alive`: the results of /healthz, /readyz and /livez
    - `unavailable_families`: IP families that this node cannot serve, with the reason
    - `pending_services`, `pending_endpoints`: the number of Services that changed since the last sync, themselves or
      in their endpoints
    - `syncs`: the last syncs, oldest first
    - `repairs`: the last repairs of drift, oldest first
    - `unwatched`: objects whose watch fails, so that the rules do not follow their changes
    - `waits_for`: the agent that manages the rules while this one waits to take over; "" if this one manages them
    - `waiting`: other agents that wait to take over when this one ends
    - `matching`: the number of Services that match the filter
    - `services`: the ports of these Services, at most `limit` Services
    - `busy`: a sync is running, so `services` is empty
    """

    api_version: str = API_VERSION
    version: str
    node: str
    backend: str
    started: float
    now: float
    healthy: bool
    ready: bool
    alive: bool
    node_eligible: bool
    families: tuple[FamilyStatus, ...]
    unavailable_families: Mapping[str, str] = {}
    pending_services: int = 0
    pending_endpoints: int = 0
    syncs: tuple[Sync, ...] = ()
    repairs: tuple[Repair, ...] = ()
    unwatched: tuple[Unwatched, ...] = ()
    waits_for: str = ""
    waiting: tuple[str, ...] = ()
    filter: Filter = Filter()
    matching: int = 0
    services: tuple[PortStatus, ...] = ()
    busy: bool = False


def encode(status: Status) -> bytes:
    """Return the status as JSON."""
    return msgspec.json.encode(status)


def decode(text: bytes) -> Status:
    """Read the output of `encode`. Raises ValueError for any other text or version."""
    try:
        status = msgspec.json.decode(text, type=Status)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if status.api_version != API_VERSION:
        raise ValueError(f"its API version is {status.api_version}, not {API_VERSION}")
    return status


def port_statuses(resolved: ResolvedPort, family: str) -> Iterator[PortStatus]:
    """Yield the status of a service port under each traffic policy that applies to one of its frontends."""
    port, verdicts = resolved.port, resolved.selection.verdicts
    for policy, local in (("Cluster", False), ("Local", True)):
        if frontends := policy_frontends(port, local):
            reasons = [(verdict, verdict.local if local else verdict.cluster) for verdict in verdicts]
            yield PortStatus(
                namespace=port.name.namespace,
                name=port.name.service,
                port=port.name.port,
                protocol=port.name.protocol,
                family=family,
                policy=policy,
                frontends=frontends,
                endpoints=tuple(_endpoints(reasons)),
            )


def _endpoints(reasons: Sequence[tuple[Verdict, Reason | None]]) -> Iterator[EndpointStatus]:
    used = sum(1 for _, reason in reasons if reason and reason.used)
    for verdict, reason in reasons:
        if reason:
            address, _, port = verdict.endpoint.target.rpartition(":")
            share = round(1 / used, 9) if reason.used else 0.0
            yield EndpointStatus(address.strip("[]"), int(port), share, reason.used, reason.value)
