"""The Helm chart renders the objects of the overlays. `make chart` installs what these tests need."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests import chart
from tests.unit.manifests.overlays import Object, built, one

helm: Any = pytest.importorskip("helm_python", reason="Helm is not installed; `make chart` installs it")
VERSIONS = ("1.27", kubernetes_validate.latest_version())
SET: Object = {
    "image": {"digest": f"sha256:{'0' * 64}"},
    "apiServer": {"host": "192.0.2.10", "port": 443},
    "config": "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: '{{ x }}'\n",
    "extraArgs": ["--v=4"],
    "resources": {"limits": {"memory": "2Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
    "tolerations": [],
    "affinity": {"nodeAffinity": None},
    "priorityClassName": "system-cluster-critical",
    "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
    "podAnnotations": {"a.example.com/b": "c: d"},
    "monitoring": {"enabled": True, "runbooks": "https://docs.example.org/runbooks.html"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart."""
    made = tmp_path_factory.mktemp("chart")
    chart.write(made)
    return made


def render(folder: Path, values: Object, namespace: str = "kube-system") -> tuple[Object, ...]:
    with helm.Chart.load(folder) as loaded:
        loaded.validate_schema(values)
        rendered = loaded.render(values, name="any", namespace=namespace)
    return tuple(item for text in rendered.values() for item in yaml.safe_load_all(text) if item)


def test_lint_finds_nothing_but_the_missing_icon(folder: Path) -> None:
    found = helm.lint(folder, strict=True)
    assert found["errors"] == []
    assert [item["error"] for item in found["messages"]] == ["icon is recommended"]


def comparable(objects: tuple[Object, ...]) -> list[Object]:
    """Return objects without the hashes in names, and without Helm's annotation of ConfigMaps."""
    text = json.dumps(objects)
    for item in objects:
        if item.get("immutable"):
            name = item["metadata"]["name"]
            text = text.replace(name, name.rpartition("-")[0])
    made: list[Object] = json.loads(text)
    for item in made:
        if item["kind"] == "ConfigMap":
            item.setdefault("data", {})
            item["metadata"].pop("annotations", None)
    return sorted(made, key=lambda item: (item["kind"], item["metadata"]["name"]))


def test_default_values_render_the_default_overlay(folder: Path) -> None:
    assert comparable(render(folder, {})) == comparable(built("default"))


def test_monitoring_is_the_overlay(folder: Path) -> None:
    objects = render(folder, {"monitoring": {"enabled": True}})
    assert comparable(objects) == comparable((*built("default"), *built("monitoring")))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, SET], ids=["default", "set"])
def test_objects_are_valid(folder: Path, values: Object, version: str) -> None:
    for item in render(folder, values):
        if "coreos" not in item["apiVersion"]:
            kubernetes_validate.validate(item, version, strict=True)


def test_values_reach_the_objects(folder: Path) -> None:
    """Each value is in its place; the configuration and strings with braces arrive unchanged."""
    objects = render(folder, SET, "other")
    assert {item["metadata"].get("namespace", "other") for item in objects} == {"other"}
    daemon_set = one(objects, "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    image = f"registry.example.com/OWNER/pykubeproxy@{SET['image']['digest']}"
    assert {item["image"] for item in (*pod["initContainers"], agent)} == {image}
    assert agent["args"][-2:] == ["--hostname-override=$(NODE_NAME)", "--v=4"]
    assert agent["resources"] == SET["resources"]
    # null removes a default.
    assert (daemon_set["spec"]["updateStrategy"], pod["affinity"]) == ({"type": "OnDelete"}, {})
    assert [pod[key] for key in ("tolerations", "priorityClassName")] == [[], "system-cluster-critical"]
    assert daemon_set["spec"]["template"]["metadata"]["annotations"] == {
        "kubectl.kubernetes.io/default-container": "agent",
        **SET["podAnnotations"],
    }
    data = [item["data"] for item in objects if item.get("immutable")]
    assert {"config.conf": SET["config"]} in data
    assert {"KUBERNETES_SERVICE_HOST": "192.0.2.10", "KUBERNETES_SERVICE_PORT": "443"} in data
    urls = [
        rule["annotations"]["runbook_url"]
        for rule in one(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    ]
    assert all(url.startswith(f"{SET['monitoring']['runbooks']}#") for url in urls)


@pytest.mark.parametrize(("key", "value"), [("config", "a: b\n"), ("apiServer", {"host": "192.0.2.1"})])
def test_changed_configuration_is_a_new_revision(folder: Path, key: str, value: object) -> None:
    """The pod template names other ConfigMaps, which stay for the pods of the last revision."""
    templates = [
        one(render(folder, values), "DaemonSet")["spec"]["template"] for values in ({}, {key: value})
    ]
    assert templates[0] != templates[1]
    for item in render(folder, {}):
        if item["kind"] == "ConfigMap":
            assert item["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize("values", [{"toleration": []}, {"image": {"tags": "x"}}, {"extraArgs": "--v=4"}])
def test_unknown_values_are_refused(folder: Path, values: Object) -> None:
    with pytest.raises(helm.HelmValuesError):
        render(folder, values)


def test_archive_is_reproducible_and_loads(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.tgz", "b.tgz")]
    for path in paths:
        chart.archive(path, 1717200000)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with helm.Chart.load(paths[0]) as loaded:
        assert (loaded.name, loaded.version) == ("pykubeproxy", chart.pykubeproxy.__version__)
