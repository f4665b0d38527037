"""`pykubeproxy check` and an API server: whether it answers, knows the node, and grants what is needed."""

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pykubeproxy.inspect.preflight import cluster
from pykubeproxy.inspect.preflight.model import Finding
from pykubeproxy.sources import Client
from pykubeproxy.sources.access import access
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import node, server
from tests.fakes.process import checked, inside_a_namespace

Grants = Callable[[dict[str, str]], bool]


def everything(_: dict[str, str]) -> bool:
    return True


@contextmanager
def api(granted: Grants = everything, nodes: int = 200) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server with a node n1 that answers reviews, and what they were about."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            items = (
                [node("n1", "10.0.0.1")]
                if self.path.endswith("metadata.name%3Dn1&limit=500&resourceVersion=0")
                else []
            )
            self.answer(nodes, {"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": items})

        def do_POST(self) -> None:
            assert self.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert review["kind"] == "SelfSubjectAccessReview"
            about = review["spec"]["resourceAttributes"]
            asked.append(about)
            self.answer(201, {**review, "status": {"allowed": granted(about)}})

        def answer(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None: ...

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", asked
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def asked_of(url: str, name: str = "n1") -> dict[str, Finding]:
    found = cluster.cluster(access(Client(master=url, qps=-1), name), name)
    return {finding.check: finding for finding in found}


def levels(found: dict[str, Finding]) -> tuple[str, ...]:
    return tuple(found[name].level.value for name in ("api-server", "node", "permissions"))


def test_all_is_well() -> None:
    """Each right is asked for by itself, with its group."""
    with api() as (url, asked):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "ok")
    assert found["api-server"].message == f"{url} answers"
    assert {(it["verb"], it["resource"], it["group"]) for it in asked} == {
        *((verb, "services", "") for verb in ("list", "watch")),
        *((verb, "endpointslices", "discovery.k8s.io") for verb in ("list", "watch")),
        *((verb, "nodes", "") for verb in ("list", "watch")),
        ("create", "events", "events.k8s.io"),
    }


def test_another_name() -> None:
    """A node that the cluster does not have fails."""
    with api() as (url, _):
        found = asked_of(url, "n2")
    assert levels(found) == ("ok", "fail", "ok")
    assert "--hostname-override" in found["node"].advice


def test_a_right_is_missing() -> None:
    """What is not granted is named; events alone are a warning."""
    with api(lambda about: about["resource"] != "endpointslices") as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "fail")
    assert found["permissions"].message == "not granted: list endpointslices and watch endpointslices"
    with api(lambda about: about["resource"] != "events") as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "warn")


def test_nodes_are_forbidden() -> None:
    """A server that does not let us look for the node answers all the same."""
    with api(lambda about: about["resource"] != "nodes", nodes=403) as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "skip", "fail")


def test_no_reviews() -> None:
    """A server that knows no access reviews leaves the rights unknown, not denied."""
    with server() as running:
        running.store.create(node("n1", "10.0.0.1"), verbatim=True)
        found = asked_of(running.url)
    assert levels(found) == ("ok", "ok", "skip")


@pytest.mark.parametrize(
    "review", ["{}", '{"status": {"allowed": 1}}', '{"x":' + "[" * 5000 + "]" * 5000 + "}"]
)
def test_reviews_that_cannot_be_read(review: str) -> None:
    """Whatever form they have, it is told in a line."""

    def answer(target: str, connection: socket.socket) -> None:
        listed = {"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": [node("n1", "10.0.0.1")]}
        body = json.dumps(listed) if "nodes" in target else review
        connection.sendall(whole(body.encode()))

    with CannedServer(answer) as odd:
        found = asked_of(odd.url)
    assert levels(found) == ("ok", "ok", "skip")
    assert "invalid access review" in found["permissions"].message


def test_nobody_answers() -> None:
    """Without a server that fails once, and the rest is left out."""
    found = asked_of("http://127.0.0.1:1")
    assert levels(found) == ("fail", "skip", "skip")
    assert "http://127.0.0.1:1/livez" in found["api-server"].advice


@pytest.mark.root
def test_the_whole_command() -> None:
    """The Node tells which families are in use; a kubeconfig that is no good is a finding, not an end."""
    with inside_a_namespace(), server() as running:
        for setting in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            subprocess.run(["sysctl", "-qw", f"net.{setting}=0"], check=True)
        it = node("n1", "10.0.0.1")
        it["status"]["addresses"].append({"type": "InternalIP", "address": "fd00::1"})
        running.store.create(it, verbatim=True)
        document = checked(1, "--master", running.url, "--hostname-override", "N1")
        assert document["node"] == "n1"
        forwarding = [it for it in document["checks"] if it["check"] == "forwarding"]
        assert [(it["family"], it["level"]) for it in forwarding] == [("IPv4", "fail"), ("IPv6", "fail")]
        checks = checked(1, "--kubeconfig", "/nowhere")["checks"]
    (found,) = [it for it in checks if it["check"] == "api-server"]
    assert (found["level"], "/nowhere" in found["message"]) == ("fail", True)
