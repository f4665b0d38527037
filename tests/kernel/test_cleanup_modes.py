"""`pykubeproxy cleanup --all-modes` on a node where kube-proxy ran in ipvs or nftables mode.

The interface kube-ipvs0 is a bridge here: not every kernel has dummy interfaces. test_ipvs.py has virtual servers.
"""

import json
from pathlib import Path

import pytest

from pykubeproxy.cli.cleanup import clean_up
from pykubeproxy.kernel import Backend, Runner, leftovers, network, open_iptables
from pykubeproxy.kernel import runner as runner_module
from pykubeproxy.objects import Family
from tests.cases import as_restore_input
from tests.fakes import kube_proxy
from tests.fakes.process import PROGRAM

pytestmark = pytest.mark.root

TABLES = ("ip kube-proxy", "ip6 kube-proxy", "inet kube-proxy", "ip mine")


@pytest.fixture
def node(inside: str, runner: Runner, backend: Backend) -> Runner:
    """A node with rules of ipvs mode in one backend, and everything else of both modes."""
    kube_proxy.create_interface()
    # kube-router has sets with similar names.
    kube_proxy.create_ipsets("KUBE-SRC-MYGROUP")
    open_iptables(backend, Family.IPV4, runner).restore(kube_proxy.RULES)
    for table in TABLES:
        assert runner.run(("nft", "add", "table", *table.split())).exit_code == 0
    return runner


def state(runner: Runner) -> list[object]:
    """Return everything that a cleanup might change."""
    saved = [open_iptables(backend, family, runner).save() for backend in Backend for family in Family]
    links = [*network.interfaces(), *network.local_addresses(Family.IPV4)]
    return [saved, links, leftovers.ipset_names(), runner.run(("nft", "list", "tables")).stdout]


def test_everything_of_both_modes_is_removed(
    node: Runner, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects of others stay; output is by mode; a second run has nothing to do."""
    assert clean_up(runner=node, all_modes=True)
    assert capsys.readouterr() == (
        f"""\
iptables mode:
  {backend.value}, IPv4: 4 jumps and 5 chains removed
ipvs mode:
  {backend.value}, IPv4: 5 jumps and 6 chains removed
  1 interface with 3 addresses removed: kube-ipvs0
  4 ipsets removed: KUBE-6-LOAD-BALANCER-SOURCE-CID, KUBE-6-NODE-PORT-TCP,
    KUBE-CLUSTER-IP and KUBE-NODE-PORT-TCP
nftables mode:
  2 tables removed: ip kube-proxy and ip6 kube-proxy
""",
        "",
    )
    assert not any("KUBE" in key.chain for key in open_iptables(backend, Family.IPV4, node).save().chains)
    assert [interface.name for interface in network.interfaces() if interface.name.startswith("kube")] == []
    assert leftovers.ipset_names() == {"KUBE-SRC-MYGROUP"}
    tables = node.run(("nft", "list", "tables")).stdout
    assert "table inet kube-proxy" in tables
    assert "table ip mine" in tables
    before = state(node)
    assert clean_up(runner=node, all_modes=True)
    assert capsys.readouterr() == ("Nothing to remove.\n", "")
    assert state(node) == before


def test_a_dry_run_lists_everything_and_changes_nothing(
    node: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(node)
    assert clean_up(dry_run=True, runner=node, all_modes=True, output="json")
    assert state(node) == before
    document = json.loads(capsys.readouterr().out)
    found = {(mode["mode"], mode["kind"]): mode for mode in document["otherModes"]}
    assert not any(mode["error"] or mode["kept"] for mode in found.values())
    assert {key: mode["names"] for key, mode in found.items()} == {
        ("ipvs", "virtual server"): [],
        ("ipvs", "interface"): ["kube-ipvs0"],
        ("ipvs", "ipset"): sorted(kube_proxy.SETS),
        ("nftables", "table"): ["ip kube-proxy", "ip6 kube-proxy"],
    }
    assert set(found["ipvs", "interface"]["addresses"]) >= set(kube_proxy.SERVICE_ADDRESSES)
    removed = {chain["chain"] for tables in document["tables"] for chain in tables["chains"]}
    assert removed >= {"KUBE-IPVS-FILTER", "KUBE-LOAD-BALANCER", "KUBE-SERVICES"}


def test_without_the_option_other_modes_stay(node: Runner, backend: Backend) -> None:
    """Only the rules that iptables mode has too are removed."""
    assert clean_up(runner=node)
    left = open_iptables(backend, Family.IPV4, node).save().chains
    assert {key.chain for key in left if "KUBE" in key.chain} >= {"KUBE-IPVS-FILTER", "KUBE-LOAD-BALANCER"}
    assert leftovers.has_interface()
    assert leftovers.ipset_names() > set(kube_proxy.SETS)
    assert leftovers.nftables_tables() == (Family.IPV4, Family.IPV6)


def test_a_failure_does_not_stop_the_others(
    node: Runner, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a set that a foreign rule uses."""
    iptables = open_iptables(backend, Family.IPV4, node)
    iptables.restore("*filter\n-A FORWARD -m set --match-set KUBE-CLUSTER-IP dst,dst -j DROP\nCOMMIT\n")
    assert not clean_up(runner=node, all_modes=True)
    output = capsys.readouterr()
    assert output.err == "Error: ipvs mode: cannot remove KUBE-CLUSTER-IP: Device or resource busy\n"
    assert "3 ipsets removed" in output.out
    assert "2 tables removed" in output.out
    iptables.restore("*filter\n-F FORWARD\nCOMMIT\n")
    assert clean_up(runner=node, all_modes=True)
    assert capsys.readouterr().out == "ipvs mode:\n  1 ipset removed: KUBE-CLUSTER-IP\n"


def test_missing_iptables_does_not_stop_the_others(
    node: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says that rules may be left. Sets that rules use stay."""
    monkeypatch.setattr(runner_module, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not clean_up(all_modes=True)
    output = capsys.readouterr()
    assert "1 interface with 3 addresses removed: kube-ipvs0" in output.out
    assert "2 tables removed" in output.out
    assert "Error: iptables-restore not found on PATH" in output.err
    assert leftovers.ipset_names() > {"KUBE-CLUSTER-IP"}


def test_two_capabilities_are_enough(node: Runner) -> None:
    """Those of the agent. Without them, the command says what it needs and changes nothing."""
    command = (*PROGRAM[:-1], "cleanup", "--all-modes")
    before = state(node)
    refused = node.run(("setpriv", "--inh-caps=-all", "--bounding-set=-all", *command))
    assert (refused.exit_code, state(node)) == (1, before)
    assert "CAP_NET_ADMIN" in refused.stderr
    few = ("setpriv", "--inh-caps=-all", "--bounding-set=-all,+net_admin,+net_raw", *command)
    assert node.run(few)[::2] == (0, "")
    assert not leftovers.has_interface()
    assert leftovers.ipset_names() == {"KUBE-SRC-MYGROUP"}


def test_rules_of_iptables_mode_are_removed_too(
    inside: str, runner: Runner, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    open_iptables(backend, Family.IPV4, runner).restore(as_restore_input("clusterip-one", Family.IPV4))
    assert clean_up(runner=runner, all_modes=True)
    assert capsys.readouterr().out.splitlines()[0] == "iptables mode:"
