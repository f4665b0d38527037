"""Prepare the first sync: choose the backend and open the IP families."""

from collections.abc import Callable

import msgspec
import structlog

from pykubeproxy import kernel
from pykubeproxy.agent.loopback import guard_loopback
from pykubeproxy.agent.node_setup import prepare_backend
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import Config
from pykubeproxy.kernel import nfacct, system
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.blocks import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.context import KernelFacts

log = structlog.get_logger()


class OpenedFamily(msgspec.Struct, frozen=True):
    """One IP family whose tables can be written."""

    tables: FamilyTables
    features: kernel.Features

    def facts(self, with_addresses: bool) -> KernelFacts:
        """Read the facts about the kernel that rules depend on; addresses only on request. Raises KernelError."""
        return kernel_facts(self.tables.family, self.features, with_addresses)


def kernel_facts(family: Family, features: kernel.Features, with_addresses: bool) -> KernelFacts:
    """Read the facts about the kernel that rules depend on; addresses only on request. Raises KernelError."""
    addresses = kernel.local_addresses(family) if with_addresses else ()
    return KernelFacts(
        addresses=tuple(local.address for local in addresses),
        random_fully=features.random_fully,
        nfacct=features.nfacct,
        tcp_be_liberal=system.read_setting("net/netfilter/nf_conntrack_tcp_be_liberal") == "1",
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
    """Open the tables of all supported families. Raises KernelError if a required kernel feature or tool is missing.

    `on_write` is called for writes of other programs to the tables, `progress` whenever a command starts, reads or writes.
    """
    backend = prepare_backend(config)
    watch = _watch(backend, on_write) if on_write else None
    reasons = {family: kernel.unsupported_reason(backend, family) for family in Family}
    opened = tuple(
        _open(config, backend, family, watch, progress) for family, reason in reasons.items() if not reason
    )
    return Families(backend, opened, {family: reason for family, reason in reasons.items() if reason}, watch)


def _open(
    config: Config,
    backend: kernel.Backend,
    family: Family,
    watch: kernel.TableWatch | None,
    progress: Callable[[], None],
) -> OpenedFamily:
    started = watch.command_started if watch else None
    iptables = kernel.open_iptables(backend, family, kernel.Runner(started=started, progress=progress))
    features = kernel.probe_features(iptables).require()
    if family is Family.IPV4:
        guard_loopback(config, iptables)  # at once: another program may have set route_localnet
    limit = NFT_CHAINS_PER_BLOCK if backend is kernel.Backend.NFT else None
    tables = kernel.WatchedTables(iptables, watch) if watch else iptables
    features = msgspec.structs.replace(features, nfacct=features.nfacct and _counters(family))
    return OpenedFamily(FamilyTables(tables, limit), features)


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
