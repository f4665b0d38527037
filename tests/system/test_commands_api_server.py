"""`pykubeproxy explain` and `diff` with objects of an API server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.diff import diff
from pykubeproxy.cli.explain import explain
from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import node, server, service, slice_of

HERE = ("--hostname-override", "n1")


def labelled(it: dict[str, Any], **labels: str) -> dict[str, Any]:
    return {**it, "metadata": {**it["metadata"], "labels": {**it["metadata"].get("labels", {}), **labels}}}


def inside(namespace: str, it: dict[str, Any]) -> dict[str, Any]:
    return {**it, "metadata": {**it["metadata"], "namespace": namespace}}


OBJECTS = (
    labelled(node("n1", "10.0.0.1"), **{"topology.kubernetes.io/zone": "z1"}),
    labelled(node("n2", "10.0.0.2"), **{"topology.kubernetes.io/zone": "z2"}),
    service("a", clusterIP="10.96.0.10"),
    {**slice_of("a", "10.1.0.1", "10.1.0.2"), "ports": [{"name": "", "port": 8080}]},
    inside("other", service("a", clusterIP="10.96.0.11")),
    service("none", clusterIP="None"),
    labelled(service("foreign", clusterIP="10.96.0.12"), **{"service.kubernetes.io/service-proxy-name": "x"}),
)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with server() as running:
        for it in OBJECTS:
            running.store.create(it, verbatim=True)
        yield running


def explained(api: ApiServer, *arguments: str) -> Result:
    options = (*arguments, "--master", api.url)
    return CliRunner().invoke(explain, options, catch_exceptions=False)


def test_explain_requests_only_needed_objects(api: ApiServer) -> None:
    """A Service, its slices and this Node; a name may match in several namespaces."""
    result = explained(api, "default/a", *HERE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("On n1 in z1:\n\ndefault/a  TCP IPv4\n")
    assert "     50%  10.1.0.1:8080  ready\n" in result.stdout
    both = json.loads(explained(api, "a", *HERE, "-o", "json").stdout)
    assert [
        (it["namespace"], len(it["ports"][0]["policies"][0]["groups"][0]["endpoints"]))
        for it in both["services"]
    ] == [
        ("default", 2),
        ("other", 0),
    ]


def test_explain_reads_the_services_that_decide_about_affinity(api: ApiServer) -> None:
    """The older one of the same namespace comes first; of equal age, that with the first name."""
    for number, name in enumerate(("first", "second"), 1):
        made = service(name, clusterIP=f"10.96.0.2{number}", sessionAffinity="ClientIP")
        api.store.create(made, verbatim=True)
        ports = [{"name": "", "port": 8080}]
        api.store.create({**slice_of(name, f"10.1.1.{number}"), "ports": ports}, verbatim=True)
    limit = "--max-affinity-lists=1"
    assert "A client keeps its endpoint" in explained(api, "default/first", *HERE, limit).stdout
    assert "Session affinity is not kept" in explained(api, "default/second", *HERE, limit).stdout


def test_unwatched_services_are_explained(api: ApiServer) -> None:
    """Headless Services and those of other proxies."""
    assert "It has no rules: it is headless" in explained(api, "none", *HERE).stdout
    text = " ".join(explained(api, "foreign", "-n", "default", *HERE).stdout.split())
    assert "It has no rules: its label service.kubernetes.io/service-proxy-name" in text


def test_explain_for_another_node(api: ApiServer) -> None:
    """The API server has its zone; an unknown Node is one line on standard error."""
    result = explained(api, "default/a", *HERE, "--node", "n2")
    assert ("    On n2 in z2" in result.stdout, result.stderr) == (True, "")
    result = explained(api, "default/a", "--hostname-override", "n9")
    assert (
        result.stderr
        == "Note: the API server has no Node n9; use --hostname-override to select another one.\n"
    )
    assert result.stdout.startswith("On n9, zone unknown:\n")


def test_errors_are_one_line(api: ApiServer) -> None:
    """An unknown Service, and a missing server."""
    assert explained(api, "default/b", *HERE).stderr == (
        "Error: there is no Service default/b; check its name and namespace\n"
    )
    api.stop()
    result = explained(api, "default/a", *HERE)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: cannot list services: ")
    assert len(result.stderr.splitlines()) == 1


def test_diff_of_api_server_and_manifests(api: ApiServer, tmp_path: Path) -> None:
    manifests = tmp_path / "objects.json"
    items = [it for it in OBJECTS if it["metadata"]["name"] != "n2"]
    manifests.write_text(json.dumps({"kind": "List", "items": items}).replace("10.1.0.2", "10.1.0.3"))
    options = ("--master", api.url, "--against", str(manifests), *HERE)
    result = CliRunner().invoke(diff, options, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stdout == (
        f"IPv4: {manifests} → API server\n"
        "  default/a: 1 endpoint removed: 10.1.0.3:8080; 1 endpoint added: 10.1.0.2:8080\n"
    )
