"""Write the own chains of Services while the rest of a first sync is computed.

No rule leads to them before the sync writes the shared chains, so meanwhile the tables may hold any of them.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator

from pykubeproxy.agent.write import Written
from pykubeproxy.kernel import KernelError, RestoreSession, Tables
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.blocks import Chunk, most_chains
from pykubeproxy.rules.digests import AppliedPort, DesiredPort
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import port_rules
from pykubeproxy.rules.text import Chain, block, write_chains
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort

# With fewer Services, the agent computes everything in a tenth of a second.
LEAST_SERVICES = 1000


class HeadStart:
    """Write the own chains of service ports to tables without any of ours, except those of ports in `quarantine`.

    `ports` are the ports whose chains are all written at the end. It lacks a port with more chains than a block should
    have, and is empty after a `failure` or without a session.
    """

    def __init__(
        self,
        session: RestoreSession | None,
        options: RuleOptions,
        quarantine: Container[PortName] = (),
        chains_per_block: int = 0,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = options
        self.ports: dict[PortName, AppliedPort] = {}
        self.written = Written(None, {})
        self.failure: KernelError | None = None
        self._session = session
        self._quarantine = quarantine
        self._least = chains_per_block
        self._progress = progress
        fixed = skeleton.fixed_chains(options).items() if session else ()
        self._waiting = [Chain(key, rules) for key, rules in fixed if key.table == "nat"]

    def add(self, ports: Iterable[ResolvedPort]) -> None:
        """Write the own chains of ports, at the latest with the next full block."""
        if self._session is None:
            return
        limit = most_chains(self._least, self.written.chains)
        for resolved in ports:
            if resolved.port.name in self._quarantine:
                continue
            rules = port_rules(resolved.port, resolved.selection, self.options)
            chains = tuple(rules.chains())
            if len(chains) <= limit:
                port = DesiredPort(resolved.port.name, rules, len(resolved.selection.verdicts))
                self.ports[port.name] = AppliedPort.of(port, chains)
                self._waiting += (Chain(ChainKey("nat", name), texts) for name, texts in chains)
        if len(self._waiting) >= limit:
            self.write()

    def write(self) -> None:
        """Write the chains that wait for a full block."""
        if self._session is None:
            return
        chunk = Chunk(block("nat", write_chains(self._waiting)), tuple(self._waiting))
        self._waiting.clear()
        try:
            self._session.write(chunk.text)
        except KernelError as error:
            self.fail(error)
        else:
            self.written.add(chunk)
            self._progress()

    def fail(self, failure: KernelError | None = None) -> None:
        """Leave all ports to the sync."""
        self._session, self.failure = None, failure
        self.ports.clear()


@contextlib.contextmanager
def head_start(
    tables: Tables,
    options: RuleOptions,
    quarantine: Container[PortName],
    chains_per_block: int,
    progress: Callable[[], None],
) -> Iterator[HeadStart]:
    """Open a head start. Leaving it waits until all its chains are in force, or it has failed.

    Calls `progress` after each block.
    """
    started: HeadStart | None = None
    try:
        with tables.session() as session:
            started = HeadStart(session, options, quarantine, chains_per_block, progress)
            yield started
            started.write()
    except KernelError as error:
        if started is None:
            raise
        started.fail(error)
