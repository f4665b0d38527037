"""Read the manifests, as files and as built by kubectl."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubectl import KUBECTL, NO_KUBECTL

MANIFESTS = Path(__file__).parents[3] / "manifests"
PROXIES = ("default", "canary", "kind")
OVERLAYS = (*PROXIES, "monitoring")
SOURCES = tuple(
    path
    for path in sorted(MANIFESTS.rglob("*.yaml"))
    if path.name not in ("kustomization.yaml", "cluster.yaml") and not path.name.endswith(".patch.yaml")
)

Object = dict[str, Any]


@cache
def built(overlay: str) -> tuple[Object, ...]:
    """Return the objects of an overlay; skip the test if kubectl is not installed."""
    return build(MANIFESTS / "overlays" / overlay)


def build(folder: Path) -> tuple[Object, ...]:
    """Return the objects of a folder with a kustomization; skip the test if kubectl is not installed."""
    if not KUBECTL:
        pytest.skip(NO_KUBECTL)
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def read(path: Path) -> tuple[Object, ...]:
    return tuple(yaml.safe_load_all(path.read_text()))


def one(objects: tuple[Object, ...], kind: str) -> Object:
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


def daemon_set() -> Object:
    return one(read(MANIFESTS / "base/daemonset.yaml"), "DaemonSet")


def container(name: str) -> Object:
    pod = daemon_set()["spec"]["template"]["spec"]
    (found,) = (item for item in (*pod["initContainers"], *pod["containers"]) if item["name"] == name)
    return found


def dashboard() -> Object:
    return json.loads((MANIFESTS / "overlays/monitoring/dashboard.json").read_text())
