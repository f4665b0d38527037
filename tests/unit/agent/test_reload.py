"""The configuration file while the agent runs: what is noticed, what is taken up, and what needs a restart."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import reload
from pykubeproxy.agent.mailbox import Mailbox, Message, Reconfigured, Stop
from pykubeproxy.agent.reload import ConfigWatch, split
from pykubeproxy.config import SETTINGS, Loaded, load
from tests.fakes.follower import eventually

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
# Each field with an effect, with another value than the default; `mode` can have no other.
OTHER = """
clientConnection: {kubeconfig: kc, qps: 7.5, burst: 3, contentType: application/json, acceptContentTypes: x}
logging: {format: json, verbosity: 4}
hostnameOverride: node1
bindAddress: 10.0.0.1
healthzBindAddress: 10.0.0.1:1
metricsBindAddress: "::1"
bindAddressHardFail: true
iptables: {masqueradeBit: 31, masqueradeAll: true, localhostNodePorts: false, syncPeriod: 1m30s, minSyncPeriod: 10s}
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: cbr0, interfaceNamePrefix: veth}
clusterCIDR: 10.244.0.0/16
nodePortAddresses: [192.168.99.7/24]
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0, tcpBeLiberal: true,
  udpTimeout: 10s, udpStreamTimeout: 20s}
configSyncPeriod: 1h
featureGates: {AllowServiceExternalIPs: false}
pykubeproxy: {iptablesBackend: legacy, dispatch: flat}
"""
RESTART = {
    "clientConnection.kubeconfig",
    "clientConnection.acceptContentTypes",
    "clientConnection.contentType",
    "clientConnection.qps",
    "clientConnection.burst",
    "logging.format",
    "hostnameOverride",
    "bindAddress",
    "healthzBindAddress",
    "metricsBindAddress",
    "pykubeproxy.iptablesBackend",
}
FIRST = "oomScoreAdj: 1\n"


class Watched:
    """A configuration file that is watched, and what came of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads = 0
        path.write_text(HEAD + FIRST)
        self.messages: list[Message] = []
        self._mailbox = Mailbox()
        self._watch = ConfigWatch(str(path), load(HEAD + FIRST, {}), self._load, self._mailbox)
        self._thread = threading.Thread(target=self._watch.run)

    def _load(self) -> Loaded:
        self.reads += 1
        return load(self.path.read_bytes(), {})

    def start(self) -> None:
        self._thread.start()

    def write(self, body: str) -> None:
        """Replace the file in one step."""
        new = self.path.with_suffix(".new")
        new.write_text(HEAD + body)
        new.rename(self.path)

    def read_again(self) -> None:
        """Wait until a change has been noticed."""
        before = self.reads
        eventually(lambda: self.reads > before)

    def heard(self, condition: Callable[[Message], bool]) -> None:
        """Wait for the one message that comes, which must be so."""

        def came() -> bool:
            self.messages += self._mailbox.take(0.01)
            return bool(self.messages)

        eventually(came)
        (message,) = self.messages
        assert condition(message), message
        self.messages.clear()

    def silent(self) -> bool:
        return not self._mailbox.take(0)

    def stop(self) -> None:
        self._watch.stop()
        if self._thread.ident:
            self._thread.join(5)
            assert not self._thread.is_alive()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(reload, "_PERIOD", 0.02)
    made = Watched(tmp_path / "config.conf")
    yield made
    made.stop()


def oom(value: int) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, Reconfigured) and message.config.oom_score_adj == value


def test_which_fields_need_a_restart() -> None:
    """Where it listens, whom it asks, who it is and what writes the rules; everything else is taken up."""
    fields = split(load(None, {}).config, load(HEAD + OTHER, {}).config)
    assert set(fields.restart) == RESTART
    effective = {setting.field for setting in SETTINGS if setting.attribute and setting.field}
    assert set(fields.live) == effective - RESTART - {"mode"}


def test_a_changed_file_is_taken_up(watched: Watched) -> None:
    """Once, with the whole new configuration."""
    watched.start()
    watched.read_again()
    watched.write("oomScoreAdj: 2")
    watched.heard(oom(2))
    watched.write("oomScoreAdj: 3")
    watched.heard(oom(3))


def test_a_config_map_changes_by_a_swapped_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kubelet does it: a new folder, and the link ..data turned to it; the file's own link stays."""
    monkeypatch.setattr(reload, "_PERIOD", 0.02)

    def folder(name: str, body: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.conf").write_text(HEAD + body)
        (tmp_path / "..data_tmp").symlink_to(name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    folder("..2026_1", FIRST)
    path = tmp_path / "config.conf"
    path.symlink_to("..data/config.conf")
    mailbox = Mailbox()
    read = threading.Event()

    def again() -> Loaded:
        found = load(path.read_bytes(), {})
        read.set()
        return found

    watch = ConfigWatch(str(path), load(path.read_bytes(), {}), again, mailbox)
    thread = threading.Thread(target=watch.run)
    thread.start()
    assert read.wait(10)
    folder("..2026_2", "oomScoreAdj: 2")
    messages = mailbox.take(10)
    watch.stop()
    thread.join(5)
    (message,) = messages
    assert oom(2)(message)


def test_a_change_during_the_start_is_not_missed(watched: Watched) -> None:
    """The file was another already when the watch began."""
    watched.write("oomScoreAdj: 2")
    watched.start()
    watched.heard(oom(2))


def test_a_broken_file_changes_nothing_and_is_told_once(watched: Watched) -> None:
    """One line with the field; the next good file is compared with the last good one."""
    with capture_logs() as logs:
        watched.start()
        watched.read_again()
        watched.write("oomScoreAdj: 9999")
        watched.read_again()
        eventually(lambda: logs)
        watched.write(FIRST)
        watched.read_again()
        watched.write("oomScoreAdj: 2")
        watched.heard(oom(2))
    (line,) = (it for it in logs if it["log_level"] == "error")
    assert "oomScoreAdj" in line["error"]


def test_a_field_that_needs_a_restart_ends_the_process(watched: Watched) -> None:
    """With status 1 and the field's name, whatever else has changed."""
    watched.start()
    watched.write("oomScoreAdj: 2\nbindAddress: 10.0.0.1\nhealthzBindAddress: 10.0.0.1")
    reason = "restarting, for these fields changed: bindAddress, healthzBindAddress"
    watched.heard(lambda message: message == Stop(1, reason))


def test_a_file_that_vanishes_and_comes_back(watched: Watched) -> None:
    """Meanwhile everything stays; when it is back what changed counts."""
    with capture_logs() as logs:
        watched.start()
        watched.read_again()
        watched.path.unlink()
        watched.write("oomScoreAdj: 2")
        watched.heard(oom(2))
        watched.path.unlink()
        watched.write("oomScoreAdj: 2\n\n")
        watched.read_again()
        assert watched.silent()
    assert [it for it in logs if it["log_level"] == "error"] == []


def test_a_file_that_is_only_touched_is_no_change(watched: Watched) -> None:
    """Editors and tools write files anew with the same content."""
    with capture_logs() as logs:
        watched.start()
        watched.read_again()
        os.utime(watched.path, (1, 1))
        watched.read_again()
        watched.write(FIRST + "# a comment")
        watched.read_again()
        watched.stop()
        assert watched.silent()
    assert logs == []


def test_a_new_warning_is_told(watched: Watched) -> None:
    """A field that is spelt wrong changes nothing, and a line says so."""
    with capture_logs() as logs:
        watched.start()
        watched.read_again()
        watched.write(FIRST + "clusterCidr: 10.0.0.0/8")
        eventually(lambda: logs)
        assert watched.silent()
    assert [it["event"] for it in logs] == [
        "The field clusterCidr is unknown and ignored. Did you mean clusterCIDR?"
    ]


def test_a_field_without_effect_is_shown_all_the_same(watched: Watched) -> None:
    """/configz tells of it, so it is handed on; nothing restarts for it."""
    watched.start()
    watched.write(FIRST + "ipvs: {scheduler: rr}")
    watched.heard(
        lambda message: (
            isinstance(message, Reconfigured) and message.config.ignored == (("ipvs.scheduler", "rr"),)
        )
    )
