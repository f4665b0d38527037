"""A node without IPv6, or without ip6tables, is served over IPv4 only."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pykubeproxy.kernel import system
from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import service
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, path_without_ip6tables, running, saved

pytestmark = pytest.mark.root

CHECK = 32000
# Commands are not looked up in the system's folders, as in a container that lacks some.
ONLY_PATH = """
from pykubeproxy.kernel import runner
runner._SYSTEM_FOLDERS = ()
from pykubeproxy.cli import main
main()
"""


def disable_ipv6(_: Path) -> Mapping[str, str]:
    system.write_setting("net/ipv6/conf/all/disable_ipv6", 1)
    return {}


def remove_ip6tables(folder: Path) -> Mapping[str, str]:
    return {"PATH": path_without_ip6tables(folder)}


def listens_on_ipv6(port: int) -> bool:
    """Return whether a socket of this namespace has an IPv6 address and this port."""
    lines = Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") for line in lines)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (disable_ipv6, "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 = 1)"),
        (remove_ip6tables, "ip6tables-nft-restore not found on PATH"),
    ],
)
def test_only_ipv4_is_served(
    api: ApiServer, tmp_path: Path, prepare: Callable[[Path], Mapping[str, str]], reason: str
) -> None:
    """No IPv6 rules, health, metrics or health check port; the log says why."""
    api.store.create(
        service("lb", type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=CHECK)
    )
    log = tmp_path / "agent.log"
    flags = ("--hostname-override=node1", "--master", api.url, "--iptables-backend=nft")
    environment = prepare(tmp_path)
    with running(log, *flags, environment=environment, program=ONLY_PATH):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert list(json.loads(fetch(HEALTH, "/healthz").body)["status"]) == ["IPv4"]
        eventually(lambda: answers(CHECK, "/", 503))
        assert not listens_on_ipv6(CHECK)
        assert "IPv6" not in fetch(METRICS, "/metrics").body
    assert any("-d 10.96.0.10/32" in rule for rule in saved())
    assert "KUBE-" not in "".join(saved("ip6tables-nft-save"))
    assert reason in log.read_text()


def failed_start(folder: Path, api: ApiServer, flag: str) -> str:
    """Return the last line of an agent that cannot start without IPv6."""
    log = folder / "agent.log"
    disable_ipv6(folder)
    with running(log, "--hostname-override=node1", "--master", api.url, flag) as process:
        assert process.wait(20) == 1
    return log.read_text().splitlines()[-1]


def test_an_ipv6_cluster_cidr_fails_the_start_without_ipv6(api: ApiServer, tmp_path: Path) -> None:
    """With one line that names both."""
    last = failed_start(tmp_path, api, "--cluster-cidr=fd00:10::/48")
    assert "clusterCIDR: fd00:10::/48 has no IPv4 network, which this node needs; IPv6 is disabled" in last
    assert not any("KUBE-SERVICES" in rule for rule in saved())


def test_a_node_with_ipv6_addresses_only_fails_the_start_without_ipv6(tmp_path: Path, api: ApiServer) -> None:
    """Its first family must be supported."""
    assert "IPv6 is disabled" in failed_start(tmp_path, api, "--bind-address=fd00::1")


def test_cleanup_removes_ipv6_rules_of_a_node_without_ipv6(api: ApiServer, tmp_path: Path) -> None:
    """They may be from before."""
    with running(tmp_path / "agent.log", "--hostname-override=node1", "--master", api.url):
        eventually(lambda: any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save")))
    disable_ipv6(tmp_path)
    with running(tmp_path / "cleanup.log", "--cleanup") as process:
        assert process.wait(20) == 0
    assert not any("KUBE-SERVICES" in rule for rule in saved("ip6tables-nft-save"))
