"""What the first sync needs: the backend, the tables of each IP family, and what the API server knows of the node."""

import math
from collections.abc import Callable, Mapping

import msgspec
import structlog

from pykubeproxy import kernel
from pykubeproxy.agent.node_rules import guard_loopback
from pykubeproxy.agent.node_setup import prepare_backend
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.kernel import nfacct, system
from pykubeproxy.objects import Family, Kind, Node
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, missing_network, primary_family
from pykubeproxy.rules.plan import NFT_CHAINS_PER_BLOCK
from pykubeproxy.services.cluster import Cluster

log = structlog.get_logger()
# How long to wait for the Node object's addresses and pod CIDRs, in seconds, as kube-proxy does.
WAIT_FOR_ADDRESSES = 30.0
WAIT_FOR_POD_CIDRS = 300.0


class OpenedFamily(msgspec.Struct, frozen=True):
    """One IP family whose tables can be written."""

    tables: FamilyTables
    features: kernel.Features

    def facts(self, with_addresses: bool) -> KernelFacts:
        """Read the facts about the kernel that rules depend on; addresses only on request. Raises KernelError."""
        addresses = kernel.local_addresses(self.tables.family) if with_addresses else ()
        return KernelFacts(
            addresses=tuple(local.address for local in addresses),
            random_fully=self.features.random_fully,
            nfacct=self.features.nfacct,
            tcp_be_liberal=system.read_setting("net/netfilter/nf_conntrack_tcp_be_liberal") == "1",
            sctp=self.features.sctp,
        )


class Families(msgspec.Struct, frozen=True):
    """The IP families that this node's kernel supports, and for each other one the reason.

    `watch` listens for writes of other programs to the tables; None if disabled or not possible.
    """

    backend: kernel.Backend
    opened: tuple[OpenedFamily, ...]
    unsupported: dict[Family, str]
    watch: kernel.TableWatch | None = None


def open_families(
    config: Config,
    on_write: Callable[[kernel.ExternalWrite], None] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Families:
    """Open the tables of all supported families. Raises KernelError if there is none, or if they cannot be read.

    `on_write` is called for writes of other programs to the tables, `progress` whenever a command starts, reads or writes.
    """
    backend = prepare_backend(config)
    watch = _watch(backend, on_write) if on_write else None
    opened: list[OpenedFamily] = []
    unsupported: dict[Family, str] = {}
    for family in Family:
        try:
            opened.append(_open(config, backend, family, watch, progress))
        except kernel.UnsupportedFamily as error:
            unsupported[family] = str(error)
    if not opened:
        raise kernel.UnsupportedFamily("; ".join(dict.fromkeys(unsupported.values())))
    return Families(backend, tuple(opened), unsupported, watch)


def _open(
    config: Config,
    backend: kernel.Backend,
    family: Family,
    watch: kernel.TableWatch | None,
    progress: Callable[[], None],
) -> OpenedFamily:
    if reason := kernel.unsupported_reason(backend, family):
        raise kernel.UnsupportedFamily(reason)
    started = watch.command_started if watch else None
    iptables = kernel.open_iptables(backend, family, kernel.Runner(started=started, progress=progress))
    features = kernel.probe_features(iptables).require()
    if family is Family.IPV4:
        guard_loopback(config, iptables)  # at once: another program may have set route_localnet
    limit = NFT_CHAINS_PER_BLOCK if backend is kernel.Backend.NFT else None
    tables = msgspec.structs.replace(iptables, own_writes=watch.own_writes) if watch else iptables
    features = msgspec.structs.replace(features, nfacct=features.nfacct and _counters(family))
    return OpenedFamily(FamilyTables(tables, limit, progress=progress), features)


def _watch(
    backend: kernel.Backend, on_write: Callable[[kernel.ExternalWrite], None]
) -> kernel.TableWatch | None:
    try:
        return kernel.watch_tables(backend, on_write)
    except OSError as error:
        log.warning("table watch failed, checking for drift every syncPeriod only", reason=error.strerror)
        return None


def _counters(family: Family) -> bool:
    for name in skeleton.NFACCT_NAMES:
        if reason := nfacct.ensure(name):
            log.warning("nfacct counters disabled", family=family.value, reason=reason)
            return False
    return True


class StartGate:
    """Decide when syncs may start. `wait_for_node` is false if no Node object will arrive."""

    def __init__(
        self,
        config: Config,
        node_name: str,
        unsupported: Mapping[Family, str],
        wait_for_node: bool,
        started: float,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._unsupported = unsupported
        self._wait_for_node = wait_for_node
        self._started = started

    def opens_at(self, cluster: Cluster, node: Node | None) -> float:
        """Return until when syncs must wait for missing information; -infinity if nothing is missing."""
        if not cluster.has_listed(Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
            return math.inf
        if self._lacks_pod_cidrs(node):
            return self._started + WAIT_FOR_POD_CIDRS
        if self._wait_for_node and not (node and node.addresses):
            return self._started + WAIT_FOR_ADDRESSES
        return -math.inf

    def obstacle(self, node: Node | None) -> str:
        """Return why this node cannot be served at all; "" if it can."""
        if self._lacks_pod_cidrs(node):
            return f"node {self._node_name} has no podCIDRs, which detectLocalMode NodeCIDR needs; allocate them or set another mode"
        return self._unsupported.get(primary_family(self._config, node), "") or missing_network(
            self._config, node, self._unsupported
        )

    def _lacks_pod_cidrs(self, node: Node | None) -> bool:
        by_node = self._config.detect_local.mode is DetectLocalMode.NODE_CIDR
        return by_node and self._wait_for_node and not (node and node.pod_cidrs)
