"""A changed configuration is a new revision of the DaemonSet, and `kubectl rollout undo` finds the old one."""

import copy
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.fakes.kubectl import KUBECTL, NO_KUBECTL
from tests.fakes.waiting import PATIENCE
from tests.unit.manifests.overlays import MANIFESTS, PROXIES, Object, build, built, daemon_set, one

SCRIPT = MANIFESTS / "unused-config-maps.sh"
LABELS = "app.kubernetes.io/name=pykubeproxy"
COMPONENT = f"{LABELS},app.kubernetes.io/component=service-proxy"
APPS = "/apis/apps/v1/namespaces/kube-system"
CORE = "/api/v1/namespaces/kube-system"


def pod(objects: tuple[Object, ...]) -> Object:
    return one(objects, "DaemonSet")["spec"]["template"]["spec"]


def used(pod: Object) -> set[str]:
    """Return the names of the ConfigMaps that a pod refers to."""
    volumes = {item["configMap"]["name"] for item in pod["volumes"] if "configMap" in item}
    containers = (*pod["initContainers"], *pod["containers"])
    return volumes | {of["configMapRef"]["name"] for item in containers for of in item.get("envFrom", ())}


def config_maps(objects: tuple[Object, ...]) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == "ConfigMap"}


@pytest.mark.parametrize("overlay", ["base", *(f"overlays/{name}" for name in PROXIES)])
def test_generators_name_config_maps_by_their_content(overlay: str) -> None:
    """They keep kustomize's hash, forbid edits in place, and replace those of the base."""
    kustomization = yaml.safe_load((MANIFESTS / overlay / "kustomization.yaml").read_text())
    generators = kustomization.get("configMapGenerator", [])
    options = kustomization.get("generatorOptions", {})
    assert not any(
        "disableNameSuffixHash" in item for item in (options, *(of.get("options", {}) for of in generators))
    )
    if generators:
        assert options == {"immutable": True}
        assert {item["name"] for item in generators} == used(daemon_set()["spec"]["template"]["spec"])
        behavior = None if overlay == "base" else "replace"
        assert {item.get("behavior") for item in generators} == {behavior}


@pytest.mark.parametrize("overlay", PROXIES)
def test_pods_refer_to_config_maps_that_cannot_change(overlay: str) -> None:
    """Each has a hash in its name, the namespace of the pods, and the labels by which old ones are found."""
    objects = built(overlay)
    found = config_maps(objects)
    assert found.keys() == used(pod(objects))
    for name, item in found.items():
        assert name.rpartition("-")[0] in ("pykubeproxy", "pykubeproxy-api-server")
        assert item["immutable"]
        assert item["metadata"]["namespace"] == one(objects, "DaemonSet")["metadata"]["namespace"]
        labels = [f"{key}={value}" for key, value in item["metadata"]["labels"].items()]
        assert set(labels) == set(COMPONENT.split(","))


@pytest.mark.parametrize("file", ["config.conf", "api-server.env"])
def test_a_changed_configuration_changes_the_pod_template(tmp_path: Path, file: str) -> None:
    """It refers to a new ConfigMap, the old one keeps its name, and an unchanged one stays."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    overlay = tmp_path / "manifests/overlays/canary"
    before = build(overlay)
    changed = tmp_path / "manifests/overlays/default" / file
    changed.write_text(changed.read_text().replace("#KUBERNETES", "KUBERNETES") + "# changed\n")
    after = build(overlay)
    assert len(used(pod(before)) & used(pod(after))) == 1
    assert used(pod(after)) == config_maps(after).keys()
    template = copy.deepcopy(pod(after))
    by_name = partial(sorted, key=lambda name: name.rpartition("-")[0])  # without the hash
    for old, new in zip(by_name(used(pod(before))), by_name(used(pod(after))), strict=True):
        template = json.loads(json.dumps(template).replace(f'"{new}"', f'"{old}"'))
    assert template == pod(before), "nothing else changes"


@contextmanager
def api_server(responses: dict[str, Object]) -> Iterator[str]:
    """Serve JSON documents by path and label selector, and 404 for others. Yield the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            (selector,) = parse_qs(url.query).get("labelSelector", [""])
            found = responses.get(f"{url.path}?{selector}" if selector else url.path)
            body = json.dumps(found or {"kind": "Status", "status": "Failure", "code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def resources(version: str, **kinds: str) -> Object:
    names = [
        {"name": name, "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": names}


DISCOVERY: dict[str, Object] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]}],
    },
    "/api/v1": resources("v1", configmaps="ConfigMap"),
    "/apis/apps/v1": resources("apps/v1", daemonsets="DaemonSet", controllerrevisions="ControllerRevision"),
}


def listing(kind: str, version: str, items: list[Object]) -> Object:
    return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}


def with_config(template: Object, suffix: str) -> Object:
    """Return a pod template whose ConfigMaps have this suffix."""
    text = json.dumps(template)
    for name in used(template["spec"]):
        text = text.replace(f'"name": "{name}"', f'"name": "{name}-{suffix}"')
    return json.loads(text)


def unused(folder: Path, responses: dict[str, Object]) -> subprocess.CompletedProcess[str]:
    """Run the script with the installed kubectl and an API server that has these responses."""
    if not KUBECTL:
        pytest.skip(NO_KUBECTL)
    with api_server({**DISCOVERY, **responses}) as url:
        kubectl = folder / "kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec {KUBECTL} --server={url} "$@"\n')
        kubectl.chmod(0o755)
        environment = {**os.environ, "HOME": str(folder), "KUBECONFIG": os.devnull, "KUBECTL": str(kubectl)}
        return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=PATIENCE)


def cluster() -> dict[str, Object]:
    """Return an API server's responses: configurations a to d, of which the DaemonSet has c, and its history a and b."""
    ours = daemon_set()
    template = ours["spec"]["template"]
    ours["spec"]["template"] = with_config(template, "c")
    revisions = [
        {
            "kind": "ControllerRevision",
            "apiVersion": "apps/v1",
            "metadata": {"name": f"pykubeproxy-{suffix}"},
            "data": {"spec": {"template": {**with_config(template, suffix), "$patch": "replace"}}},
            "revision": number,
        }
        for number, suffix in enumerate("ab")
    ]
    names = [f"{name}-{suffix}" for suffix in "abcd" for name in sorted(used(template["spec"]))]
    maps = [{"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}} for name in names]
    return {
        f"{APPS}/daemonsets/pykubeproxy": ours,
        f"{APPS}/controllerrevisions?{LABELS}": listing("ControllerRevision", "apps/v1", revisions),
        f"{CORE}/configmaps?{COMPONENT}": listing("ConfigMap", "v1", maps),
    }


def test_unused_config_maps_are_those_that_no_rollback_needs(tmp_path: Path) -> None:
    """The current and the kept revisions keep theirs, also before the newest revision exists."""
    done = unused(tmp_path, cluster())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["configmap/pykubeproxy-d", "configmap/pykubeproxy-api-server-d"]


def test_no_config_map_is_unused_if_revisions_cannot_be_read(tmp_path: Path) -> None:
    """Without the DaemonSet or its history, the script fails and lists nothing."""
    for path in [path for path in cluster() if path.startswith(APPS)]:
        done = unused(tmp_path, {key: value for key, value in cluster().items() if key != path})
        assert (done.returncode != 0, done.stdout) == (True, "")
