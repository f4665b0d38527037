"""Debug pods: what they may do, and that none stays."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack

import kubernetes_validate
import pytest

from pykubeproxy.nodes.debug_pods import DebugPods, manifest
from pykubeproxy.sources import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.pods import create_pod
from tests.fakes.faulty_apiserver import Order
from tests.fakes.remote_nodes import RemoteNodes

Warn = Callable[[str], None]


@pytest.mark.parametrize("version", ["1.27", kubernetes_validate.latest_version()])
def test_manifest_is_valid(version: str) -> None:
    kubernetes_validate.validate(manifest("debug-1", "n1", "image:1"), version, strict=True)


def test_pod_ends_by_itself_and_has_no_token() -> None:
    spec = manifest("debug-1", "n1", "image:1")["spec"]
    assert isinstance(spec, dict)
    assert 0 < spec["activeDeadlineSeconds"] <= 600
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}
    assert "privileged" not in container["securityContext"]


def test_pod_is_removed_after_an_error(cluster: RemoteNodes, client: Client) -> None:
    cluster.node("n1")
    with DebugPods(client, "image:1", warn=pytest.fail) as pods:
        with pytest.raises(ValueError, match="of the caller"), pods.on("n1") as container:
            assert cluster.debug_pods() == [container.pod]
            raise ValueError("of the caller")
        assert cluster.debug_pods() == []


def test_pods_in_use_are_removed_at_the_end(cluster: RemoteNodes, client: Client) -> None:
    """As on Ctrl-C: threads that read nodes are abandoned."""
    cluster.node("n1")
    opened = None
    with pytest.raises(KeyboardInterrupt), DebugPods(client, "image:1", warn=pytest.fail) as pods:
        opened = pods.on("n1")
        opened.__enter__()
        assert len(cluster.debug_pods()) == 1
        raise KeyboardInterrupt
    assert cluster.debug_pods() == []
    with pytest.raises(Failure, match="the command is ending"), pods.on("n1"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_pods_are_removed_when_the_program_is_ended(
    cluster: RemoteNodes, client: Client, number: signal.Signals
) -> None:
    cluster.node("n1")
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end, DebugPods(client, "image:1", warn=pytest.fail) as pods:
        opened = pods.on("n1")
        opened.__enter__()
        signal.raise_signal(number)
    assert end.value.code == 128 + number
    assert cluster.debug_pods() == []
    assert signal.getsignal(number) is before


def test_pod_that_was_created_although_the_answer_was_lost(cluster: RemoteNodes, client: Client) -> None:
    cluster.node("n1")
    cluster.api.faults.apply(Order(do="truncate", verb="create", path="/pods"))
    with (
        DebugPods(client, "image:1", warn=pytest.fail) as pods,
        pytest.raises(Failure, match="invalid pod"),
        pods.on("n1"),
    ):
        pass
    assert cluster.debug_pods() == []


def test_missing_permission(cluster: RemoteNodes, client: Client) -> None:
    """No pod is created, so none has to be removed."""
    cluster.node("n1")
    for verb in ("create", "delete"):
        cluster.api.faults.apply(Order(do="error", verb=verb, path="/pods", status=403, times=10))
    with (
        DebugPods(client, "image:1", warn=pytest.fail) as pods,
        pytest.raises(
            Failure, match=r"new pods are not permitted.*; Role pykubeproxy-debug in manifests/inspect"
        ),
        pods.on("n1"),
    ):
        pass


def test_pods_of_a_killed_command_are_removed_by_the_next_one(
    cluster: RemoteNodes, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a command that runs, or of another machine."""
    cluster.node("n1")
    ended = subprocess.Popen(["true"])
    ended.wait()
    made: dict[str, str] = {}
    with ExitStack() as used:
        for name, process, machine in (
            ("killed", ended.pid, ""),
            ("running", 1, ""),
            ("elsewhere", ended.pid, "other"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(os, "getpid", lambda process=process: process)
                if machine:
                    patched.setattr(socket, "gethostname", lambda machine=machine: machine)
                pod = DebugPods(client, "image:1", warn=pytest.fail).on("n1")
                made[name] = used.enter_context(pod).pod
        create_pod(client, "kube-system", manifest("pykubeproxy-debug-by-hand", "n1", "image:1"))
        with DebugPods(client, "image:1", warn=pytest.fail):
            left = {made["running"], made["elsewhere"], "pykubeproxy-debug-by-hand"}
            assert set(cluster.debug_pods()) == left


def test_pod_that_cannot_be_removed(cluster: RemoteNodes, client: Client) -> None:
    cluster.node("n1")
    cluster.api.faults.apply(Order(do="error", verb="delete", path="/pods", status=500, times=10))
    warnings: list[str] = []
    with DebugPods(client, "image:1", warn=warnings.append) as pods, pods.on("n1") as container:
        pass
    (warning,) = warnings
    assert warning.startswith(f"cannot remove debug pod kube-system/{container.pod}: ")
    assert "ends by itself within 10 minutes" in warning


def test_pod_that_does_not_start(
    cluster: RemoteNodes, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that does not exist has no kubelet."""
    monkeypatch.setattr("pykubeproxy.nodes.debug_pods._START_SECONDS", 0.0)
    with (
        DebugPods(client, "image:1", warn=pytest.fail) as pods,
        pytest.raises(Failure, match="debug pod with image image:1 is not up on n9 after 0 s: Pending"),
        pods.on("n9"),
    ):
        pass
    assert cluster.debug_pods() == []


def test_only_a_pod_that_enters_others_sees_the_processes_of_the_host() -> None:
    plain = json.dumps(manifest("a", "node1", "image"))
    entering = json.dumps(manifest("a", "node1", "image", entering=True))
    for right in ('"hostPID": true', '"SYS_ADMIN"', '"SYS_PTRACE"'):
        assert right in entering
        assert right not in plain
    assert '"drop": ["ALL"]' in entering
