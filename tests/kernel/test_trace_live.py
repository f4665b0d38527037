"""`pykubeproxy trace` over live tables, with the namespace's addresses, routes and policies."""

import json
import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

from pykubeproxy.cli.trace import trace
from pykubeproxy.kernel import Iptables
from pykubeproxy.kernel.network import routes
from pykubeproxy.objects import Family

OWN = {Family.IPV4: "192.0.2.10", Family.IPV6: "2001:db8:2::10"}
OUTSIDE = {Family.IPV4: "203.0.113.9", Family.IPV6: "2001:db8:9::9"}
POD = {Family.IPV4: "10.244.1.11", Family.IPV6: "fd00:10:244:1::11"}
VIRTUAL = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:10:96::a"}


@pytest.fixture
def interfaces(inside: str, family: Family) -> Family:
    """Two interfaces: eth0 with the default route, pod0 with a route to a pod."""
    length = 64 if family is Family.IPV6 else 24
    gateway = OWN[family].rpartition("10")[0] + "1"
    version = ("-6",) if family is Family.IPV6 else ()
    nodad = ("nodad",) if family is Family.IPV6 else ()
    for command in (
        ("link", "set", "lo", "up"),
        ("link", "add", "eth0", "type", "veth", "peer", "name", "far0"),
        ("link", "add", "pod0", "type", "veth", "peer", "name", "far1"),
        *(("link", "set", name, "up") for name in ("eth0", "far0", "pod0", "far1")),
        ("addr", "add", f"{OWN[family]}/{length}", "dev", "eth0", *nodad),
        (*version, "route", "add", "default", "via", gateway),
        (*version, "route", "add", POD[family], "dev", "pod0"),
        (*version, "route", "add", "blackhole", VIRTUAL[family]),
    ):
        subprocess.run(("ip", *command), check=True)
    return family


def traced(source: str, destination: str, port: int, backend: str, *options: str) -> dict[str, Any]:
    target = f"[{destination}]:{port}" if ":" in destination else f"{destination}:{port}"
    arguments = [source, target, "-o", "json", "--iptables-backend", backend, *options]
    result = CliRunner().invoke(trace, arguments)
    assert result.exit_code == 0, result.output
    (way,) = json.loads(result.stdout)["ways"]
    assert isinstance(way, dict)
    return way


@pytest.mark.root
def test_trace_uses_live_rules_policies_and_routes(interfaces: Family, iptables: Iptables) -> None:
    pod = f"[{POD[interfaces]}]" if interfaces is Family.IPV6 else POD[interfaces]
    iptables.restore(
        f"*nat\n-A PREROUTING -i eth0 -d {VIRTUAL[interfaces]} -p tcp -m tcp --dport 80 -j DNAT --to-destination {pod}:8080\n"
        f"-A OUTPUT -p tcp -m tcp --dport 80 -j DNAT --to-destination {pod}:9090\nCOMMIT\n"
        "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -o pod+ -j ACCEPT\nCOMMIT\n"
    )
    backend = iptables.backend.value
    coming = traced(OUTSIDE[interfaces], VIRTUAL[interfaces], 80, backend)
    assert coming["visits"][0]["interface"] == "eth0"
    (end,) = coming["ends"]
    assert (end["address"], end["port"], end["masqueradedOn"]) == (POD[interfaces], 8080, None)
    for source, options in ((POD, ()), (OUTSIDE, ("--in-interface", "pod0"))):
        (end,) = traced(source[interfaces], VIRTUAL[interfaces], 80, backend, *options)["ends"]
        assert end["result"] == "dropped"
    leaving = traced(OWN[interfaces], VIRTUAL[interfaces], 80, backend)
    assert leaving["visits"][0]["role"] == "where the packet starts"
    assert leaving["ends"][0]["port"] == 9090


@pytest.mark.root
def test_routes_have_prefix_and_interface(interfaces: Family) -> None:
    """Of the main table; unreachable routes have no interface."""
    whole = 128 if interfaces is Family.IPV6 else 32
    everything = "::/0" if interfaces is Family.IPV6 else "0.0.0.0/0"
    found = {route.network: route.interface for route in routes(interfaces)}
    assert (found[everything], found[f"{POD[interfaces]}/{whole}"]) == ("eth0", "pod0")
    assert found[f"{VIRTUAL[interfaces]}/{whole}"] in ("", "lo")
