"""An agent takes over from a kube-proxy in nftables mode."""

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
