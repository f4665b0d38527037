"""A running agent whose configuration file changes."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.config_map import ConfigMapVolume
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
CHANGED = HEAD + "iptables: {masqueradeAll: true}\n"


@pytest.fixture
def volume(tmp_path: Path) -> ConfigMapVolume:
    return ConfigMapVolume(tmp_path / "config", HEAD)


@pytest.fixture
def process(tmp_path: Path, volume: ConfigMapVolume) -> Iterator[subprocess.Popen[bytes]]:
    """A ready agent with a NodePort service, in a namespace of its own."""
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", type="NodePort", ports=[{"port": 80, "nodePort": 30080}]))
        api.store.create(slice_of("web", "10.244.0.5"))
        flags = ("--config", str(volume.path), "--master", api.url, "--hostname-override", "node1")
        with running(tmp_path / "agent.log", *flags) as process:
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            eventually(lambda: "rules in place" in (tmp_path / "agent.log").read_text())
            yield process


def write(path: Path) -> None:
    path.write_text(CHANGED)


def replace(path: Path) -> None:
    target = path.resolve()
    new = target.with_suffix(".new")
    new.write_text(CHANGED)
    new.rename(target)


@pytest.mark.parametrize("change", [write, replace])
def test_a_changed_file_ends_the_process(
    process: subprocess.Popen[bytes],
    volume: ConfigMapVolume,
    tmp_path: Path,
    change: Callable[[Path], None],
) -> None:
    """With status 1 and one log line; the rules stay."""
    log = tmp_path / "agent.log"
    rules, lines = saved(), log.read_text().splitlines()
    change(volume.path)
    assert process.wait(10) == 1
    (line,) = log.read_text().splitlines()[len(lines) :]
    assert f"configuration file {volume.path} was updated" in line
    assert saved() == rules


def test_a_config_map_update_waits_for_a_restart(
    process: subprocess.Popen[bytes], volume: ConfigMapVolume, tmp_path: Path
) -> None:
    """The process goes on with the configuration it started with and logs nothing."""
    log = tmp_path / "agent.log"
    rules, lines = saved(), log.read_text()
    volume.update(CHANGED)
    time.sleep(2.5)
    assert process.poll() is None
    assert log.read_text() == lines
    content = json.loads(fetch(METRICS, "/configz").body)["kubeproxy.config.k8s.io"]
    assert content["iptables"]["masqueradeAll"] is False
    assert saved() == rules


def test_an_older_agent_starts_with_a_newer_file(tmp_path: Path) -> None:
    """It logs one warning for each unknown field and value, and serves."""
    config = tmp_path / "config.conf"
    config.write_text(
        HEAD + "newerMode: x\nlogging: {format: binary}\npykubeproxy: {dispatch: hash, newer: 1}\n"
    )
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        flags = ("--config", str(config), "--master", api.url, "--hostname-override", "node1")
        with running(tmp_path / "agent.log", *flags):
            eventually(lambda: answers(HEALTH, "/readyz", 200))
    log = (tmp_path / "agent.log").read_text()
    assert log.count("configuration warning") == 4
    for field in ("newerMode", "logging.format", "pykubeproxy.dispatch", "pykubeproxy.newer"):
        assert f"The field {field} is" in log
