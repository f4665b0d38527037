"""Another proxy changes the tables during a sync."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import pytest

from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.kernel.restore import RestoreSession
from pykubeproxy.objects import Deleted, Family, Key, Kind, Updated
from pykubeproxy.rules.names import endpoint_chain
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.text import Chain, block, write_chains
from pykubeproxy.services.ports import PortName
from tests.fakes.synced import SyncedFamily
from tests.objects import service, slice_of

pytestmark = pytest.mark.root

SERVICES = 6
# Of another proxy, for a Service that this agent does not know yet.
FOREIGN = ChainKey("nat", "KUBE-SVC-AAAAAAAAAAAAAAAA")


class Interrupted:
    """Tables that run a function before the first write that mentions a text."""

    def __init__(self, tables: Iptables) -> None:
        self._tables = tables
        self.text = ""
        self.interrupt: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self._tables, name)

    @contextmanager
    def session(self, seconds: float | None = None) -> Iterator[RestoreSession]:
        with self._tables.session(seconds) as session:
            yield _Session(self, session)


class _Session:
    def __init__(self, tables: Interrupted, session: RestoreSession) -> None:
        self._tables, self._session = tables, session

    def write(self, text: str) -> None:
        if self._tables.text and self._tables.text in text:
            self._tables.text = ""
            self._tables.interrupt()
        self._session.write(text)


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"])  # legacy writes all chains in one block
def test_an_unused_chain_that_another_proxy_refers_to_keeps_its_rules(iptables: Iptables) -> None:
    """In small blocks too: the block is rejected, and the next attempt deletes both chains."""
    ipv4 = iptables.family is Family.IPV4
    tables = Interrupted(iptables)
    agent = SyncedFamily(chains_per_block=2, live=tables)  # type: ignore[arg-type]
    endpoint = "10.244.0.5" if ipv4 else "fd00:244::5"
    for number in range(SERVICES):
        address = f"10.96.0.{number}" if ipv4 else f"fd00:96::{number}"
        agent.apply(Updated(service(f"s{number}", cluster_ip=address)))
        agent.apply(Updated(slice_of(endpoint, service=f"s{number}")))
    agent.sync()
    port = PortName("ns", "s3", "http", "TCP")
    used = ChainKey("nat", endpoint_chain(port, f"{endpoint}:8080" if ipv4 else f"[{endpoint}]:8080"))
    before = iptables.save().chains[used]
    assert len(before) == 2

    agent.apply(*(Deleted(Kind.SERVICE, Key("ns", f"s{number}")) for number in range(1, SERVICES)))
    tables.text = used.chain
    tables.interrupt = lambda: iptables.restore(
        block("nat", write_chains([Chain(FOREIGN, (f"-j {used.chain}",))]))
    )
    after_rejection = []

    def save(names: Collection[str] | None = None) -> Ruleset:
        after_rejection.append(iptables.save().chains[used])
        return iptables.save(names)

    tables.save = save  # type: ignore[attr-defined]
    agent.sync()
    assert after_rejection == [before]
    assert iptables.save().chains.keys().isdisjoint({used, FOREIGN})
