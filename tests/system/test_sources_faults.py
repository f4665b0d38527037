"""Watches of a faulty API server."""

import re
import time

import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import SERVICES, Store
from pykubeproxy.objects import Deleted, Key, Kind
from pykubeproxy.sources import SourceError
from tests.fakes.cluster import SHORT, node, server, service, slice_of, watches
from tests.fakes.follower import Follower, eventually


def warnings(lines: list[dict[str, object]]) -> list[str]:
    """The reasons of the warnings."""
    return [str(line.get("reason", line["event"])) for line in lines if line["log_level"] == "warning"]


def failures(lines: list[dict[str, object]]) -> list[str]:
    """The reasons of failed watches, also those that belong to an outage of the server."""
    return [str(line["reason"]) for line in lines if line["event"] == "watch failed"]


def test_dropped_connections_resume_at_the_last_version() -> None:
    """Without a list; loss and recovery are one line each, and no warning."""
    with server() as api, capture_logs() as lines:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            api.faults.drop_connections()
            api.store.create(service("a"))
            follower.sees("a")
            assert follower.lists() == 1
        (failure,) = failures(lines)
        assert re.fullmatch("the connection to .* broke(: .*)?", failure)
        assert [line["log_level"] for line in lines if line["event"] == "watch recovered"] == ["debug"]


@pytest.mark.parametrize("version", [0, 1001])
def test_a_server_restored_from_a_backup_is_listed(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Its versions are older than those of the watches, which would stay silent. It may know the Node's last change."""
    monkeypatch.setattr("pykubeproxy.sources.api._LONGEST_WAIT", 0.1)
    with server(store=Store(first_version=1000)) as before, Follower(watches(before.url)) as follower:
        before.store.create(node("n1", "192.168.99.10"))
        follower.sees("n1", kind=Kind.NODE)
        for number in range(20):
            before.store.create(service(f"a{number}"))
        follower.sees(*(f"a{number}" for number in range(20)))
        before.requests.wait(3, "watch")
        before.stop()
        after = server(port=before.port, store=Store(first_version=version))
        after.store.load([service("old"), slice_of("old", "10.1.0.1"), node("n1", "192.168.99.10")])
        with after:
            follower.sees("old")
            follower.sees("old", kind=Kind.ENDPOINT_SLICE)
            after.store.create(service("new"))
            follower.sees("old", "new")


def test_compacted_history_is_listed_again() -> None:
    """An expired version (410) leads to a list of a later state at once, without a warning."""
    with server() as api, capture_logs() as lines:
        api.store.load([service("a"), service("b")])
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a", "b")
            api.requests.wait(1, "watch")
            api.stop()
            api.store.merge_patch(SERVICES, "default", "a", {"spec": {"ports": [{"port": 81}]}})
            api.store.delete(SERVICES, "default", "b")
            api.store.create(service("c"))
            api.faults.compact()
            api.start()
            follower.sees("a", "c")
            assert follower.lists() == 2
        assert "resourceVersion=0" not in api.requests.entries("list")[-1].query
        assert not [it for it in warnings(lines) if "410" in it]


def test_versions_that_always_expire_are_no_hot_loop() -> None:
    """If every watch ends with 410, lists get slower; the state is complete."""
    with server() as api:
        api.faults.fail(410, times=10_000, verb="watch")
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.store.create(service("a"))
            follower.sees("a")
            before = api.requests.count("list")
            time.sleep(1.0)
            assert 1 <= api.requests.count("list") - before <= 30


def test_watches_that_end_at_once_are_no_hot_loop() -> None:
    """If every watch ends at once, requests slow down, with one warning."""
    with server() as api, capture_logs() as lines:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.clear()
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                api.faults.end_watches()
                time.sleep(0.002)
            assert 2 <= api.requests.count("watch") <= 12
        assert "the API server ends the watch at once" in warnings(lines)


@pytest.mark.parametrize("status", [500, 503, 403, 404, 400, 422, 302])
@pytest.mark.parametrize("verb", ["list", "watch"])
def test_errors_are_waited_out(status: int, verb: str) -> None:
    """After any error status the next tries succeed."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.fail(status, times=3, verb=verb)
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int) -> None:
    """The next request waits for the Retry-After of one second."""
    with server() as api:
        api.faults.fail(status, verb="list", retry_after=1)
        started = time.monotonic()
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            assert 1.0 <= time.monotonic() - started < 3.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "does not accept the credentials"),
        (403, "services are not permitted"),
        (404, "does not serve services"),
        (429, "fewer requests"),
        (500, "failed"),
    ],
)
def test_error_of_a_single_try(status: int, words: str) -> None:
    """The error of a single try holds the reason."""
    with server() as api:
        api.faults.fail(status)
        with pytest.raises(SourceError, match=words) as caught:
            watches(api.url, Kind.SERVICE)[0].once()
        assert str(caught.value).startswith("cannot list services: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_truncated_json(verb: str) -> None:
    """Truncated JSON is rejected, and its changes arrive later."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.truncate(2, verb=verb)
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")
            api.store.create(service("c"))
            follower.sees("a", "b", "c")


def test_slow_server() -> None:
    """The watch waits for late responses."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.delay(0.6)
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert follower.lists() == 1


def test_hanging_server() -> None:
    """A request without a response times out and is repeated."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.hang(verb="list")
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            api.requests.wait(2, "list")
            api.faults.release()
            follower.sees("a")


def test_unreachable_server() -> None:
    """Refused connections are one line; the objects arrive when the server is back."""
    api = server()
    with api:
        api.store.create(service("a"))
    with capture_logs() as lines, Follower(watches(api.url, Kind.SERVICE)) as follower:
        eventually(lambda: failures(lines))
        time.sleep(1.0)
        with api:
            follower.sees("a")
    assert failures(lines)[0] == f"no connection to {api.url}: Connection refused"
    assert len([it for it in failures(lines) if "refused" in it]) == 1


def test_state_stays_while_the_server_is_away() -> None:
    """A lost server causes no event."""
    api = server()
    with api:
        api.store.create(service("a"))
        follower = Follower(watches(api.url, Kind.SERVICE))
        follower.__enter__()
        follower.sees("a")
    time.sleep(0.5)
    assert len(follower.events) == 1
    follower.__exit__(None, None, None)


def test_object_that_cannot_be_decoded() -> None:
    """A faulty object is one warning per version and counts as deleted until a valid version."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("bad", ports=[{"port": "http"}]), verbatim=True)
        api.store.create(service("a"))
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            api.store.replace(service("a", clusterIP=5), verbatim=True)
            follower.sees()
            assert follower.events[-1] == Deleted(Kind.SERVICE, Key("default", "a"))
            api.stop()
            api.store.create(service("b"))
            api.faults.compact()
            api.start()
            follower.sees("b")
            assert follower.lists() == 2  # with both bad objects in it, of the versions known
            api.store.replace(service("a", clusterIP=5, type="NodePort"), verbatim=True)
            eventually(lambda: sum("default/a is" in it for it in warnings(lines)) == 2)
            api.store.delete(SERVICES, "default", "bad")
            api.store.create(service("end"))
            follower.sees("b", "end")
            api.store.replace(service("a", clusterIP="10.96.0.77"), verbatim=True)
            follower.sees("a", "b", "end")
    skipped = [it for it in warnings(lines) if "is skipped" in it]
    assert len([it for it in skipped if "default/bad is skipped: spec.ports[0].port: expected" in it]) == 1
    assert len(skipped) == 3


def test_slow_node_watch_does_not_hold_up_the_others() -> None:
    """Each kind is watched independently."""
    with server() as api:
        api.store.load([service("a"), slice_of("a", "10.1.0.1")])
        api.faults.fail(500, times=10_000, path="/nodes")
        with Follower(watches(api.url, timing=SHORT)) as follower:
            follower.sees("a")
            follower.sees("a", kind=Kind.ENDPOINT_SLICE)
            assert Kind.NODE not in follower.state
