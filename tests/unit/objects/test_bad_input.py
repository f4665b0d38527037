"""Objects that do not fit: one clear line each, and nothing but that."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.objects import Kind, Undecodable, decode
from tests.junk import WHOLE, spoilt


def refused(kind: Kind, raw: bytes) -> str:
    """The line that says why an object is passed over."""
    with pytest.raises(Undecodable) as caught:
        decode(kind, raw)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 700
    return line


def spec(**fields: object) -> bytes:
    """A Service with these fields in its spec."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    whole["spec"].update(fields)
    return json.dumps(whole).encode()


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(Kind).flatmap(lambda kind: st.tuples(st.just(kind), spoilt(kind))))
def test_a_spoilt_object_is_decoded_or_refused(case: tuple[Kind, bytes]) -> None:
    """Nothing but Undecodable comes out, with a single line, and what is decoded holds no control characters."""
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
def test_noise_is_refused(kind: Kind, raw: bytes) -> None:
    """Bytes of any kind."""
    with pytest.raises(Undecodable):
        decode(kind, raw)


def test_a_service_that_asks_for_millions_of_rules() -> None:
    """Its ports, addresses and source ranges are within what the API server takes, and no node could hold the rules."""
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 1001)]
    addresses = [f"192.0.2.{number}" for number in range(90)]
    ranges = [f"203.0.{number}.0/24" for number in range(8)]
    most = {"ports": ports, "externalIPs": addresses, "loadBalancerSourceRanges": ranges}
    assert len(decode(Kind.SERVICE, spec(**most)).ports) == 1000  # type: ignore[union-attr]
    line = refused(Kind.SERVICE, spec(**{**most, "externalIPs": [*addresses, "192.0.2.90"]}))
    assert line.endswith("1000 ports for 92 addresses and 8 source ranges are more than 100000 rules")


@pytest.mark.parametrize("kind", Kind)
def test_the_whole_object_is_fine(kind: Kind) -> None:
    """What the others spoil is decoded as it stands."""
    assert decode(kind, json.dumps(WHOLE[kind]).encode()).key.name


@pytest.mark.parametrize(
    ("fields", "said"),
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
def test_the_line_names_object_field_and_value(fields: dict[str, object], said: str) -> None:
    """So that it can be put right."""
    line = refused(Kind.SERVICE, spec(**fields))
    assert line.startswith("Service ns/web is passed over: ")
    assert said in line


@pytest.mark.parametrize(
    "range_", ["fe80::%a\n-A KUBE-SERVICES -j DROP\n/64", 'fe80::%" -j ACCEPT/64', "fe80::%eth0/64"]
)
def test_a_zone_does_not_carry_text_into_a_network(range_: str) -> None:
    """Python's ipaddress would keep any text after "%": it must not reach a rule."""
    assert "not a network" in refused(Kind.SERVICE, spec(loadBalancerSourceRanges=[range_]))


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\n" * 1_000_000])
@pytest.mark.parametrize("field", ["name", "namespace"])
def test_a_huge_value_makes_a_short_line(field: str, text: str) -> None:
    """Megabytes of junk do not end up in the log."""
    raw = json.dumps({**WHOLE[Kind.SERVICE], "metadata": {"name": "a", field: text}}).encode()
    assert "not a DNS label" in refused(Kind.SERVICE, raw)


def test_deep_nesting_is_refused() -> None:
    """A hundred thousand levels, in a field that nobody reads."""
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "nested too deeply" in refused(Kind.SERVICE, b'{"metadata":{"name":"a"},"spec":{"x":%s}}' % deep)


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
    """Bad UTF-8, lone surrogates, NUL, null where an object is due."""
    refused(Kind.SERVICE, raw)


def test_the_last_of_two_equal_keys_counts() -> None:
    """As in Go."""
    decoded = decode(Kind.SERVICE, b'{"metadata":{"name":"a","name":"b"},"spec":{}}')
    assert decoded.key.name == "b"


def test_null_is_as_good_as_nothing() -> None:
    """Wherever the API may leave a field out."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    for field in whole["spec"]:
        decode(Kind.SERVICE, spec(**{field: None}))
    whole["status"] = None
    whole["metadata"].update(labels=None, annotations=None, namespace=None)
    assert decode(Kind.SERVICE, json.dumps(whole).encode()).key.namespace == "default"
