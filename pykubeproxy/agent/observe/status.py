"""What an agent tells of itself: the values behind the page /statusz, its JSON and `pykubeproxy status`."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.rules.damage import Damage
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.resolve import ResolvedPort
from pykubeproxy.services.selection import Reason, Verdict

# Stands for all of a node's own addresses.
ANY_LOCAL = "*"


class Sync(msgspec.Struct, frozen=True, rename="camel"):
    """One sync of one family.

    `time` is when it ended, in seconds since 1970; `seconds` how long it took; `rules` how many rules it wrote, and
    `failure` why it did not, or "".
    """

    time: float
    family: str
    full: bool
    seconds: float
    rules: int = 0
    failure: str = ""


class QuarantinedStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A service port that is not served, for iptables refuses its rules: `why` are its words.

    `since` is in seconds since 1970. `refuses`: new clients are refused; else not even that could be written.
    """

    namespace: str
    name: str
    port: str
    protocol: str
    why: str
    since: float
    refuses: bool

    @property
    def title(self) -> str:
        """As rules and logs name it: namespace/name:port."""
        return f"{self.namespace}/{self.name}{f':{self.port}' if self.port else ''}"


class Repair(msgspec.Struct, frozen=True, rename="camel"):
    """What others had done to our rules, and was put right.

    `time` is when that was, in seconds since 1970; `seconds` how long it took since it was noticed. `writers` are who it
    may have been, so far as the kernel tells, with process numbers of the first process namespace.
    """

    time: float
    family: str
    seconds: float
    damages: tuple[Damage, ...]
    writers: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Such as "nat: 2 chains, 7 rules gone; 1 rule added"."""
        return ", ".join(f"{damage.table}: {damage}" for damage in self.damages)


class Unwatched(msgspec.Struct, frozen=True, rename="camel"):
    """Objects that the API server could not be asked about since `since`, in seconds since 1970, and `why`."""

    objects: str
    since: float
    why: str


class FamilyStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One family as of its last sync that succeeded: `last_updated`, seconds since 1970, or None before the first.

    `overdue`: a change has been waiting for too long, or its sync keeps failing. `endpoints` are all there are of
    services, used or not; `rules` how many of ours each table holds. `set_aside` are service ports that are not served.
    `contested`: somebody undoes what is written, again and again.
    """

    family: str
    overdue: bool
    last_updated: float | None = None
    services: int = 0
    endpoints: int = 0
    rules: Mapping[str, int] = {}
    set_aside: tuple[QuarantinedStatus, ...] = ()
    contested: bool = False


class Frontend(msgspec.Struct, frozen=True, rename="camel"):
    """An address at which a service port is reached; "*" for a node port at all addresses that serve node ports."""

    kind: str
    address: str
    port: int


class EndpointStatus(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """An endpoint, the share of new connections that it gets (0 to 1), and why."""

    address: str
    port: int
    share: float
    used: bool
    state: str


class PortStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A service port in one family under one traffic policy; `frontends` are the addresses served by this policy."""

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
        """As rules and logs name it: namespace/name:port."""
        return f"{self.namespace}/{self.name}{f':{self.port}' if self.port else ''}"


class Filter(msgspec.Struct, frozen=True, rename="camel"):
    """Which services are to be told of; what is empty leaves all open. At most `limit` of them are."""

    namespace: str = ""
    service: str = ""
    limit: int = 200


class Status(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An agent at one moment.

    Its JSON form is documented by this type, with names in camel case. It is of version pykubeproxy/v1, in which keys
    may be added. Times are seconds since 1970.

    - `healthy`, `ready`, `alive`: what /healthz, /readyz and /livez answer
    - `lacking`: families that this node cannot serve, and why
    - `pending_services`, `pending_endpoints`: Services that changed since the last sync, by themselves or in their
      endpoints
    - `syncs`: the last ones, the oldest first
    - `repairs`: the last times that others had changed our rules, the oldest first
    - `unwatched`: what is not heard of from the API server, so that changes there are not followed
    - `matching`: how many services the filter leaves; `services` are the ports of the first of them
    - `busy`: a sync is running, and `services` had to be left out for it
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
    lacking: Mapping[str, str] = {}
    pending_services: int = 0
    pending_endpoints: int = 0
    syncs: tuple[Sync, ...] = ()
    repairs: tuple[Repair, ...] = ()
    unwatched: tuple[Unwatched, ...] = ()
    filter: Filter = Filter()
    matching: int = 0
    services: tuple[PortStatus, ...] = ()
    busy: bool = False


def encode(status: Status) -> bytes:
    """The status as JSON."""
    return msgspec.json.encode(status)


def decode(text: bytes) -> Status:
    """Read what `encode` wrote. Raises ValueError, with what is wrong, for other text and other versions."""
    try:
        status = msgspec.json.decode(text, type=Status)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if status.api_version != API_VERSION:
        raise ValueError(f"it is of version {status.api_version}, not {API_VERSION}")
    return status


def port_statuses(served: ResolvedPort, family: str) -> Iterator[PortStatus]:
    """One service port under each policy by which it has frontends."""
    port, verdicts = served.port, served.selection.verdicts
    cluster = [(verdict, verdict.cluster) for verdict in verdicts]
    local = [(verdict, verdict.local) for verdict in verdicts]
    for policy, reasons in (("Cluster", cluster), ("Local", local)):
        if frontends := tuple(_frontends(port, policy == "Local")):
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


def _frontends(port: ServicePort, local: bool) -> Iterator[Frontend]:
    if port.internal_local is local:
        yield Frontend("cluster-ip", port.cluster_ip, port.port)
    if port.external_local is local:
        yield from (Frontend("external-ip", address, port.port) for address in port.external_ips)
        yield from (Frontend("load-balancer-ip", address, port.port) for address in port.load_balancer_ips)
        if port.node_port:
            yield Frontend("node-port", ANY_LOCAL, port.node_port)


def _endpoints(reasons: Sequence[tuple[Verdict, Reason | None]]) -> Iterator[EndpointStatus]:
    used = sum(1 for _, reason in reasons if reason and reason.used)
    for verdict, reason in reasons:
        if reason:
            address, _, port = verdict.backend.target.rpartition(":")
            share = round(1 / used, 9) if reason.used else 0.0
            yield EndpointStatus(address.strip("[]"), int(port), share, reason.used, reason.value)
