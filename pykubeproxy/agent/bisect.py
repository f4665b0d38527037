"""Find the services whose rules iptables-restore rejects, by bisection."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from pykubeproxy.agent.write import write_chunks
from pykubeproxy.kernel import KernelError, Rejected, Tables, TimedOut
from pykubeproxy.objects import Endpoint, Protocol, address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.known import ChainsWritten, KnownChain, KnownTables, PortsGone
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Chunk, OwnChains, batches
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.rules.text import Chain, block, write_chains
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import NodeTopology, select

# How long iptables may make no progress in a try, in seconds.
TRY_SECONDS = 10.0
# A port is rejected after so many rejected tries with it. A concurrent writer causes rejections: on legacy, without a
# reason, if it takes no lock; on nft, if it deletes the chains of a port between two blocks.
TRIES = 3

_MANGLE_CANARY, _NAT_CANARY, _FILTER_CANARY = skeleton.CANARIES
_NO_CHAINS = OwnChains(())
# Documentation addresses (RFC 5737, RFC 3849): a cluster IP and two endpoints.
_ADDRESSES = {
    False: ("192.0.2.1", "198.51.100.1", "198.51.100.2"),
    True: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}


class PortGroup(NamedTuple):
    """Service ports to try together, and how many tries with all of them have been rejected."""

    names: tuple[PortName, ...]
    rejections: int = 0

    def parts(self) -> tuple[tuple[PortName, ...], tuple[PortName, ...]]:
        """Return the ports to try next, and the others: halves if all of them were rejected together."""
        half = len(self.names) // 2 if self.rejections else 0
        return (self.names[:half], self.names[half:]) if half else (self.names, ())

    def promise(self) -> tuple[int, int, int]:
        """Return how many ports a try may release; of equal numbers, those that are less suspect are greater."""
        return len(self.parts()[0]), -self.rejections, len(self.names)


class BisectResult(NamedTuple):
    """Service ports whose rules are accepted, and those whose rules are rejected, with the reason.

    `undecided` are groups of the other ports. `failure` is the error that ended the search, if any.
    """

    accepted: frozenset[PortName]
    rejected: Mapping[PortName, str]
    undecided: tuple[PortGroup, ...] = ()
    failure: KernelError | None = None

    def checked(self) -> Self:
        """Return this value, or raise `failure`."""
        if self.failure:
            raise self.failure
        return self


class Bisection:
    """Try the rules of service ports in chains that no packet traverses, and record in `known` what is in force.

    Write the own chains of a service port under their names: new ones are not referenced yet, others get their desired
    rules. Write its rules for shared chains into the canary chains, which nothing refers to. That of table nat keeps
    those of the last accepted try until a sync writes the fixed chains: to empty it takes as long as a try on legacy.
    `clear` empties the other. Write the fixed chains too, since any rule may refer to them. On legacy, a try replaces whole
    tables, so its cost does not depend on the number of services. On nft, each try takes about `chains_per_block` chains
    at most, or one service port.

    A try in which iptables makes no progress for `TRY_SECONDS` counts as rejected. Call `progress` after each try.
    """

    def __init__(
        self,
        tables: Tables,
        known: KnownTables,
        options: RuleOptions,
        chains_per_block: int | None,
        progress: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._known = known
        self._options = options
        self._limit = chains_per_block
        self._progress = progress
        self._fixed = tuple(Chain(key, rules) for key, rules in skeleton.fixed_chains(options).items())

    def split(
        self,
        ports: Mapping[PortName, PortRules],
        seconds: float,
        known: Iterable[PortGroup] = (),
        tries: int = TRIES,
    ) -> BisectResult:
        """Split service ports by whether their rules are accepted, in at least one try and about `seconds`.

        `known` are groups of some of them, as an earlier search left them. Try as many ports together as possible first, so
        that the time suffices for most of the accepted ports.
        """
        deadline = time.monotonic() + seconds
        accepted: set[PortName] = set()
        rejected: dict[PortName, str] = {}
        waiting = list(known)
        grouped = {name for group in waiting for name in group.names}
        waiting += self.batches({name: ports[name] for name in ports if name not in grouped})
        while waiting:
            group = max(waiting, key=PortGroup.promise)
            waiting.remove(group)
            tried, others = group.parts()
            try:
                failure = self._try({name: ports[name] for name in tried})
            except KernelError as error:
                return BisectResult(frozenset(accepted), rejected, (*waiting, group), error)
            # If one half of a rejected group is accepted, the other half is to blame.
            rest = PortGroup(others, 0 if failure else 1)
            rejections = 1 if others else group.rejections + 1
            waiting += [rest] if others else []
            if failure is None:
                accepted.update(tried)
            elif len(tried) > 1:
                culprit = _port_of_line(failure.line, {name: ports[name] for name in tried})
                innocent = tuple(name for name in tried if name != culprit)
                waiting += (
                    [PortGroup((culprit,), 1), PortGroup(innocent)] if culprit else [PortGroup(tried, 1)]
                )
            elif rejections < tries:
                waiting.append(PortGroup(tried, rejections))
            else:
                rejected[tried[0]] = failure.reason
            if time.monotonic() >= deadline:
                break
        return BisectResult(frozenset(accepted), rejected, tuple(waiting))

    def accepts_plain_service(self, others: Mapping[PortName, PortRules] | None = None) -> bool:
        """Return whether iptables accepts an ordinary service, together with these others; if not, blame no service.

        The next sync deletes its chains. Raises KernelError.
        """
        tried = {_PLAIN: _plain_service(self._options), **(others or {})}
        try:
            return self._try(tried) is None
        finally:
            self._known.commit([PortsGone((_PLAIN,))])

    def clear(self) -> None:
        """Empty the canary chain of table filter again. Raises KernelError."""
        write_chunks(self._tables, [_block("filter", [Chain(_FILTER_CANARY, ())])], self._known)

    def _try(self, ports: Mapping[PortName, PortRules]) -> "_FailedTry | None":
        try:
            write_chunks(self._tables, self._blocks(ports), self._known, seconds=TRY_SECONDS)
        except Rejected as rejection:
            if rejection.is_shortage:
                raise
            return _FailedTry(f"iptables rejects its rules: {rejection.message}", rejection.line)
        except TimedOut:
            return _FailedTry(f"iptables makes no progress with its rules for {TRY_SECONDS:g} s")
        finally:
            self._progress()
        return None

    def _blocks(self, ports: Mapping[PortName, PortRules]) -> Iterator[Chunk]:
        """Yield the blocks of a try: one for each table, several for the chains of one large service port."""
        yield self._fixed_and("mangle", [])
        yield self._fixed_and("filter", [_canary_chain(_FILTER_CANARY, ports)])
        own = (
            OwnChains(
                tuple(Chain(ChainKey("nat", chain), texts) for chain, texts in rules.chains()), part_of=name
            )
            for name, rules in ports.items()
        )
        limit = sys.maxsize if self._limit is None else self._limit
        some = [*batches(own, lambda _: limit)] or [_NO_CHAINS]
        if self._limit is None:  # each block replaces the whole table, however many rules it has
            chains = tuple(chain for batch in some for chain in batch.chains)
            some = [OwnChains(chains, facts=tuple(fact for batch in some for fact in batch.facts))]
        *first, last = some
        for batch in first:
            yield self._fixed_and("nat", [], batch)
        yield self._fixed_and("nat", [_canary_chain(_NAT_CANARY, ports)], last)

    def _fixed_and(self, table: str, chains: list[Chain], own: OwnChains = _NO_CHAINS) -> Chunk:
        fixed = [chain for chain in self._fixed if chain.key.table == table and chain.key not in dict(chains)]
        return _block(table, [*fixed, *chains], own)

    def batches(self, ports: Mapping[PortName, PortRules]) -> list[PortGroup]:
        """Divide service ports into groups that a try can write quickly."""
        batches: list[list[PortName]] = []
        chains = 0
        for name, rules in ports.items():
            own = sum(1 for _ in rules.chains())
            chains += own
            if not batches or (self._limit is not None and chains > self._limit):
                batches.append([])
                chains = own
            batches[-1].append(name)
        return [PortGroup(tuple(batch)) for batch in batches]


# The name of the ordinary service, which no Service has.
_PLAIN = PortName("", "trial", "", Protocol.TCP.value)


def _block(table: str, chains: Collection[Chain], own: OwnChains = _NO_CHAINS) -> Chunk:
    known = ChainsWritten({chain.key: KnownChain.of(chain) for chain in chains})
    text = block(table, write_chains([*chains, *own.chains]))
    return Chunk(text, (*chains, *own.chains), (known, *own.facts))


class _FailedTry(NamedTuple):
    """Why a try failed. `line` is the rejected line, if known."""

    reason: str
    line: str = ""


def _canary_chain(canary: ChainKey, ports: Mapping[PortName, PortRules]) -> Chain:
    """Return a canary chain with all rules that these ports have in shared chains of its table."""
    entries = (entry for rules in ports.values() for entry in rules.entries)
    return Chain(canary, tuple(text for key, texts in entries if key.table == canary.table for text in texts))


def may_blame_service(rejection: Rejected, ports: Mapping[PortName, PortRules]) -> bool:
    """Return whether the rules of a service may be the reason, by the rejected line."""
    if rejection.is_shortage:
        return False
    return rejection.whole_block or _port_of_line(rejection.line, ports) is not None


def owner_of_line(line: str, ports: Mapping[PortName, PortRules]) -> str:
    """Return the service port that a line of restore input belongs to; "" for other lines."""
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
    address, *endpoints = _ADDRESSES[options.ipv6]
    port = ServicePort(
        name=_PLAIN,
        protocol=Protocol.TCP,
        cluster_ip=address,
        port=80,
        node_port=0,
        external_ips=(),
        load_balancer_ips=(),
        source_ranges=None,
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
