"""`kubectl pykubeproxy diff`: exit codes, formats, and what it asks the API server for."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli import diff as module
from pykubeproxy.inspect.diff import rounds
from pykubeproxy.inspect.diff.report import NodeResult, NodeVerdict
from pykubeproxy.inspect.node import NodeState, Question, UnknownNode, unread_rules
from pykubeproxy.nodes import cluster as nodes_of_clusters
from pykubeproxy.nodes.cluster import NodeAccess, remarks
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.save_files import SavedFile, read_saves
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import queries
from tests.fleet import NodeKind, Size, cluster, nodes, saved, state_of, tables

SIZE = Size(nodes=8, services=5)
ACCESS = NodeAccess(SimpleNamespace(server_addresses=frozenset))  # type: ignore[arg-type]


@pytest.fixture
def stale() -> set[str]:
    """Return the names of nodes whose rules do not follow the objects."""
    return set()


@pytest.fixture
def failing() -> set[str]:
    """Return the names of nodes that cannot be read."""
    return set()


@pytest.fixture
def without_ipv6() -> set[str]:
    """Return the names of nodes whose IPv6 tables cannot be read."""
    return set()


@pytest.fixture(autouse=True)
def _api_server(
    monkeypatch: pytest.MonkeyPatch, stale: set[str], failing: set[str], without_ipv6: set[str]
) -> None:
    """Replace the API server by generated nodes; node7 runs in IPVS mode."""
    old, now = cluster(SIZE, frozenset({1})), cluster(SIZE)
    known = {it.node.name: it for it in nodes(SIZE)}

    def objects(_: object) -> Cluster:
        return now

    def read_node(_: object, node: Node, __: object, *, question: Question) -> NodeState | UnknownNode:
        one = known[node.name]
        if one.kind is NodeKind.IPVS:
            reason = "runs kube-proxy in IPVS mode"
            return UnknownNode(node, reason, True, "ipvs", "kube-proxy v1.35.1", "kube-system/p7")
        if node.name in failing:
            return UnknownNode(node, "exec failed: connection refused")
        rules = tables(one, old if node.name in stale else now)
        files = (SavedFile(family.value, saved(it)) for family, it in rules.items())
        found = {it.ruleset.family: it.ruleset for it in read_saves(files)}
        state = state_of(node, found, f"kube-proxy {one.form.value}", f"kube-system/proxy-{node.name}")
        unread = {Family.IPV6: "no IPv6"} if node.name in without_ipv6 else {}
        return msgspec.structs.replace(
            state,
            unread={unread_rules(family): reason for family, reason in unread.items()},
            remarks=remarks(unread, "legacy" if node.name == "node1" else ""),
        )

    monkeypatch.setattr(module, "list_objects", objects)
    monkeypatch.setattr(module, "selected_nodes", lambda _, wanted: nullcontext((ACCESS, selected(wanted))))
    monkeypatch.setattr(nodes_of_clusters, "find_node_pods", lambda *_: None)
    monkeypatch.setattr(nodes_of_clusters, "read_node", read_node)
    monkeypatch.setattr(queries, "last_changes", lambda _, services: dict.fromkeys(services, 1000.0))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)


def selected(wanted: Any) -> list[Node]:
    return [it.node for it in nodes(SIZE) if not wanted or it.node.name in wanted]


def run(*args: str) -> Result:
    return CliRunner().invoke(module.diff_of_nodes, args)


def test_nodes_that_follow_give_exit_code_0_even_with_other_modes_among_them() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("8 nodes: 7 follow, 1 not compared.\n")


def test_the_proxy_of_a_node_that_is_not_compared_is_named() -> None:
    assert "node7  kube-proxy v1.35.1   not compared\n" in run().stdout
    (node,) = json.loads(run("--node", "node7", "-o", "json").stdout)["nodes"]
    assert (node["proxy"], node["pod"]) == ("kube-proxy v1.35.1", "kube-system/p7")


def test_nodes_with_other_tables_or_without_a_family_are_named(without_ipv6: set[str]) -> None:
    """A missing family is a failure only for a node with an address of it."""
    without_ipv6 |= {"node2", "node3"}
    result = run()
    assert result.exit_code == 0
    assert result.stderr == (
        "node1: the legacy tables have service-proxy rules too, and packets pass both\n"
        "node2 and node3: IPv6 rules could not be read: no IPv6\n"
    )


def test_node_without_a_family_that_it_needs_gives_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, without_ipv6: set[str]
) -> None:
    without_ipv6.add("node2")
    dual = [Node(it.name, (*it.addresses, "2001:db8::1")) for it in selected(())]
    monkeypatch.setattr(module, "selected_nodes", lambda _, __: nullcontext((ACCESS, dual)))
    assert run().exit_code == 2


def test_a_stale_node_gives_exit_code_1(stale: set[str], failing: set[str]) -> None:
    stale |= {"node1", "node2"}
    failing.add("node4")
    result = run()
    assert result.exit_code == 1
    assert "node1 and node2: 1 wrong Service\n" in result.output
    assert "default/service1:http at 10.96.0.2:80: 1 endpoint missing" in result.output
    assert "node4: exec failed: connection refused" in result.output


def test_a_node_that_cannot_be_read_gives_exit_code_2(failing: set[str]) -> None:
    failing.add("node4")
    assert run().exit_code == 2


def test_progress_of_nodes_that_are_read_again_has_its_own_count(
    monkeypatch: pytest.MonkeyPatch, stale: set[str]
) -> None:
    stale.add("node1")
    seen: list[int | str] = []

    @contextmanager
    def progress(total: int, label: str) -> Iterator[Callable[[], None]]:
        seen.append(f"{label}: {total}")
        yield lambda: seen.append("one")

    monkeypatch.setattr(module, "progress", progress)
    run()
    assert seen == ["Reading nodes: 8", *["one"] * 8, "Reading nodes: 1", "one"]


def test_the_rules_of_one_node_are_compared_as_text(stale: set[str]) -> None:
    stale.add("node1")
    assert run("--node", "node2", "-o", "rules").exit_code == 1, "it runs an older version"
    result = run("--node", "node1", "-o", "rules")
    assert result.exit_code == 1
    assert '+-p tcp -m comment --comment "default/service1:http" -m tcp -j DNAT' in result.output


def test_only_one_node_has_a_diff_of_rules() -> None:
    result = run("-o", "rules")
    assert result.exit_code == 2
    assert "-o rules shows one node" in result.output


def test_a_quarantined_service_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node follows the objects, but nobody serves it."""
    result = NodeResult("node1", NodeVerdict.FOLLOWS, quarantined=("default/large",))
    monkeypatch.setattr(rounds, "compare_nodes", lambda *_, **__: iter([result]))
    found = run()
    assert found.exit_code == 1
    assert "node1: 1 quarantined Service, not served: default/large;" in found.output
