"""Render preflight findings as text and JSON."""

import click

from pykubeproxy.inspect.preflight import cluster, iptables, node, report
from pykubeproxy.inspect.preflight.report import Finding
from pykubeproxy.kernel.tools import Backend, Tools
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

FINDINGS: list[Finding] = [
    iptables.privileges(frozenset(("CAP_NET_ADMIN", "CAP_NET_RAW"))),
    iptables.version(Tools(Backend.NFT, Family.IPV4, "iptables-nft", "", "", (1, 8, 2))),
    iptables.not_in_use(Backend.LEGACY, Family.IPV4, {ChainKey("nat", "KUBE-SERVICES"): 12}),
    node.forwarding(Family.IPV6, "0", needed=True),
    node.connections("240000", "262144"),
    *cluster.not_configured(),
]

TEXT = """\
ok    privileges         CAP_NET_ADMIN and CAP_NET_RAW are in effect
warn  iptables IPv4      iptables-nft 1.8.2
                         Up to 1.8.3 the nft backend misreads its own rules.
                         Install 1.8.4 or later.
fail  other-tables IPv4  legacy, not in use, has 1 chain of a service proxy too
                         Packets pass both. If nft is right, stop the proxy that
                         writes legacy rules if it still runs; the agent removes
                         them after its first sync. Else set --iptables-backend.
fail  forwarding IPv6    IPv6 packets are not forwarded
                         (net.ipv6.conf.all.forwarding = 0), so pods cannot be
                         reached
                         Set net.ipv6.conf.all.forwarding = 1.
warn  conntrack          240000 connections of 262144 tracked (92%)
                         When the table is full, new connections are dropped.
                         Raise net.netfilter.nf_conntrack_max, or
                         --conntrack-max-per-core, to 524288 in total.
skip  api-server         no API server is configured
                         Pass the agent's --kubeconfig or --config to check it.
                         Once the agent runs, run `pykubeproxy check` in its
                         pod.
skip  node               no API server is configured
skip  permissions        no API server is configured

Configuration: flags.
2 fail, 2 warn, 3 skip, 1 ok: this node is not ready for the proxy.
"""


def test_text_has_level_check_and_advice() -> None:
    """Within 80 columns."""
    assert click.unstyle(report.text(FINDINGS, "flags")) == TEXT
    assert max(map(len, TEXT.splitlines())) <= 80


def test_only_the_level_is_coloured() -> None:
    (first, *_) = report.text(FINDINGS, "flags").splitlines()
    assert first.startswith("\x1b[32mok  \x1b[0m  privileges")


def test_warnings_do_not_fail_the_check() -> None:
    levels = ("ok", "warn")
    text = report.text([finding for finding in FINDINGS if finding.level.value in levels], "flags")
    assert text.endswith("\n2 warn, 1 ok: this node is ready for the proxy.\n")


def test_skipped_checks_are_named_in_the_summary() -> None:
    """They fail nothing, but nothing is known about them either."""
    findings = [finding for finding in FINDINGS if finding.level.value != "fail"]
    text = " ".join(report.text(findings, "flags").split())
    assert text.endswith(
        " 2 warn, 3 skip, 1 ok: this node is ready for the proxy, apart from what was skipped."
    )
    document = report.document(findings, "n1", "nft", "flags")
    assert (document["passed"], document["complete"]) == (True, False)


def test_json_has_version_verdict_and_findings() -> None:
    document = report.document(FINDINGS, "n1", "nft", "flags")
    checks = document.pop("checks")
    assert document == {
        "apiVersion": "pykubeproxy/v1",
        "node": "n1",
        "backend": "nft",
        "configuration": "flags",
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
    assert report.document([], "", "", "")["passed"] is True
