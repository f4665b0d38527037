"""Invalid objects are rejected with one clear line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.objects import Kind, Undecodable, decode
from tests.invalid_objects import WHOLE, corrupted


def rejection(kind: Kind, raw: bytes) -> str:
    """Return the line that says why an object is skipped."""
    with pytest.raises(Undecodable) as caught:
        decode(kind, raw)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 700
    return line


def spec(**fields: object) -> bytes:
    """Return a Service with these fields in its spec."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    whole["spec"].update(fields)
    return json.dumps(whole).encode()


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(Kind).flatmap(lambda kind: st.tuples(st.just(kind), corrupted(kind))))
def test_corrupt_object_is_decoded_or_rejected(case: tuple[Kind, bytes]) -> None:
    """decode raises only Undecodable with a single line; decoded names have no control characters."""
    kind, raw = case
    try:
        decoded = decode(kind, raw)
    except Undecodable as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700
    else:
        assert decoded.key.name.isascii()


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(Kind), raw=st.one_of(st.binary(), st.text().map(str.encode)))
def test_noise_is_rejected(kind: Kind, raw: bytes) -> None:
    """Random bytes are rejected."""
    with pytest.raises(Undecodable):
        decode(kind, raw)


def test_service_with_too_many_rules_is_rejected() -> None:
    """The API server accepts ports, addresses and source ranges that multiply to more rules than a node can hold."""
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 1001)]
    addresses = [f"192.0.2.{number}" for number in range(90)]
    ranges = [f"203.0.{number}.0/24" for number in range(8)]
    most = {"ports": ports, "externalIPs": addresses, "loadBalancerSourceRanges": ranges}
    assert len(decode(Kind.SERVICE, spec(**most)).ports) == 1000  # type: ignore[union-attr]
    line = rejection(Kind.SERVICE, spec(**{**most, "externalIPs": [*addresses, "192.0.2.90"]}))
    assert line.endswith("1000 ports for 92 addresses and 8 source ranges are more than 100000 rules")


@pytest.mark.parametrize("kind", Kind)
def test_valid_object_is_decoded(kind: Kind) -> None:
    """The object that the other tests corrupt is valid."""
    assert decode(kind, json.dumps(WHOLE[kind]).encode()).key.name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ports": [{"port": "80"}]}, "spec.ports[0].port: expected `int`, got `str`"),
        ({"ports": [{"port": 0}]}, "spec.ports[0].port is 0, not a port from 1 to 65535"),
        (
            {"ports": [{"port": 80, "protocol": "QUIC"}]},
            "spec.ports[0].protocol is 'QUIC', not TCP, UDP or SCTP",
        ),
        ({"ports": [{"port": 80, "name": 'a"b'}]}, "spec.ports[0].name is 'a\"b', not a DNS label"),
        ({"clusterIPs": ["10.0.0.256"]}, "spec.clusterIPs[0] is '10.0.0.256', not an IP address"),
        ({"externalIPs": ["1.2.3.4\n"]}, "spec.externalIPs[0] is '1.2.3.4\\n', not an IP address"),
        ({"externalIPs": ["fe80::1%eth0"]}, "spec.externalIPs[0] is 'fe80::1%eth0', with a zone"),
        (
            {"loadBalancerSourceRanges": ["10.0.0.0"]},
            "spec.loadBalancerSourceRanges[0] is '10.0.0.0', not a network",
        ),
        (
            {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}},
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds is 0, not 1 to 86400",
        ),
    ],
)
def test_rejection_names_object_field_and_value(fields: dict[str, object], reason: str) -> None:
    """The line has all that is needed to correct the object."""
    line = rejection(Kind.SERVICE, spec(**fields))
    assert line.startswith("Service ns/web is skipped: ")
    assert reason in line


@pytest.mark.parametrize(
    "range_", ["fe80::%a\n-A KUBE-SERVICES -j DROP\n/64", 'fe80::%" -j ACCEPT/64', "fe80::%eth0/64"]
)
def test_zone_cannot_inject_text_into_a_network(range_: str) -> None:
    """Python's ipaddress keeps any text after "%"; it must not reach a rule."""
    assert "not a network" in rejection(Kind.SERVICE, spec(loadBalancerSourceRanges=[range_]))


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\n" * 1_000_000])
@pytest.mark.parametrize("field", ["name", "namespace"])
def test_huge_value_is_shortened(field: str, text: str) -> None:
    """A huge value does not flood the log."""
    raw = json.dumps({**WHOLE[Kind.SERVICE], "metadata": {"name": "a", field: text}}).encode()
    assert "not a DNS label" in rejection(Kind.SERVICE, raw)


def test_deep_nesting_is_rejected() -> None:
    """A hundred thousand levels in an unknown field."""
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "nested too deeply" in rejection(Kind.SERVICE, b'{"metadata":{"name":"a"},"spec":{"x":%s}}' % deep)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"name":"a\xff"},"spec":{}}',
        b'{"metadata":{"name":"a\\ud800"},"spec":{}}',
        b'{"metadata":{"name":"a\\u0000"},"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{}} {}',
        b'{"metadata":{"name":"a"},"spec":null}',
        b'{"metadata":null,"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{"ports":[null]}}',
        b"\xef\xbb\xbf{}",
        b"null",
        b"",
    ],
)
def test_broken_json_and_text(raw: bytes) -> None:
    """Invalid UTF-8, lone surrogates, NUL, and null instead of an object are rejected."""
    rejection(Kind.SERVICE, raw)


def test_last_duplicate_key_wins() -> None:
    """As in Go."""
    decoded = decode(Kind.SERVICE, b'{"metadata":{"name":"a","name":"b"},"spec":{}}')
    assert decoded.key.name == "b"


def test_null_means_missing() -> None:
    """For every optional field."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    for field in whole["spec"]:
        decode(Kind.SERVICE, spec(**{field: None}))
    whole["status"] = None
    whole["metadata"].update(labels=None, annotations=None, namespace=None)
    assert decode(Kind.SERVICE, json.dumps(whole).encode()).key.namespace == "default"
