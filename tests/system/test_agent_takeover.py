"""An agent takes over from a kube-proxy in nftables mode, and from a proxy with the other iptables backend."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

LEFT = """
table ip kube-proxy {
    chain services { type nat hook prerouting priority dstnat; ip daddr 10.96.0.10 dnat to 10.244.0.5; }
}
table ip6 kube-proxy {
    chain services { type nat hook prerouting priority dstnat; }
}
"""
FOREIGN = """
table ip mine { }
table inet kube-proxy { }
"""


FIREWALL = "-A KUBE-FIREWALL -s 192.0.2.1/32 -j DROP"
OLD_BACKEND = f"""*filter
:KUBE-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
{FIREWALL}
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A MINE -j ACCEPT
COMMIT
"""


def tables() -> set[str]:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return set(listed.splitlines())


def test_kube_proxys_tables_are_removed_after_the_first_sync(tmp_path: Path) -> None:
    """They serve until then; foreign tables stay."""
    with inside_a_namespace(), server() as api:
        subprocess.run(["nft", "-f", "-"], input=LEFT + FOREIGN, text=True, check=True)
        before = tables()
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", clusterIP="10.96.0.10"))
        api.store.create(slice_of("web", "10.244.0.5"))
        api.faults.fail(500, times=1000, path="/endpointslices")
        with running(tmp_path / "log", "--master", api.url, "--hostname-override=node1"):
            eventually(lambda: answers(HEALTH, "/livez", 200))
            api.requests.wait(2, "list", "endpointslices.discovery.k8s.io")
            assert before <= tables()
            assert not any("KUBE-SVC" in rule for rule in saved())
            api.faults.clear()
            # At any time, one of the two serves.
            eventually(lambda: "table ip kube-proxy" not in tables())
            assert any("-d 10.96.0.10/32" in rule for rule in saved())
            eventually(lambda: "table ip6 kube-proxy" not in tables())
            assert tables() >= {"table ip mine", "table inet kube-proxy"}
        assert (tmp_path / "log").read_text().count("kube-proxy nftables table removed") == 2


def test_tables_that_kube_proxy_writes_again_are_removed_again(tmp_path: Path) -> None:
    """It may have run a moment longer than the agent's first sync took."""
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        with running(tmp_path / "log", "--master", api.url, "--hostname-override=node1"):
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            subprocess.run(["nft", "-f", "-"], input=LEFT, text=True, check=True)
            eventually(lambda: not any("kube-proxy" in table for table in tables()))


@pytest.mark.parametrize(("used", "other"), [("nft", "legacy"), ("legacy", "nft")])
def test_the_rules_of_the_other_backend_are_removed(used: str, other: str, tmp_path: Path) -> None:
    """After the first sync, and again when they return; foreign rules stay."""
    lock = {"XTABLES_LOCKFILE": str(tmp_path / "lock")}

    def write() -> None:
        command = [f"iptables-{other}-restore", "--noflush"]
        subprocess.run(command, input=OLD_BACKEND, text=True, check=True, env={**os.environ, **lock})

    def rules() -> set[str]:
        command = [f"iptables-{other}-save"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **lock})
        return {line for line in done.stdout.splitlines() if line.startswith("-A")}

    foreign = {FIREWALL, "-A INPUT -j KUBE-FIREWALL", "-A MINE -j ACCEPT"}
    flags = ("--hostname-override=node1", f"--iptables-backend={used}")
    with inside_a_namespace(), server() as api:
        write()
        api.store.create(node("node1", "192.168.99.10"))
        with running(tmp_path / "log", "--master", api.url, *flags, environment=lock):
            eventually(lambda: rules() == foreign)
            assert "rules in place" in (tmp_path / "log").read_text()
            write()
            eventually(lambda: "KUBE-SVC" not in "".join(rules()))
            event = "rules in the other iptables backend removed"
            eventually(lambda: (tmp_path / "log").read_text().count(event) == 2)
