"""Canonical forms of addresses, networks and times."""

import json
import sys
from ipaddress import IPv6Address, ip_network
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.objects import EndpointSlice, Family, Kind, check, decode


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("010.000.08.1", "10.0.8.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("0:0:0:0:0:0:0:5", "::5"),
        ("0:0::5", "::5"),
        ("00fd::01", "fd::1"),
        ("64:ff9b::01.2.3.4", "64:ff9b::102:304"),
        ("2001:db8::", "2001:db8::"),
    ],
)
def test_addresses(text: str, canonical: str) -> None:
    """Leading zeros are dropped and never octal; an IPv4-mapped address is the IPv4 one."""
    assert check.address(text, "it") == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.3.256",
        "1.2.3.4 ",
        "1.2.3.4/32",
        "0x1.2.3.4",
        "::1%lo",
        "a",
        "1..2.3",
        "::g",
    ],
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="it is "):
        check.address(text, "it")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
        ("10.1.2.3/32", "10.1.2.3/32"),
        ("10.1.2.3/0", "0.0.0.0/0"),
        ("010.1.0.0/016", "10.1.0.0/16"),
        ("2001:DB8::1/32", "2001:db8::/32"),
        ("0:0:0:0::/0", "::/0"),
    ],
)
def test_networks(text: str, canonical: str) -> None:
    """Host bits are cleared. A network of IPv4-mapped addresses is one of IPv4, as in Go."""
    assert check.cidr(text, "it") == canonical


@pytest.mark.parametrize(
    "text", ["10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "10.0.0.0/-1", "/8"]
)
def test_invalid_networks(text: str) -> None:
    """Invalid networks are rejected, including netmasks."""
    with pytest.raises(ValueError, match="not a network"):
        check.cidr(text, "it")


@given(st.lists(st.sampled_from(["", "0", "00", "1", "ab", "ffff"]), max_size=10).map(":".join))
def test_ipv6_addresses_match_ipaddress(text: str) -> None:
    """Zeros in any place make the canonical form that Python's ipaddress module writes, or no address."""
    try:
        address = IPv6Address(text)
    except ValueError:
        with pytest.raises(check.Invalid):
            check.address(text, "it")
    else:
        assert check.address(text, "it") == str(address.ipv4_mapped or address)


_GROUPS = st.lists(st.sampled_from(["", "0", "01", "ffff", "1.2.0.3", "1.2.3.4%e"]), max_size=9).map(":".join)
_QUADS = st.lists(st.sampled_from(["0", "1", "255", "256"]), min_size=3, max_size=5).map(".".join)
_LENGTHS = st.sampled_from(
    ["0", "7", "032", "33", "96", "128", "129", "-1", "+1", "1_0", "\u0661", "1000", ""]
)


@given(st.one_of(_GROUPS, _QUADS), _LENGTHS)
def test_networks_match_ipaddress(host: str, length: str) -> None:
    """The canonical form is that of Python's ipaddress module, with IPv4-mapped networks as IPv4."""
    try:
        assert length.isdigit() and length.isascii() and "%" not in host
        found = ip_network(f"{host}/{length}", strict=False)
    except (AssertionError, ValueError):
        with pytest.raises(check.Invalid):
            check.cidr(f"{host}/{length}", "it")
    else:
        mapped = getattr(found.network_address, "ipv4_mapped", None) if found.prefixlen >= 96 else None
        network = f"{mapped}/{found.prefixlen - 96}" if mapped else str(found)
        assert check.cidr(f"{host}/{length}", "it") == network


@pytest.mark.parametrize("text", ["::/0", "2001:db8::5/128", "10.1.2.3/24", "010.1.2.3", "::ffff:10.1.2.3"])
def test_an_address_or_network_takes_few_calls(text: str) -> None:
    """A Service may have a hundred thousand of them, and change often."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    read = check.cidr if "/" in text else check.servable
    read(text, "it")
    sys.setprofile(count)
    try:
        read(text, "it")
    finally:
        sys.setprofile(None)
    assert calls <= 20


def slice_json(**fields: object) -> bytes:
    return json.dumps({"metadata": {"name": "s"}, "addressType": "IPv4", **fields}).encode()


@pytest.mark.parametrize(
    ("family", "address"), [("IPv4", "fd00::1"), ("IPv6", "10.0.0.1"), ("IPv6", "::ffff:10.0.0.1")]
)
def test_address_of_other_family_is_rejected(family: str, address: str) -> None:
    """Only its endpoint is."""
    slice_ = decode(Kind.ENDPOINT_SLICE, slice_json(addressType=family, endpoints=[{"addresses": [address]}]))
    assert isinstance(slice_, EndpointSlice)
    assert slice_.endpoints == ()
    assert [rejected.reason for rejected in slice_.rejected] == [f"not an {family} address"]


def test_only_first_address_is_read() -> None:
    """Further addresses are ignored, even invalid ones."""
    slice_ = decode(
        Kind.ENDPOINT_SLICE, slice_json(endpoints=[{"addresses": ["10.0.0.1", "junk"]}, {"addresses": []}])
    )
    assert isinstance(slice_, EndpointSlice)
    assert [it.address for it in slice_.endpoints] == ["10.0.0.1", ""]
    assert slice_.family is Family.IPV4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T00:00:00Z", 1767225600.0),
        ("2026-01-01T09:00:00+09:00", 1767225600.0),
        ("2026-01-01T00:00:00.5Z", 1767225600.5),
        # RFC 3339 requires an offset; the local time zone must not matter.
        ("2026-01-01T00:00:00", None),
        ("2026-01-01", None),
        ("0001-01-01T00:00:00", None),
        ("yesterday", None),
        ("", None),
    ],
)
def test_trigger_times(text: str, seconds: float | None) -> None:
    """A malformed time is ignored, as it only feeds a metric."""
    annotations = {"endpoints.kubernetes.io/last-change-trigger-time": text}
    slice_ = decode(Kind.ENDPOINT_SLICE, slice_json(metadata={"name": "s", "annotations": annotations}))
    assert isinstance(slice_, EndpointSlice)
    assert slice_.trigger_time == seconds
