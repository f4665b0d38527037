"""Render dump-rules: recorded services of every kind against golden files.

`python -m tests.unit.inspect.test_dump_render` rewrites the golden files for review.
"""

from pathlib import Path

import click
import pytest

from pykubeproxy.cli.dump_rules import _show
from pykubeproxy.inspect.dump.model import ServiceView, in_order, views
from pykubeproxy.inspect.dump.render_rules import listing
from pykubeproxy.inspect.dump.report import DumpedNode, DumpReport
from pykubeproxy.inspect.node import NodeState, Origin, UnknownNode
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family, Node
from pykubeproxy.report.document import document as as_document
from pykubeproxy.report.document import json_text
from pykubeproxy.report.text import text as text_of
from pykubeproxy.rules.ruleset import ChainKey, Count
from tests.cases import expected, load_case

FOLDER = Path(__file__).parents[2] / "data" / "dump-rules"
CASES = (
    "affinity-timeout",
    "clusterip-three",
    "dual-stack",
    "ingress-nginx-local",
    "itp-local-none",
    "itp-local-nodeport",
    "kube-dns",
    "lb-local",
    "lb-local-none",
    "lb-source-ranges",
    "multi-port",
    "no-endpoints-lb",
    "nodeport-addresses",
    "nodeport-addresses-v6",
    "same-port-three-protocols",
    "unnamed-port",
)
LISTED = ("lb-local", "lb-source-ranges", "no-endpoints-lb")
DOCUMENTS = ("affinity-timeout", "dual-stack", "lb-local-none", "lb-source-ranges")


def views_of(case: str) -> tuple[ServiceView, ...]:
    """Return the views of a case; the first endpoint rule of each chain has counted packets."""
    rulesets = [expected(load_case(case), family) for family in Family]
    return in_order(
        view
        for ruleset in rulesets
        for view in views(
            ruleset,
            {
                key: (Count(), Count(7 + len(rules), 420))
                for key, rules in ruleset.chains.items()
                if key.chain.startswith("KUBE-SEP-U") or key.chain.startswith("KUBE-SEP-L")
            },
        )
    )


def report_of(*views: ServiceView) -> DumpReport:
    return DumpReport(nodes=(DumpedNode("node1", services=views),))


def table(case: str) -> str:
    return click.unstyle(text_of(report_of(*views_of(case)).blocks(wide=False)))


def document(case: str) -> str:
    return json_text(as_document(report_of(*views_of(case))))


def listed(case: str) -> str:
    return listing(expected(load_case(case), Family.IPV4), ServiceFilter("ns1", "web"))


def golden(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.mark.parametrize("case", CASES)
def test_table_equals_golden_file(case: str) -> None:
    """Frontends, policies and endpoints with shares, within 80 columns."""
    assert table(case) == golden(f"{case}.txt")
    assert max(map(len, table(case).splitlines())) <= 80


@pytest.mark.parametrize("case", DOCUMENTS)
def test_json_equals_golden_file(case: str) -> None:
    """One entry per service port, family and policy."""
    assert document(case) == golden(f"{case}.json")


@pytest.mark.parametrize("case", LISTED)
def test_listing_equals_golden_file(case: str) -> None:
    """Rules are in traversal order and in iptables-save format."""
    assert listed(case) == golden(f"{case}.rules")


@pytest.mark.parametrize("case", CASES)
def test_listed_rules_jump_only_forward(case: str) -> None:
    """Except to the chain that marks packets."""
    ruleset = expected(load_case(case), Family.IPV4)
    above: set[ChainKey] = set()
    table = ""
    for line in listing(ruleset, ServiceFilter()).splitlines():
        if line.startswith("*"):
            table = line[1:]
            continue
        _, chain, rule = line.split(" ", 2)
        assert rule in ruleset.chains[ChainKey(table, chain)]
        above.add(ChainKey(table, chain))
        target = ChainKey(table, rule.rpartition("-j ")[2])
        assert target not in above, line


def test_wide_has_a_header_above_endpoints() -> None:
    wide = text_of(report_of(*views_of("lb-local-none")).blocks(wide=True)).splitlines()
    at = next(number for number, line in enumerate(wide) if "ENDPOINT" in line)
    assert wide[at].split() == ["SHARE", "ENDPOINT", "PACKETS", "BYTES", "CHAIN"]
    assert wide[at].index("ENDPOINT") == wide[at + 1].index("192.168.")
    assert wide[at].index("CHAIN") == wide[at + 1].index("KUBE-SEP-")


def test_dump_of_nodes_is_ordered_whoever_answers_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes that were not read have no part."""
    unread = UnknownNode(Node("n1"), "no pod", proxy="kube-proxy v1.35.1")
    read = [NodeState(Node(name), Origin("", proxy="kube-proxy")) for name in ("n10", "n9")]
    _show([*read, unread], ServiceFilter(), "text", required=False)
    assert click.unstyle(capsys.readouterr().out).split("\n\n") == [
        "# Node n9, kube-proxy",
        "# Node n10, kube-proxy\n",
    ]


def test_styles_do_not_change_the_text() -> None:
    styled = text_of(report_of(*views_of("lb-local-none")).blocks(wide=False))
    assert "\x1b[1mns1/web:http\x1b[0m" in styled
    assert "\x1b[33mdropped: no endpoints on this node\x1b[0m" in styled


def test_no_services_give_an_empty_table_and_list() -> None:
    empty = report_of()
    assert (text_of(empty.blocks(wide=False)), [*empty.names()], empty.nodes[0].services) == ("", [], ())


def test_names_are_arguments_of_other_commands() -> None:
    assert "svc/ns1/web:http" in report_of(*views_of("multi-port")).names()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for text, ending, cases in (
        (table, "txt", CASES),
        (document, "json", DOCUMENTS),
        (listed, "rules", LISTED),
    ):
        for case in cases:
            (FOLDER / f"{case}.{ending}").write_text(text(case))
