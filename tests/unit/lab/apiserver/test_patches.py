"""Patches, as kubectl sends them: strategic by default, and JSON patches."""

import json
from typing import Any

import pytest

from pykubeproxy.lab.apiserver.patches import patch_of
from pykubeproxy.lab.apiserver.resources import ApiError, JsonObject

STRATEGIC = "application/strategic-merge-patch+json"
HTTP, HTTPS = {"port": 80, "name": "http", "targetPort": 8080}, {"port": 443, "name": "https"}


def service(**spec: Any) -> JsonObject:
    return {"metadata": {"name": "web", "finalizers": ["a", "b"]}, "spec": {"ports": [HTTP], **spec}}


@pytest.mark.parametrize(
    ("patch", "ports"),
    [
        ([{"port": 80, "targetPort": 9090}], [{**HTTP, "targetPort": 9090}]),
        ([HTTPS], [HTTP, HTTPS]),
        ([{"port": 80, "$patch": "delete"}, HTTPS], [HTTPS]),
        ([{"$patch": "replace"}, HTTPS], [HTTPS]),
        ([{"port": 80, "targetPort": None}], [{"port": 80, "name": "http"}]),
        (None, None),
    ],
)
def test_strategic_patches_merge_ports_by_number(patch: Any, ports: Any) -> None:
    found = patch_of(STRATEGIC, {"spec": {"ports": patch}})(service())
    assert found["spec"].get("ports") == ports


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"spec": {"$setElementOrder/ports": [{"port": 443}, {"port": 80}], "ports": [HTTPS]}}, [443, 80]),
        ({"spec": {"$patch": "replace", "ports": [HTTPS]}}, [443]),
    ],
)
def test_directives_order_and_replace(patch: JsonObject, expected: list[int]) -> None:
    found = patch_of(STRATEGIC, patch)(service(type="NodePort"))["spec"]
    assert [port["port"] for port in found["ports"]] == expected
    assert ("type" in found) == ("$patch" not in patch["spec"])


def test_lists_of_plain_values_are_joined_or_shortened() -> None:
    added = patch_of(STRATEGIC, {"metadata": {"finalizers": ["b", "c"]}})(service())
    assert added["metadata"]["finalizers"] == ["a", "b", "c"]
    left = patch_of(STRATEGIC, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"]}})(service())
    assert left["metadata"]["finalizers"] == ["b"]


def test_other_lists_are_replaced_and_the_old_object_stays() -> None:
    old = service(externalIPs=["192.0.2.1"])
    before = json.dumps(old)
    assert patch_of(STRATEGIC, {"spec": {"externalIPs": ["192.0.2.2"]}})(old)["spec"]["externalIPs"] == [
        "192.0.2.2"
    ]
    patch_of(STRATEGIC, {"spec": {"ports": [{"port": 80, "name": "x"}]}})(old)
    assert json.dumps(old) == before


def test_json_patches() -> None:
    operations = [{"op": "replace", "path": "/spec/ports/0/port", "value": 81}]
    assert patch_of("application/json-patch+json", operations)(service())["spec"]["ports"][0]["port"] == 81
    for wrong in (
        [{"op": "remove", "path": "/spec/nothing"}],
        [{"op": "test", "path": "/spec", "value": 1}],
        [1],
    ):
        with pytest.raises(ApiError) as refused:
            patch_of("application/json-patch+json", wrong)(service())
        assert refused.value.code == 422


@pytest.mark.parametrize("ports", [["x"], [{"port": 80}, 5]])
def test_lists_of_other_values_are_refused(ports: object) -> None:
    with pytest.raises(ApiError) as refused:
        patch_of(STRATEGIC, {"spec": {"ports": ports}})(service())
    assert refused.value.code == 400


@pytest.mark.parametrize(("kind", "body", "code"), [("text/plain", {}, 415), (STRATEGIC, [], 400)])
def test_what_is_no_patch_is_refused(kind: str, body: object, code: int) -> None:
    with pytest.raises(ApiError) as refused:
        patch_of(kind, body)
    assert refused.value.code == code
