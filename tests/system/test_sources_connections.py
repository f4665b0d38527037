"""Which requests share a connection, and what makes the client open a new one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubeproxy.sources import Client, SourceError, api_watches, credential_store
from tests.fakes.certificates import certificate
from tests.fakes.cluster import SHORT, server
from tests.fakes.relay import Relay


class Setting:
    """A client with a token file, a server behind a relay that counts connections, and their files."""

    def __init__(self, api: Any, relay: Relay, folder: Path) -> None:
        self.api, self.relay = api, relay
        self.token, self.authority = folder / "token", folder / "ca.pem"
        self.token.write_text("first")
        self.authority.write_text((folder / "certificate.pem").read_text())
        self.kubeconfig: Path = api.kubeconfig(folder / "kubeconfig")
        self.change("clusters", "cluster", server=f"https://127.0.0.1:{relay.port}")
        content = yaml.safe_load(self.kubeconfig.read_text())
        cluster = content["clusters"][0]["cluster"]
        cluster.pop("certificate-authority-data", None)
        cluster["certificate-authority"] = str(self.authority)
        content["users"][0]["user"] = {"tokenFile": str(self.token)}
        self.kubeconfig.write_text(yaml.safe_dump(content))
        self.watch = api_watches(Client(str(self.kubeconfig), qps=-1), "n1", SHORT)[0]

    def change(self, section: str, kind: str, **settings: str) -> None:
        content = yaml.safe_load(self.kubeconfig.read_text())
        content[section][0][kind].update(settings)
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def connections(self, lists: int = 3) -> int:
        """List some times; return how many connections the server has seen so far."""
        for _ in range(lists):
            self.watch.once()
        return self.relay.accepted


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """Credentials count as old at once."""
    monkeypatch.setattr(credential_store, "_FRESH", 0.0)
    with (
        server(tls=certificate(tmp_path), token="first") as api,
        Relay(int(api.url.rpartition(":")[2])) as relay,
    ):
        yield Setting(api, relay, tmp_path)


def test_renewed_credentials_keep_the_connection(setting: Setting) -> None:
    """Also another token."""
    assert setting.connections() == 1
    setting.token.write_text("second")
    setting.api.token = "second"
    assert setting.connections() == 1


def test_another_authority_needs_a_new_connection(setting: Setting) -> None:
    """Also when its file changes in place."""
    assert setting.connections() == 1
    setting.authority.write_text(setting.authority.read_text() + "\n# renewed\n")
    assert setting.connections() == 2
    setting.authority.write_text("none")
    with pytest.raises(SourceError):
        setting.watch.once()


def test_another_server_name_needs_a_new_connection(setting: Setting) -> None:
    assert setting.connections() == 1
    setting.change("clusters", "cluster", **{"tls-server-name": "127.0.0.1"})
    assert setting.connections() == 2


def test_idle_connections_are_dropped_after_a_timeout(setting: Setting) -> None:
    """They may be as dead as the one that timed out."""
    assert setting.connections() == 1
    setting.relay.frozen.set()
    with pytest.raises(SourceError, match="no response"):
        setting.watch.once()
    setting.relay.frozen.clear()
    assert setting.connections() == 2
