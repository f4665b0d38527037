"""Render preflight findings as text and JSON."""

from typing import Any, cast

import click

from pykubeproxy.inspect.check import this_node as checks
from pykubeproxy.inspect.check.report import Finding, check_report, checked_node
from pykubeproxy.kernel.iptables import Backend, Tools
from pykubeproxy.objects import Family
from pykubeproxy.report.document import document
from pykubeproxy.report.text import text
from pykubeproxy.rules.ruleset import ChainKey

FINDINGS: list[Finding] = [
    checks.privileges(frozenset(("CAP_NET_ADMIN", "CAP_NET_RAW"))),
    checks.version(Tools(Backend.NFT, Family.IPV4, "iptables-nft", "", "", (1, 8, 2))),
    checks.not_in_use(Backend.LEGACY, Family.IPV4, {ChainKey("nat", "KUBE-SERVICES"): 12}),
    checks.forwarding(Family.IPV6, "0", needed=True),
    checks.connections("240000", "262144"),
    *checks.no_server(),
]

TEXT = """\
LEVEL  CHECK              RESULT
ok     privileges         CAP_NET_ADMIN and CAP_NET_RAW are in effect
warn   iptables IPv4      iptables-nft 1.8.2
                          Up to 1.8.3 the nft backend misreads its own rules.
                          Install 1.8.4 or later.
fail   other-tables IPv4  legacy, not in use, has 1 chain of a service proxy too
                          Packets pass both. If nft is right, stop the proxy
                          that writes legacy rules if it still runs; the agent
                          removes them after its first sync. Else set
                          --iptables-backend.
fail   forwarding IPv6    IPv6 packets are not forwarded
                          (net.ipv6.conf.all.forwarding = 0), so pods cannot be
                          reached
                          Set net.ipv6.conf.all.forwarding = 1.
warn   conntrack          240000 connections of 262144 tracked (92%)
                          When the table is full, new connections are dropped.
                          Raise net.netfilter.nf_conntrack_max, or
                          --conntrack-max-per-core, to 524288 in total.
skip   api-server         no API server is configured
                          Pass the agent's --kubeconfig or --config to check it.
                          Once the agent runs, run `pykubeproxy check` in its
                          pod.
skip   node               no API server is configured
skip   permissions        no API server is configured

Configuration: flags.
2 fail, 2 warn, 3 skip, 1 ok: this node is not ready for the proxy.
"""


def shown(findings: list[Finding], *, wide: bool = True) -> str:
    return text(check_report([checked_node("n1", findings, configuration="flags")]).blocks(wide=wide))


def test_text_has_level_check_and_advice() -> None:
    """Within 80 columns."""
    assert click.unstyle(shown(FINDINGS)) == TEXT
    assert max(map(len, TEXT.splitlines())) <= 80


def test_only_problems_are_shown_unless_asked() -> None:
    levels = [
        line.split()[0]
        for line in click.unstyle(shown(FINDINGS, wide=False)).splitlines()
        if line[:1].strip()
    ]
    assert levels[:-2] == ["warn", "fail", "fail", "warn", "skip"]
    assert shown([FINDINGS[0]], wide=False).startswith("Configuration: flags.\n1 ok: this node is ready")


def test_only_the_level_is_coloured() -> None:
    (_, first, *_) = shown(FINDINGS).splitlines()
    assert first.startswith("\x1b[32mok   \x1b[0m  privileges")


def test_warnings_do_not_fail_the_check() -> None:
    findings = [finding for finding in FINDINGS if finding.level.value in ("ok", "warn")]
    assert shown(findings).endswith("\n2 warn, 1 ok: this node is ready for the proxy.\n")


def test_skipped_checks_are_named_in_the_summary() -> None:
    """They fail nothing, but nothing is known about them either."""
    findings = [finding for finding in FINDINGS if finding.level.value != "fail"]
    assert " ".join(shown(findings).split()).endswith(
        " 2 warn, 3 skip, 1 ok: this node is ready for the proxy, apart from what was skipped."
    )
    checked = checked_node("n1", findings)
    assert (checked.passed, checked.complete) == (True, False)


def test_json_has_version_verdict_and_findings() -> None:
    found = document(check_report([checked_node("n1", FINDINGS, backend="nft", configuration="flags")]))
    (node,) = cast("list[dict[str, Any]]", found.pop("nodes"))
    assert found == {"apiVersion": "pykubeproxy/v1", "kind": "Check", "passed": False}
    checks = node.pop("checks")
    assert node == {
        "node": "n1",
        "proxy": "",
        "pod": "",
        "backend": "nft",
        "configuration": "flags",
        "migrateTo": "",
        "passed": False,
        "complete": False,
    }
    assert checks[0] == {
        "check": "privileges",
        "family": None,
        "level": "ok",
        "message": "CAP_NET_ADMIN and CAP_NET_RAW are in effect",
        "advice": "",
    }
    assert [it["level"] for it in checks] == ["ok", "warn", "fail", "fail", "warn", "skip", "skip", "skip"]
    assert checks[1]["family"] == "IPv4"


def test_several_nodes_have_titles_and_names_of_those_that_fail() -> None:
    nodes = [
        checked_node(name, FINDINGS[:count], proxy="kube-proxy v1.36.2")
        for name, count in (("b", 3), ("a", 1))
    ]
    found = check_report(nodes)
    assert [*found.names()] == ["node/b"]
    titles = [
        line
        for line in click.unstyle(text(found.blocks(wide=False))).splitlines()
        if line[:2] in ("a ", "b ")
    ]
    assert titles == ["a  kube-proxy v1.36.2: no problems", "b  kube-proxy v1.36.2"]
