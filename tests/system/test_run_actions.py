"""Actions of `pykubeproxy run` that exit: --version, --write-config-to, --init-only, --cleanup; and kubeadm's file."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import pykubeproxy
from pykubeproxy.config import load
from pykubeproxy.kernel.system import write_setting
from tests.fakes import ipvs_mode
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, PROGRAM, answers, inside_a_namespace, running, saved
from tests.unit.config.test_config_file import KUBEADM

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def run(*flags: str) -> tuple[int, str, str]:
    """Return status, standard output and standard error of the command."""
    done = subprocess.run([*PROGRAM, *flags], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def namespace() -> Iterator[str]:
    with inside_a_namespace() as name:
        yield name


def test_version_prints_one_line() -> None:
    """Whatever other flags are given, and without an API server."""
    expected = f"pykubeproxy {pykubeproxy.__version__}\n"
    assert run("--version") == (0, expected, "")
    assert run("--version=true", "--config=/none") == (0, expected, "")


def test_empty_arguments_are_ignored() -> None:
    """Templates leave them. Any other argument is wrong usage, also after a flag that needs no value."""
    expected = f"pykubeproxy {pykubeproxy.__version__}\n"
    assert run("", "--version", "") == (0, expected, "")
    for flag in ("--version", "--masquerade-all", "--masquerade_all"):
        code, _, errors = run(flag, "", "false")
        assert (code, "Error: Got unexpected extra argument (false)" in errors) == (2, True)


def test_a_written_configuration_loads_again(tmp_path: Path) -> None:
    """Loading and writing it again gives the same file."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ("--cluster-cidr=10.244.0.0/16,fd00::/48", "--iptables-min-sync-period=5s", "--masquerade-all")
    assert run(*flags, "--nodeport-addresses=10.0.0.0/8", f"--write-config-to={first}") == (0, "", "")
    assert run(f"--config={first}", f"--write-config-to={second}") == (0, "", "")
    assert first.read_text() == second.read_text()
    config = load(first.read_bytes(), {}).config
    assert config.detect_local.cluster_cidrs == ("10.244.0.0/16", "fd00::/48")
    assert config.node_port_addresses == ("10.0.0.0/8",)
    assert (config.iptables.min_sync_period, config.iptables.masquerade_all) == (5.0, True)


def test_ignored_flags_are_logged_when_a_file_is_written(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(HEAD + "clusterCidr: 10.0.0.0/8")
    code, _, errors = run(f"--config={old}", f"--write-config-to={new}")
    assert (code, new.exists()) == (0, True)
    assert "The field clusterCidr is unknown" in errors


def test_an_unwritable_path_is_one_line(tmp_path: Path) -> None:
    """With flag, path and reason."""
    path = tmp_path / "none" / "file"
    complaint = f"Error: --write-config-to: cannot write {path}: No such file or directory\n"
    assert run(f"--write-config-to={path}") == (1, "", complaint)


@pytest.mark.root
def test_init_only_applies_kernel_settings(namespace: str, tmp_path: Path) -> None:
    """Of the rules, only the guard of loopback addresses is written; another mode serves on. No API server is needed."""
    limit = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout")
    localnet = Path("/proc/sys/net/ipv4/conf/all/route_localnet")
    assert localnet.read_text() == "0\n"
    subprocess.run(["nft", "add", "table", "ip", "kube-proxy"], check=True)
    flags = ("--conntrack-max-per-core=0", "--conntrack-udp-timeout=41s", "--oom-score-adj=0")
    code, _, errors = run("--init-only", *flags, "--master=http://127.0.0.1:1")
    assert (code, limit.read_text(), localnet.read_text()) == (0, "41\n", "1\n")
    assert "nf_conntrack_udp_timeout" in errors
    written = {line.split()[1] for line in saved() if "KUBE" in line and line.startswith("-A")}
    assert written == {"INPUT", "KUBE-FIREWALL"}
    subprocess.run(["nft", "list", "table", "ip", "kube-proxy"], check=True)


@pytest.mark.root
def test_cleanup_removes_only_our_rules(namespace: str, tmp_path: Path) -> None:
    """Without API server. As in kube-proxy, a file that cannot be read or is to be written keeps the rules."""
    subprocess.run(["iptables-nft", "-A", "FORWARD", "-i", "docker0", "-j", "ACCEPT"], check=True)
    with server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web"))
        api.store.create(slice_of("web", "10.244.0.5"))
        with running(tmp_path / "log", "--master", api.url, "--hostname-override=node1") as process:
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            process.terminate()
            assert process.wait(10) == 0
    assert any("KUBE-SVC" in line for line in saved())
    before = saved()
    complaint = "Error: --config: cannot read /none: No such file or directory\n"
    assert run("--cleanup", "--config=/none") == (1, "", complaint)
    assert run("--cleanup", f"--write-config-to={tmp_path}/written") == (0, "", "")
    assert (saved(), (tmp_path / "written").exists()) == (before, True)
    code, output, errors = run("--cleanup")
    assert (code, errors) == (0, "")
    assert "removed" in output
    left = [line for line in saved() + saved("ip6tables-nft-save") if line.startswith("-A")]
    # The agent has set route_localnet, and no kubelet guards loopback addresses.
    assert [line for line in left if "KUBE-FIREWALL" not in line] == ["-A FORWARD -i docker0 -j ACCEPT"]
    assert "chain KUBE-FIREWALL stays" in output
    write_setting("net/ipv4/conf/all/route_localnet", 0)
    assert run("--cleanup") == (0, "iptables mode:\n  nft, IPv4: 2 jumps and 1 chain removed\n", "")
    assert [line for line in saved() if line.startswith("-A")] == ["-A FORWARD -i docker0 -j ACCEPT"]
    assert run("--cleanup") == (0, "Nothing to remove.\n", "")


@pytest.mark.root
def test_cleanup_removes_what_other_modes_left(namespace: str) -> None:
    """Those of kube-proxy: ipvs and nftables."""
    ipvs_mode.create_interface()
    ipvs_mode.create_ipsets()
    subprocess.run(["nft", "add", "table", "ip", "kube-proxy"], check=True)
    code, output, errors = run("--cleanup")
    assert (code, errors) == (0, "")
    assert "1 interface with 3 addresses removed: kube-ipvs0" in output
    assert "4 ipsets removed" in output
    assert "1 table removed: ip kube-proxy" in output
    assert run("--cleanup") == (0, "Nothing to remove.\n", "")


@pytest.mark.root
def test_a_failed_cleanup_has_a_nonzero_status(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like `pykubeproxy cleanup`."""
    broken = tmp_path / "iptables-nft-save"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, errors = run("--cleanup")
    assert code == 1
    assert "Error: nft, IPv4: iptables-nft-save failed with exit code 4: broken" in errors


@pytest.mark.root
def test_kubeadms_file_works_unchanged(namespace: str, tmp_path: Path) -> None:
    """With the kubeconfig beside it; no field causes a warning."""
    with server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web"))
        api.store.create(slice_of("web", "10.244.0.5"))
        kubeconfig, path = api.kubeconfig(tmp_path / "kubeconfig.conf"), tmp_path / "config.conf"
        path.write_text(KUBEADM.replace("/var/lib/kube-proxy/kubeconfig.conf", str(kubeconfig)))
        with running(tmp_path / "log", f"--config={path}", "--hostname-override=Node1"):
            eventually(lambda: answers(HEALTH, "/healthz", 200))
            assert any("! -s 10.244.0.0/16" in line for line in saved())
    assert "field" not in (tmp_path / "log").read_text()
