"""`pykubeproxy check` with an API server: connection, Node and permissions."""

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
from pykubeproxy.inspect.preflight.report import Finding
from pykubeproxy.sources import Client
from pykubeproxy.sources.access import access
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import node, server
from tests.fakes.process import inside_a_namespace, run_check

Grants = Callable[[dict[str, str]], bool]


def everything(_: dict[str, str]) -> bool:
    return True


@contextmanager
def api(granted: Grants = everything, nodes: int = 200) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve a node n1 and access reviews; yield the URL and the reviewed permissions."""
    reviews: list[dict[str, str]] = []

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
            reviews.append(about)
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
        yield f"http://127.0.0.1:{running.server_port}", reviews
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def asked_of(url: str, name: str = "n1") -> dict[str, Finding]:
    found = cluster.cluster(access(Client(master=url, qps=-1), name), name)
    return {finding.check: finding for finding in found}


def levels(found: dict[str, Finding]) -> tuple[str, ...]:
    return tuple(found[name].level.value for name in ("api-server", "node", "permissions"))


def test_all_permissions_are_reviewed() -> None:
    """One review per permission, with its group."""
    with api() as (url, reviews):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "ok")
    assert found["api-server"].message == f"{url} answers"
    assert {(it["verb"], it["resource"], it["group"]) for it in reviews} == {
        *((verb, "services", "") for verb in ("list", "watch")),
        *((verb, "endpointslices", "discovery.k8s.io") for verb in ("list", "watch")),
        *((verb, "nodes", "") for verb in ("list", "watch")),
        ("create", "events", "events.k8s.io"),
    }


def test_an_unknown_node_fails() -> None:
    with api() as (url, _):
        found = asked_of(url, "n2")
    assert levels(found) == ("ok", "fail", "ok")
    assert "--hostname-override" in found["node"].advice


def test_a_missing_permission_is_named() -> None:
    """Only for events it is a warning."""
    with api(lambda about: about["resource"] != "endpointslices") as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "fail")
    assert found["permissions"].message == "not granted: list endpointslices and watch endpointslices"
    with api(lambda about: about["resource"] != "events") as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "ok", "warn")


def test_forbidden_nodes_do_not_fail_the_connection() -> None:
    with api(lambda about: about["resource"] != "nodes", nodes=403) as (url, _):
        found = asked_of(url)
    assert levels(found) == ("ok", "skip", "fail")


def test_without_access_reviews_permissions_are_unknown() -> None:
    with server() as running:
        running.store.create(node("n1", "10.0.0.1"), verbatim=True)
        found = asked_of(running.url)
    assert levels(found) == ("ok", "ok", "skip")


@pytest.mark.parametrize(
    "review", ["{}", '{"status": {"allowed": 1}}', '{"x":' + "[" * 5000 + "]" * 5000 + "}"]
)
def test_invalid_reviews_are_one_line(review: str) -> None:

    def answer(target: str, connection: socket.socket) -> None:
        listed = {"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": [node("n1", "10.0.0.1")]}
        body = json.dumps(listed) if "nodes" in target else review
        connection.sendall(whole(body.encode()))

    with CannedServer(answer) as odd:
        found = asked_of(odd.url)
    assert levels(found) == ("ok", "ok", "skip")
    assert "invalid access review" in found["permissions"].message


def test_a_missing_server_fails_once() -> None:
    """The dependent checks are skipped."""
    found = asked_of("http://127.0.0.1:1")
    assert levels(found) == ("fail", "skip", "skip")
    assert "http://127.0.0.1:1/livez" in found["api-server"].advice


@pytest.mark.root
def test_the_command_with_a_kubeconfig() -> None:
    """The Node selects families; an invalid kubeconfig is a finding."""
    with inside_a_namespace(), server() as running:
        for setting in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            subprocess.run(["sysctl", "-qw", f"net.{setting}=0"], check=True)
        it = node("n1", "10.0.0.1")
        it["status"]["addresses"].append({"type": "InternalIP", "address": "fd00::1"})
        running.store.create(it, verbatim=True)
        document = run_check(1, "--master", running.url, "--hostname-override", "N1")
        assert document["node"] == "n1"
        forwarding = [it for it in document["checks"] if it["check"] == "forwarding"]
        assert [(it["family"], it["level"]) for it in forwarding] == [("IPv4", "fail"), ("IPv6", "fail")]
        checks = run_check(1, "--kubeconfig", "/nowhere")["checks"]
    (found,) = [it for it in checks if it["check"] == "api-server"]
    assert (found["level"], "/nowhere" in found["message"]) == ("fail", True)
