"""Find the services whose rules iptables-restore rejects, by bisection."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pykubeproxy.kernel import Rejected, Tables
from pykubeproxy.objects import Endpoint, Protocol, address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.restore_text import Chain, block, delete_chains, empty_chains, write_chains
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import NodeTopology, select

_MANGLE_CANARY, _NAT_CANARY, _FILTER_CANARY = skeleton.CANARIES
# Documentation addresses (RFC 5737, RFC 3849): a cluster IP and two endpoints.
_ADDRESSES = {
    False: ("192.0.2.1", "198.51.100.1", "198.51.100.2"),
    True: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}


class Split(NamedTuple):
    """Service ports whose rules are accepted, and those whose rules are rejected, with iptables' message.

    Ports that were not tried in time are missing.
    """

    accepted: frozenset[PortName]
    rejected: Mapping[PortName, str]


class Bisection:
    """Try the rules of service ports in chains that no packet traverses.

    Write the own chains of a service port under their names: new ones are not referenced yet, others get their desired
    rules. Write its rules for shared chains into the canary chains, which nothing refers to; `clear` empties them. Write
    the fixed chains too, since any rule may refer to them. On legacy, a try replaces whole tables, so its cost does not
    depend on the number of services. On nft, each try takes about `chains_per_block` chains at most.

    After `seconds`, end the search with the first rejected port. Call `progress` after each try.
    """

    def __init__(
        self,
        tables: Tables,
        options: RuleOptions,
        chains_per_block: int | None,
        seconds: float,
        progress: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._options = options
        self._limit = chains_per_block
        self._deadline = time.monotonic() + seconds
        self._progress = progress
        self._fixed = tuple(Chain(key, rules) for key, rules in skeleton.fixed_chains(options).items())

    def split(self, ports: Mapping[PortName, PortRules]) -> Split:
        """Split service ports by whether their rules are accepted. Raises KernelError for other failures."""
        accepted: set[PortName] = set()
        rejected: dict[PortName, str] = {}
        groups = self._batches(ports)
        while groups and (not rejected or time.monotonic() < self._deadline):
            group = groups.pop()
            tried = {name: ports[name] for name in group}
            rejection = self._try(tried)
            if rejection and rejection.whole_block and len(group) == 1:
                # On legacy, a concurrent writer causes a single rejection without a reason.
                rejection = self._try(tried)
            if rejection is None:
                accepted.update(group)
            elif len(group) == 1:
                rejected[group[0]] = rejection.message
            elif culprit := _port_of_line(rejection.line, tried):
                rejected[culprit] = rejection.message
                groups.append([name for name in group if name != culprit])
            else:
                groups += (group[: len(group) // 2], group[len(group) // 2 :])
        return Split(frozenset(accepted), rejected)

    def accepts_plain_service(self) -> bool:
        """Return whether iptables accepts an ordinary service; if not, blame no service. Raises KernelError."""
        plain = _plain_service(self._options)
        if self._try({PortName("", "", "", ""): plain}):
            return False
        names = [chain for chain, _ in plain.chains()]
        self._tables.restore(
            block("filter", empty_chains([_FILTER_CANARY.chain]))
            + block("nat", empty_chains([_NAT_CANARY.chain, *names]), delete_chains(names))
        )
        return True

    def clear(self) -> None:
        """Empty the canary chains again. Raises KernelError."""
        self._tables.restore("".join(block(key.table, empty_chains([key.chain])) for key in _CLEARED))

    def _try(self, ports: Mapping[PortName, PortRules]) -> Rejected | None:
        try:
            with self._tables.session() as session:
                for table in ("mangle", "filter", "nat"):
                    session.write(self._block(table, ports))
        except Rejected as rejection:
            if rejection.is_shortage:
                raise
            return rejection
        finally:
            self._progress()
        return None

    def _block(self, table: str, ports: Mapping[PortName, PortRules]) -> str:
        fixed = [chain for chain in self._fixed if chain.key.table == table]
        owned = [
            Chain(ChainKey("nat", name), texts)
            for rules in ports.values()
            if table == "nat"
            for name, texts in rules.chains()
        ]
        entries = [entry for rules in ports.values() for entry in rules.entries]
        tried = [
            Chain(canary, tuple(text for key, texts in entries if key.table == table for text in texts))
            for canary in _CLEARED
            if canary.table == table
        ]
        return block(table, write_chains(fixed), write_chains(owned), write_chains(tried))

    def _batches(self, ports: Mapping[PortName, PortRules]) -> list[list[PortName]]:
        batches: list[list[PortName]] = []
        chains = 0
        for name, rules in ports.items():
            own = sum(1 for _ in rules.chains())
            chains += own
            if not batches or (self._limit is not None and chains > self._limit):
                batches.append([])
                chains = own
            batches[-1].append(name)
        return batches


_CLEARED = (_NAT_CANARY, _FILTER_CANARY)


def may_blame_service(rejection: Rejected, ports: Mapping[PortName, PortRules]) -> bool:
    """Return whether the rules of a service may be the reason, by the rejected line."""
    if rejection.is_shortage:
        return False
    return rejection.whole_block or _port_of_line(rejection.line, ports) is not None


def owner_of_line(line: str, ports: Mapping[PortName, PortRules]) -> str:
    """Return the service port that a line of restore input belongs to; "" if it is none of these."""
    owner = _port_of_line(line, ports)
    return str(owner) if owner else ""


def _port_of_line(line: str, ports: Mapping[PortName, PortRules]) -> PortName | None:
    """Return the service port whose chain, or whose rule in a shared chain, a line of restore input is about."""
    _, _, text = line.partition(" ")
    chain, _, rule = text.partition(" ")
    if line.startswith(":"):
        chain = line[1:].partition(" ")[0]
    if not chain:
        return None
    for name, rules in ports.items():
        if any(own == chain for own, _ in rules.chains()):
            return name
        if rule and any(rule in texts for _, texts in rules.entries):
            return name
    return None


def _plain_service(options: RuleOptions) -> PortRules:
    """Return the rules of an ordinary service port: TCP, two endpoints."""
    address, *endpoints = _ADDRESSES[options.ipv6]
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
    resolved = tuple(
        ResolvedEndpoint(address_and_port(address, 8080), Endpoint(address), 8080, local=False)
        for address in endpoints
    )
    return port_rules(port, select(port, resolved, NodeTopology("")), options)
