"""A long connection whose endpoint has gone, in a lab: the commands name it."""

import json
import os
import socket
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl
from tests.fakes.waiting import PATIENCE

pytestmark = [pytest.mark.root, needs_kubectl]
NODE1 = ("-n", "kube-system", "pykubeproxy-node1")
TRACE = ("pykubeproxy", "trace", "pod/default/client", "svc/default/web", "--conntrack")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(f"ts{os.getpid()}") as made, made.outside.namespace.entered():
        made.start_pod("client", "client", "node1", ["sleep", "600"])
        made.deploy("web", 2)
        made.service("web")
        ready = ("pykubeproxy", "trace", "pod/default/client", "svc/default/web")
        made.until(lambda: "one of 2 endpoints" in kubectl(made, *ready).stdout, "rules for web")
        yield made


def remove_endpoint(lab: Lab, address: str) -> None:
    """Let the EndpointSlice name an endpoint no longer, while its pod goes on."""
    slice_ = json.loads(kubectl(lab, "get", "endpointslice", "web-ipv4", "-o", "json").stdout)
    slice_["endpoints"] = [one for one in slice_["endpoints"] if one["addresses"] != [address]]
    done = kubectl(lab, "replace", "-f", "-", given=json.dumps(slice_))
    assert done.returncode == 0, done.stderr


def test_a_connection_that_stays_on_a_removed_endpoint_is_named(lab: Lab) -> None:
    """Trace follows it to the endpoint while that serves; then trace and explain call it stale."""
    address = json.loads(kubectl(lab, "get", "service", "web", "-o", "json").stdout)["spec"]["clusterIP"]
    with lab.pods["client"].namespace.entered():
        held = [socket.create_connection((address, 80), timeout=PATIENCE) for _ in range(8)]

    def tracked() -> list[dict[str, object]]:
        done = kubectl(lab, *TRACE, "-o", "json")
        assert done.returncode == 0, done.stderr
        return [
            flow | {"node": node["node"]}
            for node in json.loads(done.stdout)["tracked"]
            for flow in node["flows"]
        ]

    before = tracked()
    here = {(flow["source"], flow["endpoint"]) for flow in before if flow["node"] == "node1"}
    remote = lab.pods["web-2"].addresses[0]
    assert len(here) == 8
    assert {(flow["source"], flow["endpoint"]) for flow in before if flow["node"] == "node2"} == {
        flow for flow in here if str(flow[1]).startswith(f"{remote}:")
    }
    assert {flow["problem"] for flow in before} == {None}
    _, endpoint = next(iter(here))
    remove_endpoint(lab, str(endpoint).rpartition(":")[0])
    lab.until(
        lambda: {flow["endpoint"] for flow in tracked() if flow["problem"] == "stale"} == {endpoint},
        "it is stale",
    )
    explained = kubectl(lab, "exec", *NODE1, "--", "pykubeproxy", "explain", "default/web").stdout
    assert f"on {endpoint}, which no longer serves" in " ".join(explained.split())
    for connection in held:
        connection.close()
