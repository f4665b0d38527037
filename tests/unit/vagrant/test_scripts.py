"""The scripts that bring up a cluster, with stand-ins for the tools they call."""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pykubeproxy

PROJECT = Path(__file__).parents[3]
VAGRANT = PROJECT / "vagrant"
SCRIPTS = ("tools.sh", "cluster.sh", "fetch.sh")
# Every tool notes how it was called; kind has a cluster if there is a file of that name.
TOOL = '#!/bin/sh\necho "$(basename "$0") $*" >>"{notes}"\n{more}\n'
MORE = {"kind": '[ "$1 $2" != "get clusters" ] || [ ! -f "{folder}/kind-cluster" ] || echo kind'}

Bring = Callable[..., list[str]]


@pytest.fixture
def bring_up(tmp_path: Path) -> Bring:
    """Runs cluster.sh, and gives the commands that it ran."""
    tools, notes = tmp_path / "bin", tmp_path / "notes"
    tools.mkdir()
    for name in ("docker", "kind", "kubectl", "curl", "python3"):
        tool = tools / name
        tool.write_text(TOOL.format(notes=notes, more=MORE.get(name, "").format(folder=tmp_path)))
        tool.chmod(0o755)
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


def test_a_cluster_is_brought_up(bring_up: Bring) -> None:
    """The image is built and loaded, the overlay applied, and the smoke test run, in that order and on that cluster."""
    ran = bring_up()
    image = f"pykubeproxy:{pykubeproxy.__version__}"
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


def test_a_cluster_that_is_there_is_used_again(bring_up: Bring) -> None:
    """A change takes a minute then."""
    assert not [line for line in bring_up(cluster=True) if line.startswith("kind create")]


def test_a_manifest_that_is_not_the_one_meant_is_not_applied(bring_up: Bring) -> None:
    """What is fetched must have the pinned hash: here the stand-in for curl fetches nothing at all."""
    ran = bring_up(status=1, manifest=False)
    assert ran[-1].startswith("curl ")


def test_a_name_that_the_nodes_can_resolve() -> None:
    """The overlay asks for the API server by the name of the control plane of the cluster that is made."""
    lines = (PROJECT / "manifests/overlays/kind/api-server.env").read_text().splitlines()
    (name,) = re.findall(r"^cluster=(\w+)$", (VAGRANT / "cluster.sh").read_text(), re.MULTILINE)
    assert f"KUBERNETES_SERVICE_HOST={name}-control-plane" in lines


def test_versions_agree() -> None:
    """The node image is of the version of kubectl; every download has a hash for each kind of processor."""
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
def test_a_download_is_used_only_if_it_is_the_one_meant(tmp_path: Path, good: bool) -> None:
    """Otherwise nothing is left of it."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("contents")
    wanted = hashlib.sha256(b"contents" if good else b"other").hexdigest()
    done = subprocess.run(
        ["bash", "-euc", f'. "{VAGRANT}/fetch.sh"; fetch "file://{source}" "{target}" {wanted}; echo on'],
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0, done.stdout == "on\n", target.exists()) == (good, good, good)
    assert [it.name for it in tmp_path.iterdir() if it.name.startswith("target.")] == []


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck() -> None:
    """All three."""
    subprocess.run(["shellcheck", *SCRIPTS], cwd=VAGRANT, check=True)


@pytest.mark.skipif(not shutil.which("ruby"), reason="ruby is not installed")
def test_the_vagrantfile_is_ruby() -> None:
    """As far as ruby alone can tell; `vagrant validate` tells more."""
    subprocess.run(["ruby", "-c", "Vagrantfile"], cwd=VAGRANT, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("vagrant"), reason="vagrant is not installed")
def test_vagrant_validate() -> None:
    """Without asking the providers, which need not be here."""
    subprocess.run(["vagrant", "validate", "--ignore-provider"], cwd=VAGRANT, check=True, capture_output=True)


def test_both_providers_are_there() -> None:
    """And the scripts that are to be run exist."""
    text = (VAGRANT / "Vagrantfile").read_text()
    for provider in ("libvirt", "virtualbox"):
        assert f'config.vm.provider "{provider}"' in text
    for path in re.findall(r'path: "(\S+)"', text):
        assert os.access(VAGRANT / path, os.X_OK)
    for path in re.findall(r"/project/(vagrant/\S+\.sh)", text):
        assert os.access(PROJECT / path, os.X_OK)
