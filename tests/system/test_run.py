"""`pykubeproxy run`: actions that exit, flags and their effects, and changes of the configuration file."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import pykubeproxy as pykubeproxy_package
from pykubeproxy.config import load
from pykubeproxy.kernel.system import write_setting
from tests.fakes import kube_proxy
from tests.fakes.cluster import ConfigMapVolume, certificate, node, server, service, slice_of, unverified
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.http_client import fetch
from tests.fakes.process import (
    HEALTH,
    METRICS,
    answers,
    inside_a_namespace,
    pykubeproxy,
    running,
    saved,
    tool,
)
from tests.fakes.waiting import eventually
from tests.unit.config.test_config_file import KUBEADM

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def run(*flags: str) -> tuple[int, str, str]:
    """Return status, standard output and standard error of the command."""
    done = pykubeproxy("run", *flags)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def namespace() -> Iterator[str]:
    with inside_a_namespace() as name:
        yield name


def test_version_prints_one_line() -> None:
    """Whatever other flags are given, and without an API server. Templates leave empty arguments, which are ignored."""
    expected = f"pykubeproxy {pykubeproxy_package.__version__}\n"
    assert run("", "--version", "") == (0, expected, "")
    assert run("--version=true", "--config=/none") == (0, expected, "")


@pytest.mark.parametrize("flag", ["--version", "--masquerade-all", "--masquerade_all"])
def test_other_arguments_are_wrong_usage(flag: str) -> None:
    """Also after a flag that needs no value."""
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
    kube_proxy.create_interface()
    kube_proxy.create_ipsets()
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
    monkeypatch.setenv("PATH", tool(tmp_path, "iptables-nft-save", "echo broken >&2\nexit 4")["PATH"])
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


WEB = service(
    "web",
    type="NodePort",
    clusterIP="10.96.0.10",
    clusterIPs=["10.96.0.10"],
    externalIPs=["198.51.100.1"],
    ports=[{"port": 80, "nodePort": 30080}],
)
# The API server adds the empty name; manifests must contain it.
SLICE = {**slice_of("web", "10.244.0.5"), "ports": [{"name": "", "port": 8080}]}


@pytest.fixture
def manifests(tmp_path: Path) -> Iterator[Path]:
    """A NodePort service with an external IP and one endpoint, in a new namespace."""
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all([WEB, SLICE, node("node1", "192.168.99.10")]))
    with inside_a_namespace():
        yield path


def once(manifests: Path, *flags: str) -> None:
    fixed = ("--once", "--manifests", str(manifests), "--hostname-override=node1", "--oom-score-adj=0")
    code, _, errors = run(*fixed, *flags)
    assert code == 0, errors


def has(*words: str) -> bool:
    """Return whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


# A flag, words of a rule, and whether the rule is there without the flag.
EFFECTS = [
    (["--iptables-masquerade-bit=20"], ["-A KUBE-MARK-MASQ", "0x100000/0x100000"], False),
    (["--masquerade-all"], ["-A KUBE-SVC", "-d 10.96.0.10/32", "-j KUBE-MARK-MASQ"], False),
    (["--cluster-cidr=10.244.0.0/16"], ["! -s 10.244.0.0/16", "-j KUBE-MARK-MASQ"], False),
    (
        ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cbr0"],
        ["! -i cbr0", "-j KUBE-MARK-MASQ"],
        False,
    ),
    (
        ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"],
        ["! -i veth+", "-j KUBE-MARK-MASQ"],
        False,
    ),
    (["--nodeport-addresses=127.0.0.0/8"], ["-d 127.0.0.1/32", "-j KUBE-NODEPORTS"], False),
    (
        ["--nodeport-addresses=primary", "--bind-address=192.168.99.10"],
        ["-j KUBE-NODEPORTS", "--dst-type LOCAL"],
        True,
    ),
    (["--iptables-localhost-nodeports=false"], ["! -d 127.0.0.0/8", "-j KUBE-NODEPORTS"], False),
    (["--feature-gates=AllowServiceExternalIPs=false"], ["-d 198.51.100.1/32"], True),
]


@pytest.mark.root
def test_each_flag_changes_its_rule(manifests: Path) -> None:
    """With the flag a rule appears or disappears, whatever flag the agent before had."""
    once(manifests)
    for _, words, present_without in EFFECTS:
        assert has(*words) is present_without, words
    for flags, words, present_without in EFFECTS:
        once(manifests, *flags)
        assert has(*words) is not present_without, flags


@pytest.mark.root
@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_rules_are_in_the_configured_backend_only(manifests: Path, backend: str) -> None:
    once(manifests, f"--iptables-backend={backend}")
    found = {
        it: any("-d 10.96.0.10/32" in rule for rule in saved(f"iptables-{it}-save"))
        for it in ("nft", "legacy")
    }
    assert found == {"nft": backend == "nft", "legacy": backend == "legacy"}


@pytest.mark.root
def test_requests_are_rate_limited(tmp_path: Path) -> None:
    """With qps 0.5 and burst 1, three lists take four seconds."""
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        flags = ("--master", api.url, "--hostname-override=node1", "--kube-api-qps=0.5", "--kube-api-burst=1")
        with running(tmp_path / "log", *flags):
            api.requests.wait(1, "list")
            started = time.monotonic()
            api.requests.wait(3, "list")
            assert time.monotonic() - started > 3
            eventually(lambda: answers(HEALTH, "/readyz", 200))


def test_json_log_lines(tmp_path: Path) -> None:
    """One object per line, with level and time."""
    flags = ("--logging-format=json", "--healthz-port=10256", f"--write-config-to={tmp_path}/config")
    code, _, errors = run(*flags)
    assert code == 0
    (line,) = map(json.loads, errors.splitlines())
    assert line["event"] == "configuration warning"
    assert line["reason"] == "The flag --healthz-port is deprecated; use --healthz-bind-address instead."
    assert line["level"] == "warning"
    assert line.keys() == {"event", "level", "reason", "timestamp"}


@pytest.mark.root
@pytest.mark.parametrize(("dispatch", "most"), [("flat", 60), ("tree", 20)])
def test_dispatch_setting_selects_flat_or_tree(tmp_path: Path, dispatch: str, most: int) -> None:
    """Flat dispatch has one rule per address in KUBE-SERVICES, a tree only branches."""
    objects = []
    for number in range(60):
        name, address = f"s{number}", f"10.96.0.{number + 1}"
        objects.append(service(name, clusterIP=address, clusterIPs=[address]))
        objects.append({**slice_of(name, "10.244.0.5"), "ports": [{"name": "", "port": 8080}]})
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    with inside_a_namespace():
        once(path, f"--dispatch={dispatch}")
        first = [rule for rule in saved() if rule.startswith("-A KUBE-SERVICES -d")]
        assert 0 < len(first) <= most
        assert has("-d 10.96.0.60/32", "-j KUBE-SVC")
        assert (len(first) == 60) is (dispatch == "flat")


@pytest.mark.root
def test_an_unverified_server_is_one_log_line(tmp_path: Path) -> None:
    """And no warning of the HTTP client for each request."""
    with inside_a_namespace(), server(tls=certificate(tmp_path)) as api:
        api.store.create(node("node1", "192.168.99.10"))
        path = unverified(api, tmp_path / "kubeconfig")
        fixed = ("--once", "--kubeconfig", path, "--hostname-override=node1", "--oom-score-adj=0")
        code, _, errors = run(*fixed)
    assert code == 0, errors
    (line,) = [line for line in errors.splitlines() if re.search("verif|insecure|Warning", line)]
    assert "api server certificate not verified" in line
    assert "reason=insecure-skip-tls-verify" in line


CHANGED = HEAD + "iptables: {masqueradeAll: true}\n"


@pytest.fixture
def volume(tmp_path: Path) -> ConfigMapVolume:
    return ConfigMapVolume(tmp_path / "config", HEAD)


def write(path: Path) -> None:
    path.write_text(CHANGED)


def replace(path: Path) -> None:
    target = path.resolve()
    new = target.with_suffix(".new")
    new.write_text(CHANGED)
    new.rename(target)


@pytest.mark.root
@pytest.mark.parametrize("change", [write, replace])
def test_a_changed_file_ends_the_process(
    api: FaultyApiServer, volume: ConfigMapVolume, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """With status 1 and one log line; the rules stay. An update of the ConfigMap waits for a restart, without a line."""
    log = tmp_path / "agent.log"
    flags = ("--config", str(volume.path), "--master", api.url, "--hostname-override", "node1")
    with running(log, *flags) as process:
        eventually(lambda: answers(HEALTH, "/readyz", 200) and "rules in place" in log.read_text())
        rules, lines = saved(), log.read_text().splitlines()
        volume.update(HEAD + "iptables: {masqueradeBit: 9}\n")
        time.sleep(2.5)
        assert log.read_text().splitlines() == lines
        content = json.loads(fetch(METRICS, "/configz").body)["kubeproxy.config.k8s.io"]
        assert content["iptables"]["masqueradeBit"] == 14
        change(volume.path)
        assert process.wait(10) == 1
    (line,) = log.read_text().splitlines()[len(lines) :]
    assert f"configuration file {volume.path} was updated" in line
    assert saved() == rules


@pytest.mark.root
def test_an_older_agent_starts_with_a_newer_file(tmp_path: Path) -> None:
    """It logs one warning for each unknown field and value, and serves."""
    config = tmp_path / "config.conf"
    config.write_text(
        HEAD + "newerMode: x\nlogging: {format: binary}\npykubeproxy: {dispatch: hash, newer: 1}\n"
    )
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        flags = ("--config", str(config), "--master", api.url, "--hostname-override", "node1")
        with running(tmp_path / "agent.log", *flags):
            eventually(lambda: answers(HEALTH, "/readyz", 200))
    log = (tmp_path / "agent.log").read_text()
    assert log.count("configuration warning") == 4
    for field in ("newerMode", "logging.format", "pykubeproxy.dispatch", "pykubeproxy.newer"):
        assert f"The field {field} is" in log
