"""`pykubeproxy check` with an API server: connection, Node and permissions."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.http import JSON, Handler, Request, Response
from pykubeproxy.inspect.check import this_node as checks
from pykubeproxy.inspect.check.report import Finding
from pykubeproxy.lab.apiserver import ApiError, ApiServer
from pykubeproxy.sources import Client
from pykubeproxy.sources.queries import server_access
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import certificate, node, server, unverified, write_certificate
from tests.fakes.process import COMMAND, inside_a_namespace, run_check
from tests.fakes.waiting import PATIENCE

Grants = Callable[[dict[str, str]], bool]


def everything(_: dict[str, str]) -> bool:
    return True


def nothing(_: dict[str, str]) -> bool:
    """Reviews are refused themselves."""
    return False


@contextmanager
def api(
    granted: Grants = everything, refused: int = 0, tls: tuple[Path, Path] | None = None
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve a node n1 and access reviews; yield the URL and the reviewed permissions.

    With `refused`, that is the status of lists, and of reviews if they are not `granted`.
    """
    reviews: list[dict[str, str]] = []

    def middleware(handler: Handler) -> Handler:
        def handle(request: Request) -> Response:
            if request.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
                review = json.loads(request.body)
                assert review["kind"] == "SelfSubjectAccessReview"
                about = review["spec"]["resourceAttributes"]
                reviews.append(about)
                if granted is not nothing:
                    answer = {**review, "status": {"allowed": granted(about)}}
                    return Response(json.dumps(answer).encode(), JSON, 201)
            return ApiError(refused, "").response() if refused else handler(request)

        return handle

    with ApiServer(middleware=middleware, tls=tls) as running:
        running.store.create(node("n1", "10.0.0.1"), verbatim=True)
        yield running.url, reviews


def asked_of(url: str, name: str = "n1", as_agent: bool = True) -> dict[str, Finding]:
    return asked_by(Client(master=url, qps=-1), name, as_agent)


def asked_by(client: Client, name: str = "n1", as_agent: bool = True) -> dict[str, Finding]:
    found = checks.api_server(server_access(client, name), name, as_agent)
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


def test_an_unverified_server_is_a_warning(tmp_path: Path) -> None:
    with server(tls=certificate(tmp_path)) as running:
        running.store.create(node("n1", "10.0.0.1"), verbatim=True)
        found = asked_by(Client(unverified(running, tmp_path / "kubeconfig")))
    assert levels(found) == ("warn", "ok", "skip")
    assert found["api-server"].message == f"{running.url} answers, but its certificate is not verified"
    assert "insecure-skip-tls-verify" in found["api-server"].advice


@pytest.mark.parametrize(
    ("granted", "refused", "name", "expected"),
    [
        (everything, 0, "n2", ("ok", "fail", "ok")),
        (lambda about: about["resource"] != "endpointslices", 0, "n1", ("ok", "ok", "fail")),
        (lambda about: about["resource"] != "events", 0, "n1", ("ok", "ok", "warn")),
        # That nodes are forbidden, or that nothing may be asked, does not mean that the server is away.
        (lambda about: about["resource"] != "nodes", 403, "n1", ("ok", "skip", "fail")),
        (nothing, 403, "n1", ("ok", "skip", "skip")),
        (nothing, 401, "n1", ("fail", "skip", "skip")),
    ],
)
def test_what_fails(granted: Grants, refused: int, name: str, expected: tuple[str, ...]) -> None:
    with api(granted, refused) as (url, _):
        found = asked_of(url, name)
    assert levels(found) == expected
    if expected[1] == "fail":
        assert "--hostname-override" in found["node"].advice
    if expected == ("ok", "ok", "fail"):
        missing = "not granted: list endpointslices and watch endpointslices"
        assert found["permissions"].message == missing


def test_another_account_tells_nothing_about_the_agent() -> None:
    """Its permissions, its address of the server and its host name are not the agent's: these checks are skipped."""
    with api(lambda _: False, 403) as (url, _):
        found = asked_of(url, as_agent=False)
    assert levels(found) == ("ok", "skip", "skip")
    message = found["permissions"].message
    assert message.startswith(
        "this pod's account, which is not the agent's, lacks list services, watch services"
    )
    assert found["permissions"].advice == "Once the agent runs, run `pykubeproxy check` in its pod."
    with api() as (url, _):
        assert levels(asked_of(url, "node-debugger-x", as_agent=False)) == ("ok", "skip", "skip")
        assert levels(asked_of(url, as_agent=False)) == ("ok", "ok", "skip")
    assert levels(asked_of("http://127.0.0.1:1", as_agent=False)) == ("skip", "skip", "skip")


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


# A pod: a service account if there is a token, and a process that looks like the agent if $AGENT is set.
_POD = """
mount -t tmpfs tmpfs /run; mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$FILES"/token "$FILES"/ca.crt /run/secrets/kubernetes.io/serviceaccount/ 2>/dev/null || true
if [ -n "$AGENT" ]; then
    bash -c 'exec -a pykubeproxy tail --pid "$1" -f /dev/null run >/dev/null 2>&1' bash $$ & agent=$!
    until grep -qz ^pykubeproxy /proc/$agent/cmdline; do sleep 0.01; done
fi
code=0; "$@" || code=$?
[ -z "$AGENT" ] || kill $agent
exit $code
"""


def check_in_a_pod(
    url: str, files: Path, code: int, agent: bool = False, service: str = ""
) -> dict[str, Any]:
    """Return the JSON of a bare `check` in a pod whose environment names this API server, and the Service `kubernetes`."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    environment = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_PORT": service,
        "FILES": str(files),
        "AGENT": "yes" if agent else "",
    }
    entering = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", _POD, "pod")
    outcome = subprocess.run(
        [*entering, *COMMAND, "check", "-o", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=PATIENCE,
    )
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    (found,) = json.loads(outcome.stdout)["nodes"]
    return dict(found)


@pytest.mark.root
def test_a_debug_pod_may_list_nothing_and_the_check_passes(tmp_path: Path) -> None:
    """All else is checked. In the agent's pod, the same permissions fail."""
    files = tmp_path / "ca.crt", tmp_path / "key"
    write_certificate(*files)
    with inside_a_namespace(), api(lambda _: False, 403, files) as (url, _):
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        without_account = check_in_a_pod(url, tmp_path, 0)
        (tmp_path / "token").write_text("of-the-pod")
        in_debug_pod = check_in_a_pod(url, tmp_path, 0)
        beside_agent = check_in_a_pod(url, tmp_path, 1, agent=True, service="tcp://10.96.0.1:443")
        by_service = check_in_a_pod(url, tmp_path, 1, agent=True, service="tcp://127.0.0.1:443")
    assert api_levels(without_account) == ["skip", "skip", "skip"]
    assert api_levels(in_debug_pod) == ["ok", "skip", "skip"]
    assert (in_debug_pod["passed"], in_debug_pod["complete"]) == (True, False)
    assert "ClusterRole" not in json.dumps(in_debug_pod)
    assert in_debug_pod["configuration"].startswith("default settings; cannot reach an agent at ")
    assert api_levels(beside_agent) == ["ok", "skip", "fail"]
    assert api_levels(by_service) == ["warn", "skip", "fail"]
    assert "but is the address of the Service kubernetes" in json.dumps(by_service)


def api_levels(document: dict[str, Any]) -> list[str]:
    names = ("api-server", "node", "permissions")
    return [it["level"] for name in names for it in document["checks"] if it["check"] == name]
