"""from-kube-proxy.sh writes the default overlay's settings from kubeadm's kube-proxy."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pykubeproxy.config import load
from tests.unit.manifests.overlays import MANIFESTS

FOLDER = MANIFESTS / "overlays/default"
# The format that kubeadm writes.
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
    """Run the script beside copies of the two files, with a fake kubectl that has one ConfigMap."""
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
def test_copies_settings_and_address(tmp_path: Path, server: str, host: str, port: str) -> None:
    """The settings stay, except that the agent uses the service account and the kubelet's oomScoreAdj."""
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
    ("address", "warns"),
    [
        ('""', False),
        ("0.0.0.0:10256", False),
        ('"[::]:10256"', False),
        ("127.0.0.1:10256", False),
        ("192.0.2.1", False),
        ('"fd00::1"', False),
        ('"[fd00::1]:10257"', True),
        ("0.0.0.0:9999", True),
    ],
)
def test_warns_of_ports_that_probes_cannot_reach(tmp_path: Path, address: str, warns: bool) -> None:
    """kubeadm's kube-proxy has no probes; pykubeproxy's pods would restart forever."""
    done = filled_in(tmp_path, f"{CONFIG}healthzBindAddress: {address}\n", "https://10.0.0.10:6443")
    assert done.returncode == 0
    assert ("warning: healthzBindAddress" in done.stderr) is warns


def test_refuses_other_config_maps(tmp_path: Path) -> None:
    """The script writes nothing and says what to do."""
    before = (FOLDER / "config.conf").read_text()
    done = filled_in(tmp_path, "not a configuration", "https://10.0.0.10:6443")
    assert done.returncode == 1
    assert "edit config.conf and api-server.env by hand" in done.stderr
    assert (tmp_path / "config.conf").read_text() == before
