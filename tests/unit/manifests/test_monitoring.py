"""Alerts and dashboard ask for metrics that there are, and runbooks for what to do."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.agent.observe.metrics import Metrics
from tests.unit.manifests.overlays import MANIFESTS, Object, build, built, container, dashboard, one, read

PROJECT = MANIFESTS.parent
RUNBOOKS = "docs/operations/runbooks.md"
NAME = re.compile(r"\b(?:kubeproxy|pykubeproxy|process|python)_\w+")
OF_NODES = re.compile(r"\bnode_nf_\w+")
# What node_exporter reads of conntrack; its series have the label instance.
NODE_EXPORTER = {
    "node_nf_conntrack_entries",
    "node_nf_conntrack_entries_limit",
    "node_nf_conntrack_stat_drop",
    "node_nf_conntrack_stat_insert_failed",
    "node_nf_conntrack_stat_invalid",
}
GROUPED = re.compile(r"by \(([^)]*)\)")
# Each alert stands under a heading of its own name.
HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)


def alerts() -> list[Object]:
    (group,) = one(read(MANIFESTS / "overlays/monitoring/alerts.yaml"), "PrometheusRule")["spec"]["groups"]
    return group["rules"]


def queries(within: object) -> Iterator[str]:
    """All queries of a dashboard."""
    if isinstance(within, dict):
        if isinstance(within.get("expr"), str):
            yield within["expr"]
        for value in within.values():
            yield from queries(value)
    elif isinstance(within, list):
        for value in within:
            yield from queries(value)


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The names of all series that an agent can have, with the labels of each."""
    found: dict[str, set[str]] = {}
    registry = Metrics(lambda _: 0).registry
    for collector, names in registry._collector_to_names.items():  # nothing else tells of labels
        kind, bare = getattr(collector, "_type", ""), getattr(collector, "_name", "")
        labels = set(getattr(collector, "_labelnames", ()))
        for name in names:
            if not (name.endswith("_created") or (name == bare and kind in ("counter", "histogram"))):
                found[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    for sample in (item for metric in registry.collect() for item in metric.samples):
        found.setdefault(sample.name, set(sample.labels))
    return found


def check(expression: str, series: dict[str, set[str]]) -> None:
    bare = re.sub(r'"[^"]*"', "", expression)
    names, of_nodes = NAME.findall(bare), OF_NODES.findall(bare)
    assert names or of_nodes or "up{" in expression, expression
    assert set(of_nodes) <= NODE_EXPORTER
    labels = {"instance"} if of_nodes else {"node"}
    for name in names:
        assert name in series, f"no such metric: {name} in {expression}"
        labels |= series[name]
    for label in (item.strip() for found in GROUPED.findall(expression) for item in found.split(",")):
        assert label in labels, f"no such label: {label} in {expression}"
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression
    assert of_nodes or 'job="pykubeproxy"' in expression


def test_alerts_ask_for_metrics_that_exist(series: dict[str, set[str]]) -> None:
    """And each is named once, says how bad it is, and in two sentences what it is."""
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        check(rule["expr"], series)
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()


def test_each_alert_has_a_runbook() -> None:
    """It is a heading of the runbooks, and there is none without an alert. One panel links to it."""
    headings = HEADING.findall((PROJECT / RUNBOOKS).read_text())
    assert headings == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"RUNBOOKS#{rule['alert'].lower()}"
    linked = [link for panel in dashboard()["panels"] for link in panel.get("links", ())]
    assert sorted(link["title"] for link in linked) == sorted(f"Runbook {name}" for name in headings)
    for link in linked:
        assert link["url"] == f"${{runbooks:raw}}#{link['title'].removeprefix('Runbook ').lower()}"


def test_links_to_runbooks_follow_one_setting() -> None:
    """Alerts and the dashboard get the address in the kustomization; nothing else of them changes."""
    (kustomization,) = read(MANIFESTS / "overlays/monitoring/kustomization.yaml")
    (setting,) = kustomization["configMapGenerator"][0]["literals"]
    address = setting.removeprefix("url=")
    assert address.endswith(f"/{RUNBOOKS.removeprefix('docs/').removesuffix('.md')}.html")
    objects = built("monitoring")
    (group,) = one(objects, "PrometheusRule")["spec"]["groups"]
    expected = [f"{address}#{rule['alert'].lower()}" for rule in alerts()]
    assert [rule["annotations"]["runbook_url"] for rule in group["rules"]] == expected
    applied = json.loads(one(objects, "ConfigMap")["data"]["pykubeproxy.json"])
    assert applied["templating"]["list"][0] == dashboard()["templating"]["list"][0] | {"query": address}
    assert {**applied, "templating": None} == {**dashboard(), "templating": None}


def test_the_dashboard_asks_for_metrics_that_exist(series: dict[str, set[str]]) -> None:
    """All its queries; panels do not overlap, and none has the number or the place of another."""
    for expression in queries(dashboard()["panels"]):
        check(expression, series)
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_prometheus_finds_the_agents() -> None:
    """The monitor looks for labels that the pods have and a port that they name, and calls the job pykubeproxy."""
    monitor = one(read(MANIFESTS / "overlays/monitoring/pod-monitor.yaml"), "PodMonitor")["spec"]
    (kustomization,) = read(MANIFESTS / "base/kustomization.yaml")
    labels = kustomization["labels"][0]["pairs"]
    assert monitor["selector"]["matchLabels"] == labels
    assert labels[monitor["jobLabel"]] == "pykubeproxy"
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in container("agent")["ports"]]
    assert [item["targetLabel"] for item in endpoint["relabelings"]] == ["node"]


def test_service_monitor_finds_what_the_pod_monitor_finds(tmp_path: Path) -> None:
    """With its file in the place of the other, the same pods have the same job, port, path and labels."""
    shutil.copytree(MANIFESTS / "overlays/monitoring", tmp_path / "monitoring")
    kustomization = tmp_path / "monitoring/kustomization.yaml"
    kustomization.write_text(
        kustomization.read_text().replace("pod-monitor.yaml #", "service-monitor.yaml #")
    )
    objects = build(tmp_path / "monitoring")
    service, monitor = one(objects, "Service"), one(objects, "ServiceMonitor")
    pods = one(built("monitoring"), "PodMonitor")["spec"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"] == pods["selector"]["matchLabels"]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "pykubeproxy"
    assert monitor["spec"]["endpoints"] == pods["podMetricsEndpoints"]
    (port,) = service["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container("agent")["ports"]
    assert service["spec"]["clusterIP"] == "None"
    assert not [item for item in objects if item["kind"] == "PodMonitor"]
