"""Rules in iptables-save format read back byte for byte."""

import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import Iptables, nfacct
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import canonical
from pykubeproxy.rules.ruleset import ChainKey

COUNTERS = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")


def block(table: str, chains: dict[str, tuple[str, ...]]) -> str:
    """Return restore input that creates chains of a table."""
    names = [f":{chain} - [0:0]" for chain in chains]
    rules = [f"-A {chain} {rule}" for chain in chains for rule in chains[chain]]
    return "\n".join([f"*{table}", *names, *rules, "COMMIT\n"])


def shapes(family: Family, table: str) -> list[str]:
    """Return the rules of rules.txt for one table."""
    start = f"{family.value.lower()} {table} "
    lines = (Path(__file__).parent / "rules.txt").read_text().splitlines()
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


@pytest.mark.root
@pytest.mark.parametrize("table", ["filter", "nat"])
def test_every_shape_reads_back(iptables: Iptables, inside: str, table: str) -> None:
    """Every form of rule on a node, our own and foreign, in both backends and families."""
    for name in COUNTERS:
        assert nfacct.ensure(name) == ""
    rules = shapes(iptables.family, table)
    assert len(rules) > 9
    written = {f"C{n}": (rule,) for n, rule in enumerate(rules)}
    iptables.restore(block(table, {"TARGET": (), **written}))
    live = dict(iptables.save((table,)).of_table(table))
    assert {chain: live[chain] for chain in written} == written


@pytest.mark.root
def test_probabilities_read_back(iptables: Iptables) -> None:
    """The kernel stores probabilities in steps of 1/2^31."""
    steps = (round(round(1 / n, 10) * 2**31) / 2**31 for n in range(1, 301))
    rules = tuple(f"-m statistic --mode random --probability {step:.11f} -j RETURN" for step in steps)
    iptables.restore(block("nat", {"SHARES": rules}))
    assert iptables.save(("nat",)).chains[ChainKey("nat", "SHARES")] == rules


@pytest.mark.root
def test_foreign_rules_can_be_read(iptables: Iptables) -> None:
    """Comments may have any characters."""
    comments = [
        '"grün und blau"',
        '"a \\"quoted\\" word"',
        '"\udcff\udcfe raw bytes"',
        "it",
        '"-A FAKE -j DROP"',
    ]
    rules = tuple(f"-m comment --comment {comment} -j ACCEPT" for comment in comments)
    iptables.restore(block("filter", {"FOREIGN": rules}))
    assert iptables.save(("filter",)).chains[ChainKey("filter", "FOREIGN")] == rules


@pytest.mark.root
def test_line_breaks_in_a_foreign_comment_stay_in_the_rule(iptables: Iptables) -> None:
    iptables.restore("*filter\n:FOREIGN - [0:0]\n:OURS - [0:0]\nCOMMIT\n")
    comment = 'a "quoted\\\n-A OURS -j DROP\r\v\x1c\u2028-A OURS -j DROP\nCOMMIT'
    added = ("-A", "FOREIGN", "-m", "comment", "--comment", comment, "-j", "ACCEPT")
    assert iptables.runner.run((iptables.tools.main, "-t", "filter", *added)).exit_code == 0
    live = dict(iptables.save(("filter",)).of_table("filter"))
    assert live["OURS"] == ()
    assert len(live["FOREIGN"]) == 1
    assert "COMMIT" not in live
    assert live["FOREIGN"][0].endswith('COMMIT" -j ACCEPT')


def test_trailing_space_is_removed() -> None:
    """iptables-nft up to 1.8.7 prints one after a rule without a target."""
    assert (
        canonical('-A A -m comment --comment "none" \n-A A \n') == '-A A -m comment --comment "none"\n-A A\n'
    )


def test_second_space_before_a_counter_is_removed() -> None:
    """iptables prints two spaces before the name of a counter."""
    printed = "-A A -m nfacct --nfacct-name  drops -j DROP\n"
    assert canonical(printed) == "-A A -m nfacct --nfacct-name drops -j DROP\n"


@pytest.mark.root
def test_counters_do_not_change_rules(iptables: Iptables) -> None:
    """Rules that matched packets have counts."""
    iptables.restore(
        block("filter", {"SEEN": ("-p tcp -j RETURN", "")}).replace("COMMIT", "-A OUTPUT -j SEEN\nCOMMIT")
    )
    assert iptables.runner.run(("ip", "link", "set", "lo", "up")).exit_code == 0
    host = "127.0.0.1" if iptables.family is Family.IPV4 else "::1"
    probe = f"import socket; socket.create_connection(('{host}', 9), timeout=5)"
    assert "refused" in iptables.runner.run((sys.executable, "-c", probe)).stderr
    rules, counters = iptables.save_counted()
    assert rules == iptables.save()
    assert counters[ChainKey("filter", "SEEN")][0][0] >= 1
