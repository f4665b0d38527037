"""Which services it is for whose sake iptables-restore refuses its input: they are tried apart from all others."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pykubeproxy.kernel import Refused, Tables
from pykubeproxy.objects import Endpoint, Protocol, address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.again import Again
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Chain, Change, restore_input
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import NodeTopology, select

_MANGLE_CANARY, _NAT_CANARY, _FILTER_CANARY = skeleton.CANARIES
# From documentation prefixes (RFC 5737, RFC 3849): an address, and two backends.
_ADDRESSES = {
    False: ("192.0.2.1", "198.51.100.1", "198.51.100.2"),
    True: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}


class Sorted(NamedTuple):
    """Service ports whose rules are taken, and those whose rules are refused, with iptables' words.

    Those that could not be told apart in time are among neither.
    """

    taken: frozenset[PortName]
    refused: Mapping[PortName, str]


class Trials:
    """Writes the rules of service ports where no packet meets them.

    A service port's own chains are written under their names, which does no harm and saves writing them later: new
    ones nobody refers to yet, and others come to hold what they ought to. Its rules in shared chains go to the canary
    chains, which nobody ever refers to; `clear` empties those. The fixed chains, to which all may refer, are written
    along. On legacy whole tables are replaced, so that any number of services is as dear as one; on nft each try takes
    no more than about `chains_per_block` chains.

    After `patience` seconds no more are tried once one was found. `progress` is called after each try.
    """

    def __init__(
        self,
        tables: Tables,
        options: RuleOptions,
        chains_per_block: int | None,
        patience: float,
        progress: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._options = options
        self._limit = chains_per_block
        self._deadline = time.monotonic() + patience
        self._progress = progress
        self._fixed = tuple(Chain(key, rules) for key, rules in skeleton.fixed_chains(options).items())

    def sort(self, rendered: Mapping[PortName, PortRules]) -> Sorted:
        """Tell the service ports apart whose rules are taken and refused. Raises KernelError for other failures."""
        taken: set[PortName] = set()
        refused: dict[PortName, str] = {}
        groups = self._batches(rendered)
        while groups and (not refused or time.monotonic() < self._deadline):
            group = groups.pop()
            tried = {name: rendered[name] for name in group}
            refusal = self._refusal(tried)
            if refusal and refusal.whole_block and len(group) == 1:
                # Who writes to a table of legacy at the same moment makes it refuse anything, without a reason: once.
                refusal = self._refusal(tried)
            if refusal is None:
                taken.update(group)
            elif len(group) == 1:
                refused[group[0]] = refusal.message
            elif named := _named(refusal.line, tried):
                refused[named] = refusal.message
                groups.append([name for name in group if name != named])
            else:
                groups += (group[: len(group) // 2], group[len(group) // 2 :])
        return Sorted(frozenset(taken), refused)

    def takes_plain_service(self) -> bool:
        """Whether what every service needs is taken: else no service is to blame. Raises KernelError."""
        plain = _plain_service(self._options)
        if self._refusal({PortName("", "", "", ""): plain}):
            return False
        gone = tuple(chain for chain, _ in plain.chains)
        self._tables.restore(restore_input(Change(fixed=_EMPTY, stale=gone), None))
        return True

    def clear(self) -> None:
        """Empty the canary chains again. Raises KernelError."""
        self._tables.restore(restore_input(Change(fixed=_EMPTY), None))

    def _refusal(self, rendered: Mapping[PortName, PortRules]) -> Refused | None:
        try:
            self._tables.restore(self._text(rendered))
        except Refused as refusal:
            if refusal.is_shortage:
                raise
            return refusal
        finally:
            self._progress()
        return None

    def _text(self, rendered: Mapping[PortName, PortRules]) -> Iterable[str]:
        entries = [entry for rules in rendered.values() for entry in rules.entries]
        shared = tuple(
            Chain(it, tuple(text for key, texts in entries if key.table == it.table for text in texts))
            for it in (_NAT_CANARY, _FILTER_CANARY)
        )
        own = Again(
            lambda: (
                tuple(Chain(ChainKey("nat", chain), texts) for chain, texts in rules.chains)
                for rules in rendered.values()
            )
        )
        return restore_input(Change(fixed=self._fixed, services=own, shared=shared), None)

    def _batches(self, rendered: Mapping[PortName, PortRules]) -> list[list[PortName]]:
        batches: list[list[PortName]] = []
        chains = 0
        for name, rules in rendered.items():
            own = sum(1 for _ in rules.chains)
            chains += own
            if not batches or (self._limit is not None and chains > self._limit):
                batches.append([])
                chains = own
            batches[-1].append(name)
        return batches


_EMPTY = tuple(Chain(key, ()) for key in (_NAT_CANARY, _FILTER_CANARY))


def is_about_services(refusal: Refused, rendered: Mapping[PortName, PortRules]) -> bool:
    """Whether the rules of some service may be to blame, by the line that was refused."""
    if refusal.is_shortage:
        return False
    return refusal.whole_block or _named(refusal.line, rendered) is not None


def _named(line: str, rendered: Mapping[PortName, PortRules]) -> PortName | None:
    """The service port whose chain a line of restore input is about, or whose rule in a shared chain it is."""
    _, _, text = line.partition(" ")
    chain, _, rule = text.partition(" ")
    if line.startswith(":"):
        chain = line[1:].partition(" ")[0]
    if not chain:
        return None
    for name, rules in rendered.items():
        if any(own == chain for own, _ in rules.chains):
            return name
        if rule and any(rule in texts for _, texts in rules.entries):
            return name
    return None


def _plain_service(options: RuleOptions) -> PortRules:
    """A service port as most are: TCP, two endpoints, nothing out of the ordinary."""
    address, *targets = _ADDRESSES[options.ipv6]
    port = ServicePort(
        name=PortName("", "trial", "", Protocol.TCP.value),
        protocol=Protocol.TCP,
        cluster_ip=address,
        port=80,
        node_port=0,
        external_ips=(),
        load_balancer_ips=(),
        source_ranges=(),
        internal_local=False,
        external_local=False,
        affinity_seconds=None,
        health_check_node_port=0,
    )
    backends = tuple(
        ResolvedEndpoint(address_and_port(it, 8080), Endpoint(it), 8080, local=False) for it in targets
    )
    return port_rules(port, select(port, backends, NodeTopology("")), options)
