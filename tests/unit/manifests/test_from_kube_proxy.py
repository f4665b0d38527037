"""from-kube-proxy.sh fills in the default overlay from what kubeadm has set up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pykubeproxy.config import load
from tests.unit.manifests.overlays import MANIFESTS

FOLDER = MANIFESTS / "overlays/default"
# As kubeadm writes them.
CONFIG = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
conntrack:
  maxPerCore: null
kind: KubeProxyConfiguration
mode: ""
oomScoreAdj: null
"""
KUBECONFIG = """apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
    server: {server}
  name: default
"""


def filled_in(folder: Path, config: str, server: str) -> subprocess.CompletedProcess[str]:
    """Run it beside copies of the two files, with a kubectl that knows one ConfigMap."""
    for name in ("from-kube-proxy.sh", "config.conf", "api-server.env"):
        shutil.copy(FOLDER / name, folder)
    (folder / "config").write_text(config)
    (folder / "kubeconfig").write_text(KUBECONFIG.format(server=server))
    kubectl = folder / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"'-n kube-system get configmap kube-proxy -o go-template='*kubeconfig.conf*) exec cat {folder}/kubeconfig;;\n"
        f"'-n kube-system get configmap kube-proxy -o go-template='*config.conf*) exec cat {folder}/config;;\n"
        "*) exit 9;;\nesac\n"
    )
    kubectl.chmod(0o755)
    return subprocess.run(
        [folder / "from-kube-proxy.sh"],
        env={**os.environ, "KUBECTL": str(kubectl)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("server", "host", "port"),
    [
        ("https://10.0.0.10:6443", "10.0.0.10", "6443"),
        ("https://k8s.example.org", "k8s.example.org", "443"),
        ("https://[fd00::10]:6443", "fd00::10", "6443"),
        ('"https://10.0.0.10:6443"', "10.0.0.10", "6443"),
    ],
)
def test_settings_and_address_are_taken_over(tmp_path: Path, server: str, host: str, port: str) -> None:
    """All settings stay, but the service account is used, and the score of the out-of-memory killer is the kubelet's."""
    done = filled_in(tmp_path, CONFIG, server)
    assert done.returncode == 0, done.stderr
    loaded = load((tmp_path / "config.conf").read_bytes(), {})
    assert loaded.warnings == ()
    assert loaded.config.detect_local.cluster_cidrs == ("10.244.0.0/16",)
    assert loaded.config.client.kubeconfig == ""
    assert loaded.config.oom_score_adj == -997
    lines = (tmp_path / "api-server.env").read_text().splitlines()
    assert lines[1:] == [f"KUBERNETES_SERVICE_HOST={host}", f"KUBERNETES_SERVICE_PORT={port}"]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ('""', False),
        ("0.0.0.0:10256", False),
        ('"[::]:10256"', False),
        ("127.0.0.1:10256", True),
        ("0.0.0.0:9999", True),
    ],
)
def test_an_address_that_probes_do_not_reach_is_told_of(tmp_path: Path, address: str, told: bool) -> None:
    """With kube-proxy, which kubeadm gives no probes, it did no harm; our pods would be restarted for ever."""
    done = filled_in(tmp_path, f"{CONFIG}healthzBindAddress: {address}\n", "https://10.0.0.10:6443")
    assert done.returncode == 0
    assert ("Mind healthzBindAddress" in done.stderr) is told


def test_a_cluster_of_another_make_is_left_to_the_user(tmp_path: Path) -> None:
    """Nothing is written, and it says what to do."""
    before = (FOLDER / "config.conf").read_text()
    done = filled_in(tmp_path, "not a configuration", "https://10.0.0.10:6443")
    assert done.returncode == 1
    assert "fill in the two files by hand" in done.stderr
    assert (tmp_path / "config.conf").read_text() == before
