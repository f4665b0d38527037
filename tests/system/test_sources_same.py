"""An API server and manifests give the same events."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pykubeproxy.lab.apiserver import resources
from pykubeproxy.objects import Kind, Object, Service
from pykubeproxy.sources import Watch
from pykubeproxy.sources.manifests import ManifestWatch
from tests.fakes.cluster import node, server, service, slice_of, watches
from tests.fakes.follower import Follower, eventually

Objects = dict[tuple[str, str], dict[str, Any]]
Change = Callable[[Objects], None]
World = tuple[list[Watch], Change]


def put(*items: dict[str, Any]) -> Change:
    """A change that adds or replaces objects."""
    return lambda objects: objects.update({(it["kind"], it["metadata"]["name"]): it for it in items})


def remove(kind: str, name: str) -> Change:
    """A change that removes an object."""
    return lambda objects: objects.pop((kind, name), None) and None


SCENARIO: list[Change] = [
    put(node("n1", "10.0.0.1"), service("a", clusterIP="10.96.0.10"), slice_of("a", "10.1.0.1")),
    put(slice_of("a", "10.1.0.1", "10.1.0.2")),
    put(service("b", clusterIP="10.96.0.11", externalIPs=["192.0.2.1"])),
    put(service("a", clusterIP="10.96.0.10", sessionAffinity="ClientIP"), node("n1", "10.0.0.9")),
    put(service("b", clusterIP="10.96.0.11", ports=[{"port": "undecodable"}])),
    put(slice_of("b", "10.1.0.3"), slice_of("a")),
    put(service("b", clusterIP="10.96.0.11")),
    remove("Service", "a"),
    remove("EndpointSlice", "a"),
    remove("Node", "n1"),
]


@contextmanager
def api_world(folder: Path) -> Iterator[World]:
    """An API server."""
    with server() as api:

        def apply(objects: Objects) -> None:
            for resource in (resources.NODES, resources.SERVICES, resources.ENDPOINT_SLICES):
                present = {it["metadata"]["name"] for it in api.store.list(resource)}
                expected = {name: it for (kind, name), it in objects.items() if kind == resource.kind}
                for name in present - expected.keys():
                    api.store.delete(resource, "default", name)
                for name, it in expected.items():
                    (api.store.replace if name in present else api.store.create)(it, verbatim=True)

        yield watches(api.url), apply


@contextmanager
def manifest_world(folder: Path) -> Iterator[World]:
    """A directory of manifests, one file per kind."""

    def apply(objects: Objects) -> None:
        for kind in Kind:
            items = [it for (of, _), it in objects.items() if of == kind.value]
            (folder / f"{kind.value}.json").write_text(json.dumps({"kind": "List", "items": items}))

    apply({})
    yield [ManifestWatch(str(folder))], apply


def final(objects: Objects) -> dict[str, set[str]]:
    """The expected names of each kind after a change."""
    good = [(kind, name) for (kind, name), it in objects.items() if "undecodable" not in json.dumps(it)]
    return {kind.value: {name for of, name in good if of == kind.value} for kind in Kind}


def states(world: World) -> list[Any]:
    """The state after each step of the scenario, once the names are right and nothing changes."""
    sources, apply = world
    objects: Objects = {}
    seen: list[Any] = []
    with Follower(sources) as follower:
        eventually(lambda: len(follower.state) == len(Kind))
        for number, change in enumerate(SCENARIO):
            change(objects)
            marker = node("n1", f"10.9.9.{number}")  # seen on every source, so that a step has an end
            if ("Node", "n1") in objects:
                objects["Node", "n1"] = marker
            before = len(follower.events)
            apply(objects)
            eventually(lambda before=before: len(follower.events) > before)
            expected = final(objects)
            eventually(
                lambda expected=expected: {kind.value: follower.names(kind) for kind in Kind} == expected
            )
            quiet(follower)
            seen.append(
                {kind: {key: as_written(it) for key, it in follower.state[kind].items()} for kind in Kind}
            )
    return seen


def as_written(item: Object) -> Object:
    """Return an object without what only an API server gives it."""
    return msgspec.structs.replace(item, uid="", created=0.0) if isinstance(item, Service) else item


def quiet(follower: Follower) -> None:
    """Wait for a pause in the events."""
    last, since = len(follower.events), time.monotonic()
    while time.monotonic() - since < 0.15:
        time.sleep(0.01)
        if len(follower.events) != last:
            last, since = len(follower.events), time.monotonic()


def test_same_states(tmp_path: Path) -> None:
    """The same changes give the same states, with equal objects, from both sources."""
    with api_world(tmp_path) as world:
        from_api = states(world)
    with manifest_world(tmp_path) as world:
        from_manifests = states(world)
    assert from_api == from_manifests
    assert len(from_api) == len(SCENARIO)
    assert from_api[0] != from_api[1]


@pytest.mark.parametrize("make", [api_world, manifest_world])
def test_once_is_what_run_begins_with(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """A single read gives the lists with which a watch starts, one per kind."""
    objects: Objects = {}
    for change in SCENARIO[:3]:
        change(objects)
    with make(tmp_path) as (sources, apply):
        apply(objects)
        once = {it.kind: it for source in sources for it in source.once()}
        with Follower(sources) as follower:
            eventually(lambda: len(follower.events) == 3)
            assert {it.kind: it for it in follower.events} == once
    assert set(once) == set(Kind)
