"""What is done once, at the start: finding out about backend, families, kernel and iptables, and taking over."""

import gc
from collections.abc import Callable

import msgspec
import structlog

from pykubeproxy import kernel
from pykubeproxy.agent.node_setup import provide_modules
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import Config
from pykubeproxy.kernel import memory, nfacct, nftables, sysctl
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.plan import NFT_CHAINS_PER_BLOCK

_LIBERAL = "net/netfilter/nf_conntrack_tcp_be_liberal"

log = structlog.get_logger()


class Opened(msgspec.Struct, frozen=True):
    """One family, ready to be programmed."""

    tables: FamilyTables
    features: kernel.Features
    nfacct: bool

    def facts(self, with_addresses: bool) -> KernelFacts:
        """What rules need to know of the kernel, read anew; its addresses only if asked for. Raises KernelError."""
        family = self.tables.family
        found = kernel.local_addresses(family) if with_addresses else ()
        return KernelFacts(
            addresses=tuple(local.address for local in found),
            random_fully=self.features.random_fully,
            nfacct=self.nfacct,
            tcp_be_liberal=sysctl.read(_LIBERAL) == "1",
        )


class Families(msgspec.Struct, frozen=True):
    """The families that this node's kernel can serve, and why the others cannot be.

    `watch` listens for what others write into their tables, if that is wanted and can be.
    """

    backend: kernel.Backend
    opened: tuple[Opened, ...]
    lacking: dict[Family, str]
    watch: kernel.DriftWatch | None = None


def open_families(config: Config, heard: Callable[[kernel.ExternalWrite], None] | None = None) -> Families:
    """Look at kernel and tools. Raises KernelError if something is missing that nothing works without.

    `heard` is to be told of what others write into the tables.
    """
    backend = provide_modules(config)
    families: list[Opened] = []
    lacking: dict[Family, str] = {}
    watch = _watch(backend, heard) if heard else None
    if other := kernel.also_holding(backend, skeleton.NAT_SERVICES):
        log.warning(
            "the other kind of iptables has rules of a service proxy too, and packets meet both;"
            " `pykubeproxy check` says what to do",
            used=backend.value,
            other=other.value,
        )
    for family in Family:
        if reason := kernel.unavailable(backend, family):
            lacking[family] = reason
        else:
            families.append(_open(backend, family, watch))
    return Families(backend, tuple(families), lacking, watch)


def _open(backend: kernel.Backend, family: Family, watch: kernel.DriftWatch | None) -> Opened:
    iptables = kernel.open_iptables(backend, family, kernel.Runner(started=watch.started if watch else None))
    features = kernel.probe(iptables).require()
    limit = NFT_CHAINS_PER_BLOCK if backend is kernel.Backend.NFT else None
    tables = kernel.Watched(iptables, watch) if watch else iptables
    return Opened(FamilyTables(tables, limit), features, features.nfacct and _counters(family))


def _watch(
    backend: kernel.Backend, heard: Callable[[kernel.ExternalWrite], None]
) -> kernel.DriftWatch | None:
    try:
        return kernel.watch_tables(backend, heard)
    except OSError as error:
        log.warning("changes by others will only be seen now and then", reason=error.strerror)
        return None


def _counters(family: Family) -> bool:
    for name in skeleton.NFACCT_NAMES:
        made = nfacct.ensure(name)
        if not made.ok:
            log.warning("rules will not count into nfacct", family=family.value, reason=made.reason)
            return False
    return True


def without_garbage_collection() -> None:
    """Do not look for garbage while the first lists are read: nearly all that is made then stays."""
    gc.disable()


def settle_memory() -> None:
    """What is there after the first sync stays: do not look through it again, and give back what was used on the way."""
    gc.collect()
    gc.freeze()
    gc.enable()
    memory.trim()


def remove_nftables_mode() -> None:
    """Take out what a kube-proxy in nftables mode left; our rules are in place by now, so nobody misses it."""
    for family in Family:
        try:
            if nftables.remove_table(family, "kube-proxy"):
                log.info("removed what a kube-proxy in nftables mode had left", family=family.value)
        except OSError as error:
            log.warning(
                "cannot tell whether a kube-proxy in nftables mode left its table",
                family=family.value,
                error=error.strerror,
            )
