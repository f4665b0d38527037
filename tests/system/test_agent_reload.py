"""A running agent whose configuration file changes, as a ConfigMap's volume changes it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.asking import ask
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


class Mounted:
    """A folder with config.conf as the kubelet mounts a ConfigMap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.path = folder / "config.conf"
        folder.mkdir()
        self.swap("")
        self.path.symlink_to("..data/config.conf")

    def swap(self, body: str) -> None:
        """Have the file change in one step: a new folder, and a link turned to it."""
        self._number += 1
        (self._folder / f"..{self._number}").mkdir()
        (self._folder / f"..{self._number}/config.conf").write_text(HEAD + body)
        (self._folder / "..data_tmp").symlink_to(f"..{self._number}")
        (self._folder / "..data_tmp").rename(self._folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "config")


@pytest.fixture
def process(tmp_path: Path, mounted: Mounted) -> Iterator[subprocess.Popen[bytes]]:
    """An agent with a NodePort service, in a namespace of its own, ready."""
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", type="NodePort", ports=[{"port": 80, "nodePort": 30080}]))
        api.store.create(slice_of("web", "10.244.0.5"))
        with running(tmp_path / "agent.log", *flags(api, mounted)) as process:
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            yield process


def flags(api: ApiServer, mounted: Mounted) -> tuple[str, ...]:
    return "--config", str(mounted.path), "--master", api.url, "--hostname-override", "node1"


def has(*words: str) -> bool:
    """Whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


def in_force() -> dict[str, object]:
    content = json.loads(ask(METRICS, "/configz").body)["kubeproxy.config.k8s.io"]
    assert isinstance(content, dict)
    return content


def test_what_is_taken_up_live(process: subprocess.Popen[bytes], mounted: Mounted, tmp_path: Path) -> None:
    """Rules, pace and log follow the file, and the process stays the same."""
    log = tmp_path / "agent.log"
    assert not has("KUBE-SVC", "KUBE-MARK-MASQ")
    mounted.swap("clusterCIDR: 10.244.0.0/16")
    eventually(lambda: has("! -s 10.244.0.0/16", "KUBE-SVC", "KUBE-MARK-MASQ"))
    mounted.swap("nodePortAddresses: [127.0.0.0/8]\niptables: {masqueradeAll: true}")
    eventually(lambda: has("-A KUBE-SVC", "-d 10.96.", "KUBE-MARK-MASQ") and not has("! -s 10.244.0.0/16"))
    eventually(lambda: has("-A KUBE-SERVICES", "-d 127.0.0.1/32", "-j KUBE-NODEPORTS"))
    assert not has("--dst-type LOCAL -j KUBE-NODEPORTS")
    assert in_force()["nodePortAddresses"] == ["127.0.0.0/8"]
    mounted.swap("logging: {verbosity: 2}\niptables: {minSyncPeriod: 2s}")
    eventually(lambda: "synced" in log.read_text())
    eventually(lambda: has("--dst-type LOCAL -j KUBE-NODEPORTS"))
    assert process.poll() is None
    assert "iptables.minSyncPeriod" in log.read_text()


def test_what_does_no_harm(process: subprocess.Popen[bytes], mounted: Mounted, tmp_path: Path) -> None:
    """A broken file and one that vanishes change nothing; the next good one counts."""
    log = tmp_path / "agent.log"
    before = saved()
    mounted.swap("oomScoreAdj: 9999")
    eventually(lambda: "cannot be used" in log.read_text())
    mounted.path.unlink()
    mounted.swap("clusterCIDR: 10.244.0.0/16")
    assert saved() == before
    assert answers(HEALTH, "/healthz", 200)
    mounted.path.symlink_to("..data/config.conf")
    eventually(lambda: has("! -s 10.244.0.0/16"))
    assert process.poll() is None
    (line,) = (it for it in log.read_text().splitlines() if "cannot be used" in it)
    assert "oomScoreAdj: 9999 is not valid" in line


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("bindAddress: 192.168.99.10", "bindAddress"),
        ("healthzBindAddress: 127.0.0.1:1", "healthzBindAddress"),
        ("clientConnection: {kubeconfig: /other}", "clientConnection.kubeconfig"),
    ],
)
def test_what_needs_a_restart(
    process: subprocess.Popen[bytes], mounted: Mounted, tmp_path: Path, body: str, field: str
) -> None:
    """The process exits with status 1 and says which field it was; the rules stay."""
    before = saved()
    mounted.swap(body)
    assert process.wait(10) == 1
    assert f"these fields changed: {field}" in (tmp_path / "agent.log").read_text().splitlines()[-1]
    assert saved() == before
