"""Watches: where they begin, bookmarks, their end."""

from collections.abc import Callable
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, SERVICES, ApiServer, Store
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.waiting import eventually
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/services?watch=true"


def seen(events: Any) -> Any:
    """Type and name of each event."""
    return [(event["type"], event["object"]["metadata"].get("name")) for event in events]


@pytest.mark.parametrize("version", ["", "&resourceVersion=0"])
def test_without_a_version_it_begins_with_what_there_is(
    server: ApiServer, client: Client, service: Maker, version: str
) -> None:
    """Present objects come as ADDED, sorted, then what happens."""
    server.store.load([service("b"), service("a")])
    events = client.watch(f"{PATH}&timeoutSeconds=2{version}")
    assert seen([next(events), next(events)]) == [("ADDED", "a"), ("ADDED", "b")]
    server.store.delete(SERVICES, "default", "a")
    assert seen(events) == [("DELETED", "a")]


def test_of_a_namespace(server: ApiServer, client: Client, service: Maker) -> None:
    """Only that namespace's objects show."""
    before = server.store.version
    server.store.load([service("a"), service("b", "elsewhere")])
    path = f"/api/v1/namespaces/elsewhere/services?watch=1&resourceVersion={before}&timeoutSeconds=1"
    assert seen(client.watch(path)) == [("ADDED", "b")]


def test_leaving_a_field_selector_shows_the_old_object_with_the_new_version(
    server: ApiServer, client: Client, node: Maker
) -> None:
    """The DELETED event of an object that still exists bears the version of the change."""
    server.store.create(node("n"))
    before = server.store.version
    patched = server.store.merge_patch(NODES, "", "n", {"spec": {"unschedulable": True}})
    path = f"/api/v1/nodes?watch=1&resourceVersion={before}&timeoutSeconds=1"
    (event,) = client.watch(f"{path}&fieldSelector=spec.unschedulable%3Dfalse")
    assert event["type"] == "DELETED"
    assert "unschedulable" not in event["object"]["spec"]
    assert event["object"]["metadata"]["resourceVersion"] == patched["metadata"]["resourceVersion"]
    (event,) = client.watch(f"{path}&fieldSelector=spec.unschedulable%3Dtrue")
    assert (event["type"], event["object"]["spec"]["unschedulable"]) == ("ADDED", True)


def test_backlog_comes_at_once(server: ApiServer, client: Client, service: Maker) -> None:
    """Changes since the version asked for do not wait for the next change or the end."""
    before = server.store.version
    server.store.load([service("a"), service("b")])
    events = client.watch(f"{PATH}&resourceVersion={before}&timeoutSeconds=600")
    assert seen([next(events), next(events)]) == [("ADDED", "a"), ("ADDED", "b")]


def test_bookmarks_come_by_the_clock_and_at_the_end(
    client_of: Callable[[ApiServer], Client], service: Maker, endpoint_slice: Maker
) -> None:
    """They bear the newest version of all, even if another resource made it; nobody gets one unasked."""
    with ApiServer(bookmark_seconds=0.3, store=Store(progress_seconds=0.1)) as server:
        client = client_of(server)
        server.store.create(service("a"))
        server.store.create(endpoint_slice("a", "10.0.0.1"))
        start = server.store.version - 1
        path = f"{PATH}&resourceVersion={start}&timeoutSeconds=1"
        assert list(client.watch(path)) == []
        events = list(client.watch(f"{path}&allowWatchBookmarks=true"))
    assert {event["type"] for event in events} == {"BOOKMARK"}
    assert {event["object"]["metadata"]["resourceVersion"] for event in events} == {str(server.store.version)}
    assert 2 <= len(events) <= 4  # at 0.3, 0.6, 0.9 and 1.0 seconds, unless the machine is slow


def test_no_bookmark_repeats_the_version_of_the_request(
    client_of: Callable[[ApiServer], Client], service: Maker, endpoint_slice: Maker
) -> None:
    """Nor that of the changes with which the watch begins, nor one of another resource before etcd reports progress."""
    with ApiServer(bookmark_seconds=0.1) as server:
        client, path = client_of(server), f"{PATH}&allowWatchBookmarks=true&timeoutSeconds=1&resourceVersion="
        before = server.store.version
        server.store.create(service("a"))
        server.store.create(endpoint_slice("a", "10.0.0.1"))
        assert seen(client.watch(f"{path}{before}")) == [("ADDED", "a")]
        assert list(client.watch(f"{path}{before + 1}")) == []
        assert list(client.watch(f"{path}{server.store.version}")) == []


def test_a_change_during_the_watch_is_followed_by_bookmarks(
    client_of: Callable[[ApiServer], Client], service: Maker
) -> None:
    with ApiServer(bookmark_seconds=0.3) as server:
        before = server.store.version
        server.store.create(service("a"))
        watch = client_of(server).watch(
            f"{PATH}&allowWatchBookmarks=true&timeoutSeconds=1&resourceVersion={before}"
        )
        events = [next(watch)]
        server.store.create(service("b"))
        events += watch
    assert [event["type"] for event in events[:3]] == ["ADDED", "ADDED", "BOOKMARK"]
    assert events[-1]["object"]["metadata"]["resourceVersion"] == str(server.store.version)


def test_no_bookmark_before_the_version_asked_for(client_of: Callable[[ApiServer], Client]) -> None:
    """A watch from the future stays silent until that version is passed."""
    with ApiServer(bookmark_seconds=0.2) as server:
        path = f"{PATH}&resourceVersion=1000&allowWatchBookmarks=true&timeoutSeconds=1"
        assert list(client_of(server).watch(path)) == []


def test_from_the_future_only_what_comes_after_it(server: ApiServer, client: Client, service: Maker) -> None:
    """Changes up to the version asked for stay untold, also those made during the watch."""
    events = client.watch(f"{PATH}&resourceVersion={server.store.version + 2}&timeoutSeconds=600")
    server.store.load(service(name) for name in "abc")
    assert seen([next(events)]) == [("ADDED", "c")]


def test_history_is_bounded(client_of: Callable[[ApiServer], Client], endpoint_slice: Maker) -> None:
    """Versions that have dropped out of the history are answered 410 in an event; those that have not are served."""
    with ApiServer(store=Store(history=100)) as server:
        server.store.create(endpoint_slice("a", "10.0.0.1"))
        for number in range(200):
            patch = {"metadata": {"annotations": {"n": str(number)}}}
            server.store.merge_patch(ENDPOINT_SLICES, "default", "a", patch)
        client, now = client_of(server), server.store.version
        path = "/apis/discovery.k8s.io/v1/endpointslices?watch=1&timeoutSeconds=1&resourceVersion="
        (error,) = client.watch(f"{path}2")
        assert (error["type"], error["object"]["code"]) == ("ERROR", 410)
        assert len(list(client.watch(f"{path}{now - 100}"))) == 100


def test_initial_events_end_with_an_annotated_bookmark(
    client_of: Callable[[ApiServer], Client], service: Maker, endpoint_slice: Maker
) -> None:
    """With watch_list on, sendInitialEvents gives the present objects, the bookmark, then changes."""
    with ApiServer(watch_list=True) as server:
        client = client_of(server)
        server.store.load([service("a"), endpoint_slice("a", "10.0.0.1")])
        asked = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
        path = f"/apis/discovery.k8s.io/v1/endpointslices?watch=true&{asked}&timeoutSeconds=2"
        events = client.watch(path)
        assert seen([next(events)]) == [("ADDED", "a")]
        bookmark = next(events)
        assert bookmark["object"]["metadata"] == {
            "resourceVersion": str(server.store.version),
            "annotations": {"k8s.io/initial-events-end": "true"},
        }
        assert (bookmark["type"], bookmark["object"]["endpoints"]) == ("BOOKMARK", None)
        server.store.delete(ENDPOINT_SLICES, "default", "a")
        assert seen([next(events)]) == [("DELETED", "a")]


def test_connection_is_good_for_another_request(server: ApiServer, client: Client, service: Maker) -> None:
    """A watch that ends leaves the connection usable, as HTTP/1.1 keep-alive promises."""
    list(client.watch(f"{PATH}&timeoutSeconds=1"))
    client.get("/api/v1/services")
    assert client.pool.connection_from_url(server.url).num_connections == 1


def test_client_that_leaves_is_noticed_at_once(client_of: Callable[[ApiServer], Client]) -> None:
    """The server ends a watch without an event to send."""
    with FaultyApiServer() as server:
        response = client_of(server).pool.request(
            "GET", f"{server.url}{PATH}&timeoutSeconds=600", preload_content=False
        )
        assert server.watches.running == 1
        response.close()
        eventually(lambda: not server.watches.running)
