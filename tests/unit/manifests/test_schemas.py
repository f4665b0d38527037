"""The manifests keep to the API's schemas, strictly: no field that is misspelt, misplaced or of a wrong type."""

from pathlib import Path

import kubernetes_validate
import pytest

from tests.unit.manifests.overlays import MANIFESTS, OVERLAYS, PROXIES, SOURCES, Object, built, read

# The oldest with all that is used, and the newest whose schema is known here.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
OPERATOR = "monitoring.coreos.com/v1"
# What the Prometheus operator's definitions know, as far as it is used here.
RULE = {"alert", "expr", "for", "labels", "annotations"}
MONITOR = {"jobLabel", "selector", "podMetricsEndpoints"}
ENDPOINT = {"port", "path", "relabelings"}


def check(it: Object, version: str) -> None:
    if it["apiVersion"] != OPERATOR:
        kubernetes_validate.validate(it, version, strict=True)
    elif it["kind"] == "PrometheusRule":
        (group,) = it["spec"]["groups"]
        assert it["spec"].keys() == {"groups"}
        assert group.keys() == {"name", "rules"}
        assert all(rule.keys() <= RULE and isinstance(rule["expr"], str) for rule in group["rules"])
    else:
        assert it["kind"] == "PodMonitor"
        assert it["spec"].keys() == MONITOR
        assert all(of.keys() == ENDPOINT for of in it["spec"]["podMetricsEndpoints"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    """Each built overlay passes, in the oldest and the newest version of Kubernetes."""
    for it in built(overlay):
        check(it, version)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_files_are_valid(path: Path) -> None:
    """So do the files themselves, kubectl or not; only kustomize's fields are missing there."""
    for it in read(path):
        if it["kind"] == "DaemonSet":
            it["spec"].setdefault("selector", {"matchLabels": {"a": "b"}})
        check(it, VERSIONS[-1])


def test_mistakes_would_show() -> None:
    """A misspelt field, a wrong type, and a kind that does not exist are found."""
    (it,) = read(MANIFESTS / "base/daemonset.yaml")
    it["spec"]["selector"] = {"matchLabels": {"a": "b"}}
    check(it, VERSIONS[-1])
    it["spec"]["template"]["spec"]["hostNetworking"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check(it, VERSIONS[-1])
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "apps/v2", "kind": "DaemonSet"}, VERSIONS[-1])


@pytest.mark.parametrize("overlay", PROXIES)
def test_a_bare_cluster_is_enough(overlay: str) -> None:
    """No custom resource is needed, all that has a namespace is in kube-system, and references lead somewhere."""
    objects = built(overlay)
    kinds = [it["kind"] for it in objects]
    assert sorted(kinds) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "ConfigMap",
        "DaemonSet",
        "ServiceAccount",
    ]
    names = {(it["kind"], it["metadata"]["name"]) for it in objects}
    for it in objects:
        assert it["metadata"].get("namespace", "") == ("" if "Cluster" in it["kind"] else "kube-system")
        if it["kind"] == "ClusterRoleBinding":
            assert ("ClusterRole", it["roleRef"]["name"]) in names
            assert [("ServiceAccount", of["name"]) in names for of in it["subjects"]] == [True]
        if it["kind"] == "DaemonSet":
            pod = it["spec"]["template"]["spec"]
            assert ("ServiceAccount", pod["serviceAccountName"]) in names
            maps = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
            maps |= {of["configMapRef"]["name"] for of in pod["containers"][0]["envFrom"]}
            assert {("ConfigMap", name) for name in maps} <= names
            assert (
                it["spec"]["selector"]["matchLabels"].items()
                <= it["spec"]["template"]["metadata"]["labels"].items()
            )
