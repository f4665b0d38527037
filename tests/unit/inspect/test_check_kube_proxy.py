"""Checks of a kube-proxy from outside."""

import pytest

from pykubeproxy.inspect.check import from_outside as kube_proxy
from pykubeproxy.inspect.check.report import Finding
from pykubeproxy.objects import Family
from pykubeproxy.objects.pods import Container, Pod
from pykubeproxy.rules.iptables_save import parse
from tests.fakes.remote_nodes import SERVING


def outcome(findings: list[Finding]) -> dict[str, str]:
    return {it.check: it.level.value for it in findings}


@pytest.mark.parametrize(
    ("proxy", "server", "level"),
    [
        ("v1.35.1", "v1.35.4", "ok"),
        ("v1.32.9-eksbuild.1", "v1.35.4-gke.100", "ok"),
        ("v1.31.9", "v1.35.4", "warn"),
        ("v1.36.0", "v1.35.4", "warn"),
        ("", "v1.35.4", "skip"),
        ("latest", "v1.35.4", "skip"),
        ("v1.35.1", "", "skip"),
    ],
)
def test_version_skew(proxy: str, server: str, level: str) -> None:
    assert kube_proxy.version(proxy, server).level.value == level


@pytest.mark.parametrize(
    ("phase", "ready", "restarts", "level"),
    [
        ("Running", True, 4, "ok"),
        ("Running", True, 5, "warn"),
        ("Running", False, 0, "fail"),
        ("Failed", False, 0, "fail"),
    ],
)
def test_pod(phase: str, ready: bool, restarts: int, level: str) -> None:
    container = Container("kube-proxy", ready=ready, restarts=restarts, problem="why")
    finding = kube_proxy.pod("kube-proxy v1.35.1", Pod("kube-system", "p1", phase=phase), container)
    assert finding.level.value == level
    assert level == "ok" or finding.advice.startswith("Run `kubectl logs -n kube-system p1`")


def test_tables_that_serve() -> None:
    rules = parse(Family.IPV4, SERVING)
    found = [*kube_proxy.tables([rules], "nft", "")]
    assert outcome(found) == {"tables": "ok", "jumps": "ok", "other-tables": "ok"}


def test_rules_in_both_backends() -> None:
    rules = parse(Family.IPV4, SERVING)
    found = outcome([*kube_proxy.tables([rules], "nft", "legacy")])
    assert found["other-tables"] == "fail"


@pytest.mark.parametrize("chain", ["PREROUTING", "OUTPUT", "POSTROUTING", "FORWARD"])
def test_missing_jump(chain: str) -> None:
    text = "".join(f"{line}\n" for line in SERVING.splitlines() if f"-A {chain} " not in line)
    (jumps,) = (it for it in kube_proxy.tables([parse(Family.IPV4, text)], "nft", "") if it.check == "jumps")
    assert jumps.level.value == "fail"
    assert f" {chain} to KUBE-" in jumps.message


def test_leftovers_of_ipvs_mode() -> None:
    text = SERVING.replace(":KUBE-SVC-A", ":KUBE-LOAD-BALANCER - [0:0]\n:KUBE-SVC-A")
    found = outcome([*kube_proxy.tables([parse(Family.IPV4, text)], "nft", "")])
    assert found["leftovers"] == "warn"
