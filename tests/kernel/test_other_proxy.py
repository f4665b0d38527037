"""Another proxy changes the tables during a sync."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Iptables
from pykubeproxy.kernel.restore import RestoreSession
from pykubeproxy.objects import Deleted, Family, Key, Kind, Updated
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.names import endpoint_chain
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.text import Chain, block, write_chains
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
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
    """In small blocks too: the sync fails, and the next one deletes both chains."""
    ipv4 = iptables.family is Family.IPV4
    cluster, tables = Cluster(), Interrupted(iptables)
    agent = FamilyTables(tables, 2)  # type: ignore[arg-type]
    context = rule_context(load(None, {}).config, "node1", None, KernelFacts(nfacct=False), iptables.family)
    endpoint = "10.244.0.5" if ipv4 else "fd00:244::5"
    for number in range(SERVICES):
        address = f"10.96.0.{number}" if ipv4 else f"fd00:96::{number}"
        cluster.apply(Updated(service(f"s{number}", cluster_ip=address)))
        cluster.apply(Updated(slice_of(endpoint, service=f"s{number}")))
    agent.sync(cluster, Changes(), context)
    port = PortName("ns", "s3", "http", "TCP")
    used = ChainKey("nat", endpoint_chain(port, f"{endpoint}:8080" if ipv4 else f"[{endpoint}]:8080"))
    before = iptables.save().chains[used]
    assert len(before) == 2

    gone = [Key("ns", f"s{number}") for number in range(1, SERVICES)]
    for key in gone:
        cluster.apply(Deleted(Kind.SERVICE, key))
    tables.text = used.chain
    tables.interrupt = lambda: iptables.restore(
        block("nat", write_chains([Chain(FOREIGN, (f"-j {used.chain}",))]))
    )
    with pytest.raises(SyncFailed):
        agent.sync(cluster, Changes(gone), context)
    assert iptables.save().chains[used] == before
    agent.sync(cluster, Changes(), context)
    assert iptables.save().chains.keys().isdisjoint({used, FOREIGN})
