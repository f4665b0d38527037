"""`pykubeproxy cleanup` on real tables."""

import json

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli.check import check
from pykubeproxy.cli.cleanup import clean_up
from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.kernel.system import write_setting
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import as_restore_input

# The command reads settings of the namespace, too.
pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

FOREIGN = """\
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -o docker0 -j MASQUERADE
COMMIT
*filter
:MINE - [0:0]
-A INPUT -j MINE
-A FORWARD -i docker0 -j ACCEPT
COMMIT
"""
KUBELET = """\
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" \
-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
"""


def opened(backend: Backend, runner: Runner) -> list[Iptables]:
    return [open_iptables(backend, family, runner) for family in Family]


def legacy_tables(runner: Runner) -> list[str]:
    return [table for iptables in opened(Backend.LEGACY, runner) for table in iptables.legacy_tables()]


def test_cleanup_removes_our_rules_in_both_backends(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Foreign rules keep their order; a second cleanup has nothing to do."""
    everywhere = [*opened(Backend.NFT, runner), *opened(Backend.LEGACY, runner)]
    before = []
    for iptables in everywhere:
        iptables.restore(FOREIGN)
        before.append(iptables.save())
        iptables.restore(as_restore_input("dual-stack", iptables.family))
        iptables.restore("*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n")
    assert clean_up(runner=runner)
    output = capsys.readouterr()
    assert [line.split(":")[0] for line in output.out.splitlines()] == [
        "nft, IPv4",
        "nft, IPv6",
        "legacy, IPv4",
        "legacy, IPv6",
    ]
    assert output.out.splitlines()[0] == "nft, IPv4: 14 jumps and 18 chains removed"
    for iptables, rules in zip(everywhere, before, strict=True):
        left = {key: chain for key, chain in iptables.save().chains.items() if key.table in ("nat", "filter")}
        assert left == dict(rules.chains)
    assert clean_up(runner=runner)
    assert capsys.readouterr().out == "Nothing to remove.\n"


@pytest.fixture
def kubelet(runner: Runner, backend: Backend) -> Iptables:
    """Tables with the rules of a kubelet."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    iptables.restore(KUBELET)
    return iptables


def guard(iptables: Iptables) -> list[str]:
    """Return the rules in KUBE-FIREWALL, and the jumps to it."""
    chains = iptables.save().chains
    jumps = [rule for rules in chains.values() for rule in rules if rule == "-j KUBE-FIREWALL"]
    return [*jumps, *chains.get(ChainKey("filter", "KUBE-FIREWALL"), ())]


def test_the_kubelets_firewall_chain_stays(
    runner: Runner, kubelet: Iptables, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a proxy wrote to the same tables."""
    before = kubelet.save()
    kubelet.restore(as_restore_input("clusterip-one", Family.IPV4, jumps=False))
    assert clean_up(runner=runner)
    left = {key: rules for key, rules in kubelet.save().chains.items() if key.table != "nat"}
    assert left == dict(before.chains)
    assert "KUBE-FIREWALL" not in capsys.readouterr().out


def test_a_proxys_firewall_chain_in_the_other_backend_goes(runner: Runner, kubelet: Iptables) -> None:
    """The kubelet's guards loopback addresses against other hosts. `check` finds nothing to complain about."""
    write_setting("net/ipv4/conf/all/route_localnet", 1)
    (other,) = (candidate for candidate in Backend if candidate is not kubelet.backend)
    left = open_iptables(other, Family.IPV4, runner)
    left.restore(as_restore_input("clusterip-one", Family.IPV4))
    assert len(guard(left)) == 3
    assert other_tables(kubelet.backend)["level"] == "fail"
    assert clean_up(runner=runner)
    assert (guard(left), len(guard(kubelet))) == ([], 3)
    assert other_tables(kubelet.backend)["level"] == "ok"


def test_the_only_guard_of_loopback_addresses_stays(
    runner: Runner, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the kernel drops packets to them anyway. The output tells."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    iptables.restore(as_restore_input("clusterip-one", Family.IPV4))
    write_setting("net/ipv4/conf/lo/route_localnet", 1)
    assert clean_up(runner=runner)
    assert f"{backend.value}, IPv4: chain KUBE-FIREWALL stays: " in capsys.readouterr().out
    assert len(guard(iptables)) == 3
    write_setting("net/ipv4/conf/lo/route_localnet", 0)
    assert clean_up(runner=runner)
    assert capsys.readouterr().out == f"{backend.value}, IPv4: 2 jumps and 1 chain removed\n"
    assert guard(iptables) == []


def other_tables(used: Backend) -> dict[str, str]:
    """Return what `check` says about the IPv4 tables of the backend that is not in use."""
    result = CliRunner().invoke(check, ["-o", "json", "--iptables-backend", used.value])
    (node,) = json.loads(result.stdout)["nodes"]
    checks = node["checks"]
    (found,) = (check for check in checks if (check["check"], check["family"]) == ("other-tables", "IPv4"))
    return found


def test_dry_run_changes_nothing(
    iptables: Iptables, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints numbers, and the restore input on request."""
    iptables.restore(as_restore_input("clusterip-one", iptables.family))
    before = iptables.save()
    assert clean_up(dry_run=True, output="wide", runner=runner)
    output = capsys.readouterr().out
    assert "-X KUBE-POSTROUTING" in output.splitlines()
    assert output.splitlines()[-1].endswith(" chains would be removed")
    assert iptables.save() == before


def test_cleanup_of_an_empty_node_creates_no_table(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert clean_up(runner=runner)
    assert capsys.readouterr().out == "Nothing to remove.\n"
    assert legacy_tables(runner) == []


def test_cleanup_of_nft_creates_no_legacy_table(runner: Runner) -> None:
    for iptables in opened(Backend.NFT, runner):
        iptables.restore(as_restore_input("clusterip-one", iptables.family))
    assert clean_up(runner=runner)
    assert legacy_tables(runner) == []


def test_a_chain_that_foreign_rules_use_is_emptied(
    iptables: Iptables, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one warning, and no second attempt."""
    iptables.restore(as_restore_input("clusterip-one", iptables.family))
    iptables.restore("*nat\n:CNI - [0:0]\n-A CNI -j KUBE-MARK-MASQ\nCOMMIT\n")
    assert clean_up(runner=runner)
    place = f"{iptables.backend.value}, {iptables.family.value}"
    assert capsys.readouterr().err == (
        f"Warning: {place}: foreign rules jump to chain KUBE-MARK-MASQ of table nat, so it was only emptied;"
        " remove those rules first\n"
    )
    assert iptables.save().chains[ChainKey("nat", "KUBE-MARK-MASQ")] == ()
    assert clean_up(runner=runner)
    assert capsys.readouterr().out == "Nothing to remove.\n"


def test_thousands_of_chains_are_removed(runner: Runner) -> None:
    """Also with nft, where they refer to each other."""
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    iptables.restore(as_restore_input("large-cluster", Family.IPV4))
    assert len(iptables.save().chains) > 1000
    assert clean_up(runner=runner)
    assert not [key for key in iptables.save().chains if key.chain.startswith("KUBE-S")]


def test_missing_permission_is_one_line(runner: Runner) -> None:
    plain = Runner((*runner.prefix, "setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all"))
    with pytest.raises(click.ClickException, match="CAP_NET_ADMIN"):
        clean_up(runner=plain)


def test_has_chain_creates_no_legacy_table(runner: Runner) -> None:
    for iptables in opened(Backend.LEGACY, runner):
        assert not iptables.has_chain(ChainKey("nat", "KUBE-PROXY-CANARY"))
    assert legacy_tables(runner) == []


def test_json_is_one_document(iptables: Iptables, runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if there is nothing to do."""
    iptables.restore(as_restore_input("clusterip-one", iptables.family))
    iptables.restore("*nat\n:CNI - [0:0]\n-A CNI -j KUBE-MARK-MASQ\nCOMMIT\n")
    assert clean_up(runner=runner, output="json")
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert (document["apiVersion"], document["dryRun"], output.err) == ("pykubeproxy/v1", False, "")
    tables = {(table["backend"], table["family"]): table for table in document["tables"]}
    assert len(tables) == 4
    done = tables.pop((iptables.backend.value, iptables.family.value))
    assert {"table": "nat", "chain": "KUBE-SERVICES"} in done["chains"]
    assert {jump["chain"] for jump in done["jumps"]} >= {"PREROUTING", "OUTPUT", "POSTROUTING"}
    assert done["kept"] == [{"table": "nat", "chain": "KUBE-MARK-MASQ"}]
    assert "-X KUBE-SERVICES" in done["input"]
    assert all(
        not (table["jumps"] or table["chains"] or table["input"] or table["error"])
        for table in tables.values()
    )
    assert clean_up(dry_run=True, runner=runner, output="json")
    again = json.loads(capsys.readouterr().out)
    assert again["dryRun"]
    assert not any(table["chains"] for table in again["tables"])
