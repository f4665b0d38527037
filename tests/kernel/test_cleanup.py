"""`pykubeproxy cleanup` on real tables."""

import json

import click
import pytest

from pykubeproxy.cli.cleanup import clean_up
from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import as_restore_input

pytestmark = pytest.mark.root

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
    assert output.out.splitlines()[0] == "nft, IPv4: 12 jumps and 17 chains removed"
    for iptables, rules in zip(everywhere, before, strict=True):
        left = {key: chain for key, chain in iptables.save().chains.items() if key.table in ("nat", "filter")}
        kubelets = {
            key: tuple(rule for rule in chain if "KUBE-FIREWALL" not in rule) for key, chain in left.items()
        }
        assert ChainKey("filter", "KUBE-FIREWALL") in kubelets
        del kubelets[ChainKey("filter", "KUBE-FIREWALL")]
        assert kubelets == dict(rules.chains)
    assert clean_up(runner=runner)
    assert capsys.readouterr().out == "Nothing to remove.\n"


def test_dry_run_changes_nothing(
    iptables: Iptables, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints numbers, and the restore input on request."""
    iptables.restore(as_restore_input("clusterip-one", iptables.family))
    before = iptables.save()
    assert clean_up(dry_run=True, verbose=True, runner=runner)
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
    assert clean_up(runner=runner, as_json=True)
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert (document["apiVersion"], document["dryRun"], output.err) == ("pykubeproxy/v1", False, "")
    tables = {(it["backend"], it["family"]): it for it in document["tables"]}
    assert len(tables) == 4
    done = tables.pop((iptables.backend.value, iptables.family.value))
    assert {"table": "nat", "chain": "KUBE-SERVICES"} in done["chains"]
    assert {it["chain"] for it in done["jumps"]} >= {"PREROUTING", "OUTPUT", "POSTROUTING"}
    assert done["kept"] == [{"table": "nat", "chain": "KUBE-MARK-MASQ"}]
    assert "-X KUBE-SERVICES" in done["input"]
    assert all(not (it["jumps"] or it["chains"] or it["input"] or it["error"]) for it in tables.values())
    assert clean_up(dry_run=True, runner=runner, as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again["dryRun"]
    assert not any(it["chains"] for it in again["tables"])
