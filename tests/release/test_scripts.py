"""The scripts of tests, manifests and vagrant, with fake tools."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pykubeproxy
from pykubeproxy.config import load
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.manifests.overlays import MANIFESTS

SETUP = Path(__file__).parents[1] / "setup"


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def installed(folder: Path, purpose: str, missing: str, *commands: str) -> list[str]:
    """Run packages.sh where Debian's package `missing` is missing. Return the names of the packages it installs."""
    shutil.copy(SETUP / "packages.sh", folder)
    executable(folder / "step.sh", f'printf "%s\\n" "$@" >{folder}/log')
    executable(folder / "dpkg-query", f'[ "$4" = {missing} ] || printf installed')
    for name in commands:
        executable(folder / name, "true")
    for name in ("bash", "dirname", "id", "sh"):
        (folder / name).symlink_to(shutil.which(name) or "")
    subprocess.run([folder / "packages.sh", purpose], env={"PATH": str(folder)}, check=True)
    log = folder / "log"
    words = log.read_text().splitlines() if log.exists() else []
    return words[words.index("sh", words.index("sh") + 1) + 1 :] if words else []


@pytest.mark.parametrize(
    ("missing", "purposes"),
    [
        ("nftables", {"lab", "check", "test", "image"}),
        ("shellcheck", {"check", "test"}),
        ("groff-base", {"test"}),
        ("podman", {"image"}),
        ("runc", {"image"}),
    ],
)
@pytest.mark.parametrize("purpose", ["lab", "check", "test", "image"])
def test_only_the_packages_of_a_purpose_are_installed(
    tmp_path: Path, missing: str, purposes: set[str], purpose: str
) -> None:
    assert installed(tmp_path, purpose, missing) == [missing] * (purpose in purposes)


def test_runc_of_docker_stays(tmp_path: Path) -> None:
    """Debian's runc conflicts with Docker's containerd.io, which has a runc of its own."""
    assert installed(tmp_path, "image", "runc", "runc") == []


def step(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run step.sh of a project in that folder."""
    (folder / "tests/setup").mkdir(parents=True)
    command = [shutil.copy(SETUP / "step.sh", folder / "tests/setup"), "Installing it", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True)


def test_output_of_a_step_goes_to_the_log(tmp_path: Path) -> None:
    done = step(tmp_path, "echo out; echo wrong >&2")
    assert (done.returncode, done.stdout) == (0, "Installing it; the log is build/setup.log\n")
    assert (tmp_path / "build/setup.log").read_text() == "== Installing it\nout\nwrong\n"


def test_a_slow_step_says_how_far_it_is(tmp_path: Path) -> None:
    assert "5 s: halfway\n" in step(tmp_path, "echo halfway; sleep 6").stdout


def test_a_failed_step_shows_the_end_of_the_log(tmp_path: Path) -> None:
    done = step(tmp_path, "seq 100; exit 7")
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        *map(str, range(81, 101)),
        "Installing it failed with status 7; build/setup.log has all output",
    ]


def processes(words: str) -> list[str]:
    """Return the command lines that contain these words."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_text().replace("\0", " "))
    return [line for line in found if words in line]


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, None])
def test_nothing_is_left_of_isolated_commands(tmp_path: Path, number: signal.Signals | None) -> None:
    """Neither processes nor network namespaces, although they are detached: when a signal ends the script, and without."""
    ready = tmp_path / "ready"
    seconds = f"600.{os.getpid()}"
    script = f"ip netns add isolated; setsid sleep {seconds} & touch {ready}; [ -z '{number or ''}' ] || wait"
    process = subprocess.Popen([SETUP / "isolated.sh", "bash", "-c", script])
    eventually(lambda: ready.exists() or process.poll() is not None)
    if number:
        process.send_signal(number)
    assert process.wait(PATIENCE) == (-number if number is signal.SIGKILL else 143 if number else 0)
    eventually(lambda: not processes(f"sleep {seconds}"))
    assert not Path("/run/netns/isolated").exists()


PROJECT = Path(__file__).parents[2]
VAGRANT = PROJECT / "vagrant"
# Every fake tool logs its arguments; kind has a cluster if the file kind-cluster exists.
TOOL = 'echo "$(basename "$0") $*" >>"{notes}"\n{more}'
MORE = {"kind": '[ "$1 $2" != "get clusters" ] || [ ! -f "{folder}/kind-cluster" ] || echo kind'}

Bring = Callable[..., list[str]]


@pytest.fixture
def bring_up(tmp_path: Path) -> Bring:
    """Return a function that runs cluster.sh and returns the commands it ran."""
    tools, notes = tmp_path / "bin", tmp_path / "notes"
    tools.mkdir()
    for name in ("docker", "kind", "kubectl", "curl", "python3"):
        executable(tools / name, TOOL.format(notes=notes, more=MORE.get(name, "").format(folder=tmp_path)))
    downloads = tmp_path / "cache/pykubeproxy"
    downloads.mkdir(parents=True)

    def run(status: int = 0, cluster: bool = False, manifest: bool = True) -> list[str]:
        if cluster:
            (tmp_path / "kind-cluster").touch()
        if manifest:
            (downloads / f"ingress-nginx-{versions()['INGRESS_NGINX_VERSION']}.yaml").touch()
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        done = subprocess.run([VAGRANT / "cluster.sh"], env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return notes.read_text().splitlines()

    return run


def versions() -> dict[str, str]:
    lines = (VAGRANT / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_creates_a_cluster(bring_up: Bring) -> None:
    """The script builds and loads the image, applies the overlay and runs the smoke test, in this order."""
    ran = bring_up()
    image = f"localhost/pykubeproxy:{pykubeproxy.__version__}"
    cluster = "--config manifests/overlays/kind/cluster.yaml"
    steps = [
        f"docker build --tag {image} .",
        f"kind create cluster --name kind {cluster}",
        f"kind load docker-image --name kind {image}",
        "kubectl --context kind-kind apply -k manifests/overlays/kind",
        "kubectl --context kind-kind -n kube-system rollout status daemonset/pykubeproxy --timeout=180s",
        "python3 -m vagrant.smoke --context kind-kind",
    ]
    places = [ran.index(step) for step in steps]
    assert places == sorted(places)
    assert ran[-1] == steps[-1]
    assert not [line for line in ran if line.startswith("kubectl ") and "--context kind-kind" not in line]


def test_reuses_an_existing_cluster(bring_up: Bring) -> None:
    """The script does not create the cluster again."""
    assert not [line for line in bring_up(cluster=True) if line.startswith("kind create")]


def test_refuses_a_manifest_with_another_hash(bring_up: Bring) -> None:
    """The fake curl downloads nothing, so the hash does not match."""
    ran = bring_up(status=1, manifest=False)
    assert ran[-1].startswith("curl ")


def test_api_server_name_matches_the_cluster() -> None:
    """The overlay uses the container name of the created cluster's control plane."""
    lines = (PROJECT / "manifests/overlays/kind/api-server.env").read_text().splitlines()
    (name,) = re.findall(r"^cluster=(\w+)$", (VAGRANT / "cluster.sh").read_text(), re.MULTILINE)
    assert f"KUBERNETES_SERVICE_HOST={name}-control-plane" in lines


def test_versions_agree() -> None:
    """The node image has kubectl's version; every download has a hash for each architecture."""
    pinned = versions()
    cluster = yaml.safe_load((PROJECT / "manifests/overlays/kind/cluster.yaml").read_text())
    for node in cluster["nodes"]:
        assert re.fullmatch(rf"kindest/node:{pinned['KUBECTL_VERSION']}@sha256:[0-9a-f]{{64}}", node["image"])
    hashes = {name: value for name, value in pinned.items() if "_SHA256" in name}
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes.values())
    assert {
        f"{tool}_SHA256_{of}" for tool in ("KIND", "KUBECTL") for of in ("amd64", "arm64")
    } < hashes.keys()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("good", [True, False])
def test_keeps_a_download_only_if_its_hash_matches(tmp_path: Path, good: bool) -> None:
    """A file with another hash is deleted."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("contents")
    wanted = hashlib.sha256(b"contents" if good else b"other").hexdigest()
    done = subprocess.run(
        ["bash", "-euc", f'. "{VAGRANT}/fetch.sh"; fetch "file://{source}" "{target}" {wanted}; echo on'],
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0, done.stdout == "on\n", target.exists()) == (good, good, good)
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith("target.")] == []


@pytest.mark.skipif(not shutil.which("ruby"), reason="ruby is not installed")
def test_vagrantfile_is_valid_ruby() -> None:
    """Ruby parses the file; `vagrant validate` checks more."""
    subprocess.run(["ruby", "-c", "Vagrantfile"], cwd=VAGRANT, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("vagrant"), reason="vagrant is not installed")
def test_vagrant_validate() -> None:
    """vagrant accepts the file; the providers need not be installed."""
    subprocess.run(["vagrant", "validate", "--ignore-provider"], cwd=VAGRANT, check=True, capture_output=True)


def test_both_providers_are_configured() -> None:
    """The provisioning scripts exist and are executable."""
    text = (VAGRANT / "Vagrantfile").read_text()
    for provider in ("libvirt", "virtualbox"):
        assert f'config.vm.provider "{provider}"' in text
    for path in re.findall(r'path: "(\S+)"', text):
        assert os.access(VAGRANT / path, os.X_OK)
    for path in re.findall(r"/project/(vagrant/\S+\.sh)", text):
        assert os.access(PROJECT / path, os.X_OK)


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
    kubectl = executable(
        folder / "kubectl",
        'case "$*" in\n'
        f"'-n kube-system get configmap kube-proxy -o go-template='*kubeconfig.conf*) exec cat {folder}/kubeconfig;;\n"
        f"'-n kube-system get configmap kube-proxy -o go-template='*config.conf*) exec cat {folder}/config;;\n"
        "*) exit 9;;\nesac",
    )
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


@pytest.mark.parametrize(
    ("mode", "kept", "says"),
    [
        ("iptables", "iptables", ""),
        ("nftables", '""', "changed mode: nftables"),
        ('"nftables" # the default', '""', "changed mode: nftables"),
        ("ipvs", "ipvs", "warning: kube-proxy runs in ipvs mode"),
    ],
)
def test_other_modes_of_kube_proxy_are_named(tmp_path: Path, mode: str, kept: str, says: str) -> None:
    done = filled_in(tmp_path, CONFIG.replace('mode: ""', f"mode: {mode}"), "https://10.0.0.10:6443")
    assert done.returncode == 0
    assert f"\nmode: {kept}\n" in (tmp_path / "config.conf").read_text()
    assert says in done.stdout + done.stderr
    assert ("mode" in done.stdout + done.stderr) is bool(says)


def test_refuses_other_config_maps(tmp_path: Path) -> None:
    """The script writes nothing and says what to do."""
    before = (FOLDER / "config.conf").read_text()
    done = filled_in(tmp_path, "not a configuration", "https://10.0.0.10:6443")
    assert done.returncode == 1
    assert "edit config.conf and api-server.env by hand" in done.stderr
    assert (tmp_path / "config.conf").read_text() == before
