"""Commands without options in the pod of an agent: they use its objects and its configuration."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.process import METRICS, answers, inside_a_namespace, pykubeproxy, running, saved
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

# The name of the Node, the pods' network and the mark are in the agent's configuration only.
CONFIGURATION = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.244.0.0/16
healthzBindAddress: 0.0.0.0:10356
conntrack: {maxPerCore: 0}
iptables: {masqueradeBit: 9}
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A namespace with an agent whose rules are in place."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "config.conf").write_text(CONFIGURATION)
    with inside_a_namespace(), server() as api:
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        api.store.create(node("node1", "192.168.99.10"))
        for name in ("web", "api"):
            api.store.create(service(name))
            api.store.create(slice_of(name, "10.244.0.1", "10.244.0.2"))
        flags = (f"--config={folder}/config.conf", "--hostname-override=node1", f"--master={api.url}")
        environment = {"XTABLES_LOCKFILE": str(folder / "lock")}
        with running(folder / "agent.log", *flags, environment=environment) as process:
            eventually(lambda: answers(10356, "/readyz", 200) and answers(METRICS, "/healthz", 200))
            yield process


def bare(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside of any pod's environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    return pykubeproxy(command, *arguments, env=environment)


def test_diff_finds_no_difference(agent: subprocess.Popen[bytes]) -> None:
    """Its title says where objects and configuration come from."""
    outcome = bare("diff")
    assert (outcome.returncode, outcome.stdout) == (0, "")
    assert outcome.stderr == "No differences: live rules (nft), objects and configuration of the agent.\n"


def test_check_uses_its_configuration(agent: subprocess.Popen[bytes]) -> None:
    """Its ports and rules are recognized, and the rules stay."""
    before = saved()
    (document,) = json.loads(bare("check", "-o", "json").stdout)["nodes"]
    assert saved() == before
    assert document["node"] == "node1"
    assert document["configuration"] == f"agent at http://127.0.0.1:{METRICS}"

    def messages(check: str) -> list[str]:
        return [finding["message"] for finding in document["checks"] if finding["check"] == check]

    assert messages("ports") == ["the agent uses port 10356", f"the agent uses port {METRICS}"]
    assert messages("proxies") == [f"the agent is running (process {agent.pid})"]
    assert " chains of a service proxy" in messages("tables")[0]
