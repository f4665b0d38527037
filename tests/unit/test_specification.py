"""The table of tests.specification has everything, and the tests that it names are there."""

import ast
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pykubeproxy.agent.observe import events
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.config import ACTIONS, SETTINGS
from tests import specification
from tests.fakes.http_client import RECORDING, recorded_response

TESTS = Path(__file__).parent.parent
NAMED = {
    **{f"--{row.flag} {row.field}": row.tests for row in specification.SETTINGS},
    **specification.METRICS,
    **specification.BEHAVIOUR,
    **specification.ENDPOINTS,
    **specification.EVENTS,
}


def leaves(content: Mapping[str, object], path: str = "") -> Iterator[str]:
    """The paths of all values in a document."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_every_flag() -> None:
    """Those of the program and those that a kube-proxy was recorded with, each once."""
    listed = [row.flag for row in specification.SETTINGS if row.flag]
    theirs = re.findall(r"^([a-z-]+): ", recorded_response("GET :10249/flagz").body, re.MULTILINE)
    ours = {setting.flag for setting in SETTINGS + ACTIONS if setting.flag} | {"help"}
    assert len(theirs) == 59
    assert set(theirs) <= set(listed)
    assert sorted(listed) == sorted(ours)


def test_every_field() -> None:
    """Those of the program and those that a kube-proxy was recorded with, each once, and beside its own flag."""
    listed = [row.field for row in specification.SETTINGS if row.field]
    theirs = set(leaves(json.loads(recorded_response("GET :10249/configz").body)["kubeproxy.config.k8s.io"]))
    assert theirs - {"kind", "apiVersion"} <= set(listed)
    assert sorted(listed) == sorted(setting.field for setting in SETTINGS if setting.field)
    pairs = {(row.flag, row.field) for row in specification.SETTINGS}
    assert {(setting.flag, setting.field) for setting in SETTINGS} <= pairs


def test_every_metric() -> None:
    """Those of the program and those that a kube-proxy was recorded with."""
    theirs = set(
        re.findall(r"^# TYPE kubeproxy_(\S+)", recorded_response("GET :10249/metrics").body, re.MULTILINE)
    )
    ours = {
        f"{it.name}_total" if it.type == "counter" else it.name
        for it in Metrics(lambda _: 0).registry.collect()
        if it.name.startswith("kubeproxy_")
    }
    assert len(theirs) == 19
    assert theirs < specification.METRICS.keys()
    assert {it.removeprefix("kubeproxy_") for it in ours} == specification.METRICS.keys()


def test_every_page() -> None:
    """Those recorded, and those that /statusz names."""
    titles = re.findall(r"^### GET (:\d+/\w*)", RECORDING.read_text(), re.MULTILINE)
    (paths,) = re.findall(r"^Paths  (.*)$", recorded_response("GET :10249/statusz").body, re.MULTILINE)
    assert {*titles, *(f":10249{path}" for path in paths.split())} <= specification.ENDPOINTS.keys()


def test_every_event() -> None:
    """Those that the program can send."""
    sent = re.findall(
        r'"(Starting|FailedTo\w+|\w+Quarantined|ObjectSkipped|Drift\w+)"', inspect.getsource(events)
    )
    assert set(sent) == specification.EVENTS.keys()


@functools.cache
def functions(path: Path) -> set[str]:
    """The functions of a test file; none if there is no such file."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("item", sorted(NAMED))
def test_its_tests_are_there(item: str) -> None:
    """At least one, each once, in its file."""
    tests = NAMED[item]
    assert tests
    assert len(set(tests)) == len(tests)
    for test in tests:
        path, _, name = test.partition("::")
        assert name in functions(TESTS / path), test
