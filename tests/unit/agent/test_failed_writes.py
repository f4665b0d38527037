"""iptables fails at any block: the next syncs heal it, and nothing is left behind."""

import contextlib
from collections.abc import Callable

import pytest

from pykubeproxy.agent.pending import Budget
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.kernel import Backend, Failed, KernelError, Rejected
from pykubeproxy.objects import Deleted, EndpointPort, Event, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import dispatch, skeleton
from pykubeproxy.rules.known import TABLES, KnownTables
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.services.ports import PortName
from tests.fakes.drift import scope
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import endpoint, numbered, service, slice_of

# More than three pairs make a Service large.
FEW = Budget(3, 3)
BACKENDS = pytest.mark.parametrize("backend", [*Backend], ids=lambda backend: backend.value)


def fail_at(node: SyncedFamily, block: int, work: Callable[[], object], is_killed: bool = False) -> None:
    """Do some work; iptables is killed, or rejects a line, at this block of each input."""
    restore = node.live.restore

    def fail(text: str) -> None:
        blocks = [f"{it}COMMIT\n" for it in text.split("COMMIT\n") if it]
        before = "".join(blocks[:block])
        restore(before)
        if len(blocks) > block:
            if is_killed:
                raise Failed("iptables-restore", 1, "killed")
            line = blocks[block].split("\n")[1]
            raise Rejected(before.count("\n") + 2, line, "RULE_APPEND failed (Cannot allocate memory)", 4)

    node.live.restore = fail  # type: ignore[method-assign]
    with contextlib.suppress(SyncFailed, KernelError):
        work()
    node.live.restore = restore  # type: ignore[method-assign]


def deleted(*numbers: int) -> list[Event]:
    return [Deleted(Kind.SERVICE, Key("ns", f"svc{n}")) for n in numbers]


def dead(*numbers: int) -> list[Event]:
    """Let these Services have no ready endpoint."""
    pods = {n: endpoint(f"10.244.{n // 250}.{n % 250}", ready=False) for n in numbers}
    return [Updated(slice_of(pod, service=f"svc{n}")) for n, pod in pods.items()]


@pytest.mark.usefixtures("small_trees")
@pytest.mark.parametrize("chains_per_block", [1, 3])
@pytest.mark.parametrize("block", range(16))
def test_services_that_come_back_after_a_rejected_block(
    block: int, chains_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches in force belong to a tree that is not wanted any more."""
    monkeypatch.setattr(dispatch, "LEAF", 4)
    many = [first + n for first in range(0, 160, 16) for n in (1, 2, 3)]
    context = flags_context(dispatch="tree")
    node = SyncedFamily(*numbered(*many), context=context, chains_per_block=chains_per_block)
    node.sync()
    before, some = node.chains(), range(1, 160, 16)
    fail_at(node, block, lambda: node.sync(*deleted(*some)))
    node.check_known()
    node.sync(*numbered(*some))
    node.settle()
    assert node.chains() == before


@pytest.mark.usefixtures("small_trees")
@pytest.mark.parametrize("block", range(16))
def test_endpoints_that_come_back_after_a_rejected_block(block: int) -> None:
    """No branch of table filter rejects their clients."""
    many = [1, 2, 40, 41, 80, 81, 300, 301, 600, 601]
    node = SyncedFamily(*numbered(*many), context=flags_context(dispatch="tree"), chains_per_block=1)
    node.sync()
    node.sync(*dead(2, 41, 81, 301))
    before = node.chains()
    fail_at(node, block, lambda: node.sync(*dead(1, 40, 80, 300)))
    node.check_known()
    node.sync(*numbered(1, 40, 80, 300))
    node.settle()
    assert node.chains() == before


@BACKENDS
@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("chains_per_block", [1, 200, None])
def test_a_large_service_keeps_its_endpoints_if_the_first_sync_fails(
    backend: Backend, is_killed: bool, chains_per_block: int | None
) -> None:
    """An earlier agent has served it."""
    hosts = [f"10.244.1.{n}" for n in range(1, 9)]
    large = (Updated(service()), Updated(slice_of(*hosts)))
    for block in range(8):
        node = SyncedFamily(
            *large, *numbered(1, 2, 3), backend=backend, chains_per_block=chains_per_block, budget=FEW
        )
        node.settle()
        node.restart()
        node.apply(*deleted(1), *numbered(4), Updated(slice_of("10.244.0.22", service="svc2")))
        fail_at(node, block, node.sync, is_killed)
        node.check_known()
        node.sync()
        assert node.targets() >= {f"{host}:8080" for host in hosts}


@pytest.mark.parametrize("blocks", range(12))
def test_chains_deleted_by_a_killed_write_lead_no_service_astray(blocks: int) -> None:
    """Ports of a waiting Service have lost their endpoints, and their chains before the write was killed."""
    ports = tuple(Port(name, Protocol.TCP, 80 + n) for n, name in enumerate("abcde"))
    targets = tuple(EndpointPort(port.name, Protocol.TCP, 8080) for port in ports)
    wide = (Updated(service(ports=ports)), Updated(slice_of("10.244.1.1", ports=targets)))
    node = SyncedFamily(*wide, *numbered(1), chains_per_block=1, budget=FEW)
    node.write_block_by_block()
    node.settle()
    node.round(Updated(slice_of("10.244.1.1", ports=targets[:2])))
    node.fail_after(blocks, SyncedFamily.round)
    node.check_known()
    node.sync(Updated(slice_of("10.244.0.22", service="svc1")))
    assert "10.244.0.22:8080" in node.targets()


@pytest.mark.parametrize("blocks", range(8))
def test_a_waiting_port_keeps_what_a_killed_write_has_brought(blocks: int) -> None:
    """It had no endpoint before; the sync that follows does not write it."""
    ports = tuple(Port(name, Protocol.TCP, 80 + n) for n, name in enumerate("ab"))
    targets = tuple(EndpointPort(port.name, Protocol.TCP, 8080) for port in ports)
    wide = Updated(service(ports=ports, external_ips=("192.0.2.1",)))
    node = SyncedFamily(wide, *numbered(1), chains_per_block=1, budget=FEW)
    node.write_block_by_block()
    node.settle()
    node.round(Updated(slice_of("10.244.1.1", ports=targets)))
    node.fail_after(blocks, SyncedFamily.turn_if_due)
    rejecting = node.chains()[skeleton.FILTER_SERVICES]
    node.sync(Updated(slice_of("10.244.0.22", service="svc1")))
    assert node.chains()[skeleton.FILTER_SERVICES] == rejecting
    node.check_known()


@BACKENDS
def test_an_unused_chain_that_a_foreign_rule_needs_causes_no_turns(backend: Backend) -> None:
    """It is emptied once, and cannot be deleted."""
    node = SyncedFamily(*numbered(1, 2), backend=backend)
    node.sync()
    chain = cluster_chain(PortName("ns", "svc1", "http", "TCP"))
    node.live.restore(f"*nat\n:FOREIGN - [0:0]\n-A FOREIGN -j {chain}\nCOMMIT\n")
    node.restart()
    node.sync()
    node.sync(*deleted(1))
    node.settle()
    assert node.chains()["nat", chain] == ()  # type: ignore[index]
    assert not node.tables.waiting


def test_drift_is_noted_while_only_a_table_is_unread() -> None:
    """A killed write left the entries of filter unknown; meanwhile another program flushes a chain of nat."""
    node = SyncedFamily(*numbered(1, 2), *dead(1))
    node.sync()
    fail_at(node, 1, lambda: node.sync(*deleted(1)), is_killed=True)
    node.live.tables["nat"]["KUBE-MARK-MASQ"] = ()
    node.tables.note_drift(scope())
    node.sync()
    assert node.chains()["nat", "KUBE-MARK-MASQ"]  # type: ignore[index]


@BACKENDS
def test_a_killed_trial_leaves_no_service(backend: Backend) -> None:
    """The ordinary service of a search is gone after the next sync, whatever becomes of the search."""
    node = SyncedFamily(*numbered(1), backend=backend)
    node.sync()
    restore = node.live.restore

    def fail(text: str) -> None:
        restore(text)
        if "198.51.100.1" in text:
            raise Failed("iptables-restore", 1, "killed")

    node.live.restore = fail  # type: ignore[method-assign]
    node.live.rejects = lambda rule: "--to-destination 10.244.0.2:" in rule
    with pytest.raises(SyncFailed):
        node.sync(*numbered(2))
    node.live.restore = restore  # type: ignore[method-assign]
    node.live.rejects = lambda _: False
    node.sync()
    node.settle()
    assert {key.name for key in node.tables.services()} == {"svc1", "svc2"}
    node.check_known()


@BACKENDS
def test_a_suspect_port_without_chains_stops_no_sync(backend: Backend) -> None:
    """Another program flushes the table before the tries have decided about it."""
    node = SyncedFamily(Updated(service()), Updated(slice_of("10.244.1.5")), *numbered(1), backend=backend)
    node.sync()
    node.live.rejects = lambda rule: "--to-destination 10.244.1.6:" in rule
    assert node.sync(Updated(slice_of("10.244.1.6"))).held
    node.live.rejects = lambda _: False
    node.live.tables["nat"] = {n: () for n in node.live.tables["nat"] if not n.startswith("KUBE-")}
    node.tables.note_drift(scope())
    node.sync()
    assert node.targets() == {"10.244.0.1:8080"}
    node.try_all()
    assert node.targets() == {"10.244.0.1:8080", "10.244.1.6:8080"}


@BACKENDS
def test_a_table_flushed_just_before_a_sync_is_written_again(backend: Backend) -> None:
    """Before the check for drift; no service and no tree is to blame."""
    node = SyncedFamily(*numbered(*range(1, 8)), backend=backend)
    node.sync()
    node.live.tables["nat"] = {n: () for n in node.live.tables["nat"] if not n.startswith("KUBE-")}
    report = node.sync(*numbered(8))
    assert not (report.quarantined or report.rejected_tree or report.held)
    fresh = node.fresh()
    fresh.sync()
    assert node.our_chains() == fresh.our_chains()


def test_adopted_chains_of_a_large_port_are_known_as_they_are_written() -> None:
    """A block may have more chains in a table with many, so the port fits into one."""
    node = SyncedFamily(*numbered(*range(1, 100)), chains_per_block=2)
    web = [Updated(service()), Updated(slice_of("10.244.1.1", "10.244.1.2", "10.244.1.3"))]
    node.sync(*web)
    node.cluster.apply(Updated(slice_of("10.244.1.2", "10.244.1.4", "10.244.1.5")))
    node.restart()
    node.sync()
    node.check_known()


def test_ports_of_one_name_claim_their_own_rules() -> None:
    """Comments do not name the protocol."""
    ports = tuple(Port("dns", protocol, 53) for protocol in (Protocol.UDP, Protocol.TCP))
    node = SyncedFamily(Updated(service(ports=ports)))
    node.sync()
    live, known = node.live.save(), KnownTables()
    known.observe(live, TABLES)
    claimed = [PortName("ns", "web", "dns", protocol) for protocol in ("UDP", "TCP")]
    known.claim(claimed, live)
    for name in claimed:
        port = known.port(name)
        assert port
        ((_, (rule,)),) = port.entries
        assert f"-p {name.protocol.lower()} " in rule


def test_a_sync_leaves_nothing_outdated() -> None:
    """Else the next one renders shared chains in vain."""
    node = SyncedFamily(*numbered(*range(1, 6)))
    node.sync()
    node.sync(*deleted(3))
    assert not node.tables._known.outdated
