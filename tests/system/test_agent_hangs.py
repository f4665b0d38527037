"""The agent's pages while its requests to the API server hang."""

import re
from pathlib import Path

import pytest

from tests.fakes.cluster import certificate, kubeconfig, node, server
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, running, status
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

# A short limit for plugins, and an outage that counts early.
SHORT_TIMEOUTS = """
import functools
from pykubeproxy.sources import client, plugin
client.Contact = functools.partial(client.Contact, limit=1.0)
plugin._SECONDS = 3.0
"""
RESOURCES = {"services", "endpointslices", "nodes"}


def unwatched() -> dict[str, float]:
    page = fetch(METRICS, "/metrics").body
    found = re.findall(r'^pykubeproxy_unwatched_seconds\{resource="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {resource: float(seconds) for resource, seconds in found if float(seconds)}


def test_pages_answer_while_a_credential_plugin_hangs(tmp_path: Path) -> None:
    """From the start on; no page waits, and the outage shows before and after the plugin is killed."""
    program = tmp_path / "plugin"
    answer = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t"}}'
    program.write_text(f"#!/bin/sh\nwhile [ -e {tmp_path}/hang ]; do sleep 0.2; done\necho '{answer}'\n")
    program.chmod(0o700)
    plugin = {"command": str(program), "apiVersion": "client.authentication.k8s.io/v1"}
    (tmp_path / "hang").touch()
    log = tmp_path / "agent.log"
    # Without TLS, no plugin runs.
    with inside_a_namespace(), server(tls=certificate(tmp_path)) as api:
        api.store.create(node("node1", "192.168.99.10"))
        path = kubeconfig(api, tmp_path / "kubeconfig", user={"exec": plugin})
        flags = (f"--kubeconfig={path}", "--hostname-override=node1")
        with running(log, *flags, before=SHORT_TIMEOUTS) as agent:
            eventually(lambda: answers(HEALTH, "/livez", 200))
            eventually(lambda: answers(METRICS, "/metrics", 200))
            eventually(lambda: set(unwatched()) == RESOURCES)
            assert "watch failed" not in log.read_text()
            assert answers(HEALTH, "/readyz", 503)
            assert answers(HEALTH, "/healthz", 503)
            assert {it.objects for it in status().unwatched} == RESOURCES
            eventually(lambda: "did not end within 3 s and was killed" in log.read_text())
            assert set(unwatched()) == RESOURCES
            (tmp_path / "hang").unlink()
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            eventually(lambda: not unwatched())
            assert agent.poll() is None
