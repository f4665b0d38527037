"""Lists: versions, pages and what contradicts itself."""

import pytest

from pykubeproxy.lab.apiserver import SERVICES, ApiServer
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/services"


@pytest.fixture
def five(server: ApiServer, service: Maker) -> ApiServer:
    """A server with the services a to e."""
    server.store.load(service(name) for name in "edcba")
    return server


def test_pages_show_the_state_of_the_first_one(five: ApiServer, client: Client, service: Maker) -> None:
    """What is written between two pages does not show in the second."""
    first = client.get(f"{PATH}?limit=2")
    five.store.delete(SERVICES, "default", "d")
    five.store.create(service("bb"))
    five.store.merge_patch(SERVICES, "default", "e", {"metadata": {"labels": {"new": "yes"}}})
    rest = client.get(f"{PATH}?limit=9&continue={first['metadata']['continue']}")
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c", "d", "e"]
    assert "labels" not in rest["items"][2]["metadata"]
    assert "continue" not in rest["metadata"]
    assert client.names(PATH) == ["a", "b", "bb", "c", "e"]


def test_remaining_items_are_counted_only_without_selectors(five: ApiServer, client: Client) -> None:
    """As the real server, which could not know with one."""
    assert client.get(f"{PATH}?limit=2")["metadata"]["remainingItemCount"] == 3
    with_selector = client.get(f"{PATH}?limit=2&labelSelector=!x")["metadata"]
    assert "continue" in with_selector
    assert "remainingItemCount" not in with_selector


def test_expired_token_is_410_and_offers_to_go_on(five: ApiServer, client: Client) -> None:
    """After compaction a token is too old; the one in the answer goes on without consistency."""
    token = client.get(f"{PATH}?limit=2")["metadata"]["continue"]
    five.store.delete(SERVICES, "default", "d")
    five.store.compact()
    gone = client.ask("GET", f"{PATH}?limit=2&continue={token}")
    assert (gone.status, gone.json["reason"], gone.json["code"]) == (410, "Expired", 410)
    assert client.names(f"{PATH}?continue={gone.json['metadata']['continue']}") == ["c", "e"]


def test_version_0_lists_everything_at_once(five: ApiServer, client: Client) -> None:
    """From its cache the real server does not page, so kube-proxy's first list is whole."""
    assert client.names(f"{PATH}?limit=2&resourceVersion=0") == list("abcde")


def test_exact_version_lists_the_past(five: ApiServer, client: Client) -> None:
    """A list at an exact version shows what was; at a version not older, what is."""
    then = five.store.version
    five.store.delete(SERVICES, "default", "a")
    past = client.get(f"{PATH}?resourceVersion={then}&resourceVersionMatch=Exact")
    assert [item["metadata"]["name"] for item in past["items"]] == list("abcde")
    assert past["metadata"]["resourceVersion"] == str(then)
    assert client.names(f"{PATH}?resourceVersion={then}") == list("bcde")
    assert client.names(f"{PATH}?resourceVersion={then}&resourceVersionMatch=NotOlderThan") == list("bcde")
    five.store.compact()
    assert client.ask("GET", f"{PATH}?resourceVersion={then}&resourceVersionMatch=Exact").status == 410


def test_namespaced_list(five: ApiServer, client: Client, service: Maker) -> None:
    """A namespace's path lists that namespace only."""
    five.store.create(service("x", "elsewhere"))
    assert client.names("/api/v1/namespaces/elsewhere/services") == ["x"]
    assert client.names(PATH) == [*"abcde", "x"]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=many", 400),
        ("resourceVersion=-1", 400),
        ("continue=bm9wZQ", 400),
        ("labelSelector=a%3D%3D%3Db", 400),
        ("fieldSelector=spec.nonsense%3D1", 400),
        ("resourceVersionMatch=Exact", 422),
        ("resourceVersionMatch=Exact&resourceVersion=0", 422),
        ("resourceVersionMatch=Sometimes&resourceVersion=3", 422),
        ("watch=1&resourceVersionMatch=NotOlderThan&resourceVersion=3", 422),
        ("watch=1&sendInitialEvents=true", 422),
    ],
)
def test_options_that_make_no_sense(five: ApiServer, client: Client, query: str, code: int) -> None:
    """They are refused with a Status that says which."""
    answer = client.ask("GET", f"{PATH}?{query}")
    assert (answer.status, answer.json["code"], answer.json["status"]) == (code, code, "Failure")
