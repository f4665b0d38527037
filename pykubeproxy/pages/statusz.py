"""The status of an agent: the page /statusz as JSON, which `pykubeproxy status` reads."""

from collections.abc import Mapping

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.services.ports import Frontend, PortName


class SyncRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A sync that has ended.

    - `time`: its end, in seconds since 1970
    - `family`: "IPv4" or "IPv6"
    - `full`: it read the live tables and went through all Services
    - `seconds`: how long it took
    - `rules`: the rules that it wrote
    - `failure`: why it failed, "" if it succeeded
    """

    time: float
    family: str
    full: bool
    seconds: float
    rules: int = 0
    failure: str = ""


class RepairRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A repair of drift.

    - `time`: its end, in seconds since 1970
    - `family`: "IPv4" or "IPv6"
    - `seconds`: the time since the drift was detected
    - `drift`: what was restored in each table
    - `writers`: processes that may have caused the drift, with process IDs of the first process namespace, if known
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
    """Objects whose watch fails.

    - `objects`: such as "services"
    - `since`: when the watch began to fail, in seconds since 1970
    - `reason`: the latest error
    """

    objects: str
    since: float
    reason: str


class FamilyStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One IP family as of its last successful sync.

    - `family`: "IPv4" or "IPv6"
    - `overdue`: a change has waited too long for a sync, or syncs keep failing
    - `last_updated`: when the last successful sync ended, in seconds since 1970; null before the first
    - `services`: the number of Services with rules
    - `endpoints`: the number of their endpoints, used or not
    - `rules`: the number of our rules in each table
    - `quarantined`: service ports that are not served
    - `contested`: another program keeps undoing the rules
    - `rejected_tree`: why iptables rejects the dispatch tree, so that a flat chain takes its place; "" if it does not
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
    """An endpoint of a service port under one traffic policy.

    - `share`: its share of new connections, from 0 to 1
    - `used`: new connections may reach it
    - `state`: why it is used or not
    """

    address: str
    port: int
    share: float
    used: bool
    state: str


class PortStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A service port in one family under one traffic policy.

    - `name`: the name of the Service
    - `family`: "IPv4" or "IPv6"
    - `frontends`: the addresses and ports to which the policy applies
    - `endpoints`: all endpoints, used or not
    """

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


class PageFilter(msgspec.Struct, frozen=True, rename="camel"):
    """Which Services a client asks for.

    - `namespace`: their namespace; "" for all
    - `service`: their name; "" for all
    - `limit`: the highest number of Services to return
    """

    namespace: str = ""
    service: str = ""
    limit: int = 200


class AgentStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An agent at one moment.

    - `api_version`: of this document; keys may be added to it
    - `version`: of pykubeproxy
    - `node`: the name of the node
    - `backend`: of iptables, "nft" or "legacy"
    - `started`: when the agent started, in seconds since 1970
    - `now`: when it answered, in seconds since 1970
    - `healthy`: /healthz answers 200
    - `ready`: /readyz answers 200
    - `alive`: /livez answers 200
    - `node_eligible`: load balancers may send clients to this node
    - `families`: the IP families that this node serves
    - `unavailable_families`: IP families that this node cannot serve, with the reason
    - `pending_services`: the number of Services that changed since the last sync
    - `pending_endpoints`: the number of Services whose endpoints changed since then
    - `syncs`: the last syncs, oldest first
    - `repairs`: the last repairs of drift, oldest first
    - `unwatched`: objects whose watch fails, so that the rules do not follow their changes
    - `waits_for`: the agent that manages the rules while this one waits to take over; "" if this one manages them
    - `waiting`: other agents that wait to take over when this one ends
    - `filter`: the Services that the client asks for
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
    syncs: tuple[SyncRecord, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    unwatched: tuple[Unwatched, ...] = ()
    waits_for: str = ""
    waiting: tuple[str, ...] = ()
    filter: PageFilter = PageFilter()
    matching: int = 0
    services: tuple[PortStatus, ...] = ()
    busy: bool = False


def encode(status: AgentStatus) -> bytes:
    """Return the status as JSON."""
    return msgspec.json.encode(status)


def decode(text: bytes) -> AgentStatus:
    """Read the output of `encode`. Raises ValueError for any other text or version."""
    try:
        status = msgspec.json.decode(text, type=AgentStatus)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if status.api_version != API_VERSION:
        raise ValueError(f"its API version is {status.api_version}, not {API_VERSION}")
    return status
