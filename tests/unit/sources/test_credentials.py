"""Address and credentials from kubeconfig, --master and service account."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client.configuration import Configuration
from kubernetes.config import incluster_config

from pykubeproxy.sources import SourceError, credentials
from pykubeproxy.sources.credentials import CredentialStore


def load(kubeconfig: str, master: str) -> Configuration:
    return credentials.load(kubeconfig, master).configuration


def kubeconfig(folder: Path, **user: Any) -> str:
    """Write a kubeconfig file for https://10.0.0.1:6443 with this user."""
    path = folder / "kubeconfig"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


def with_cluster(path: str, settings: dict[str, Any]) -> str:
    """Add settings of the cluster to a kubeconfig file."""
    content = yaml.safe_load(Path(path).read_text())
    content["clusters"][0]["cluster"] |= settings
    Path(path).write_text(yaml.safe_dump(content))
    return path


def plugin(folder: Path, output: str) -> dict[str, Any]:
    """A user whose credentials come from a program that prints `output`."""
    program = folder / "plugin"
    program.write_text(f"#!/bin/sh\necho run >>{folder}/runs\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o700)
    return {"exec": {"command": str(program), "apiVersion": "client.authentication.k8s.io/v1"}}


def credential(**status: str) -> str:
    """What a credential plugin prints."""
    return json.dumps(
        {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    )


def test_token(tmp_path: Path) -> None:
    """A token is sent as it is."""
    it = load(kubeconfig(tmp_path, token="secret"), "")
    assert it.host == "https://10.0.0.1:6443"
    assert it.api_key["BearerToken"] == "Bearer secret"


def test_token_file_with_a_newline(tmp_path: Path) -> None:
    """A newline at the end of a token file, illegal in a header, is dropped; the path is relative."""
    (tmp_path / "token").write_text("secret\n")
    it = load(kubeconfig(tmp_path, tokenFile="token"), "")
    assert it.api_key["BearerToken"] == "Bearer secret"


def test_master_wins(tmp_path: Path) -> None:
    """--master replaces the server of the kubeconfig, whose credentials stay."""
    it = load(kubeconfig(tmp_path, token="secret"), "https://127.0.0.1:8443/")
    assert it.host == "https://127.0.0.1:8443"
    assert it.api_key["BearerToken"] == "Bearer secret"


@pytest.mark.parametrize(("setting", "compression"), [(True, False), (False, True), (None, True)])
def test_disable_compression(tmp_path: Path, setting: bool | None, compression: bool) -> None:
    """--master does not change it."""
    path = with_cluster(kubeconfig(tmp_path, token="secret"), {"disable-compression": setting})
    for master in ("", "http://127.0.0.1:8080"):
        assert credentials.load(path, master).compression is compression


def test_invalid_disable_compression(tmp_path: Path) -> None:
    """As with kube-proxy, no text is true or false."""
    path = with_cluster(kubeconfig(tmp_path, token="secret"), {"disable-compression": "true"})
    with pytest.raises(SourceError, match=r"cannot use kubeconfig .*disable-compression"):
        load(path, "")


def test_master_alone() -> None:
    """--master without a kubeconfig sends no credentials."""
    it = load("", "http://127.0.0.1:8080")
    assert not it.api_key


def test_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod, address, certificate and token come from the service account."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_text("certificate")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    it = load("", "")
    assert it.host == "https://[fd00::1]:443"
    assert it.ssl_ca_cert == str(tmp_path / "ca.crt")
    assert it.api_key["BearerToken"] == "bearer secret"


def test_plugin(tmp_path: Path) -> None:
    """A program may give the token."""
    it = load(kubeconfig(tmp_path, **plugin(tmp_path, credential(token="secret"))), "")
    assert it.api_key["BearerToken"] == "Bearer secret"


def test_a_plugin_runs_again_only_when_its_token_expires(tmp_path: Path) -> None:
    """The construction of a store does not run it."""
    output = credential(token="secret", expirationTimestamp="2020-01-01T00:00:00Z")
    store = CredentialStore(kubeconfig(tmp_path, **plugin(tmp_path, output)), "")
    assert not (tmp_path / "runs").exists()
    assert store.get().headers() == {"authorization": "Bearer secret"}
    plugin(tmp_path, credential(token="renewed", expirationTimestamp="2120-01-01T00:00:00Z"))
    for _ in range(3):
        assert store.get().headers() == {"authorization": "Bearer renewed"}
    assert (tmp_path / "runs").read_text().count("run") == 2


def test_a_plugin_runs_again_after_its_token_was_rejected(tmp_path: Path) -> None:
    """Only the current token counts: a late rejection of an older one changes nothing."""
    store = CredentialStore(kubeconfig(tmp_path, **plugin(tmp_path, credential(token="first"))), "")
    first = store.get()
    store.reject(first)
    second = store.get()
    store.reject(first)
    assert store.get() is second
    assert (tmp_path / "runs").read_text().count("run") == 2


def test_renewals_that_hang_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request fails with a reason, and works again when they end."""
    store = CredentialStore(kubeconfig(tmp_path, token="secret"), "")
    monkeypatch.setattr(credentials, "_PATIENCE", 0.01)
    hang, real = threading.Event(), credentials.load
    monkeypatch.setattr(credentials, "load", lambda *settings: hang.wait(10) and real(*settings))
    threads = [threading.Thread(target=store.get) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    with pytest.raises(SourceError, match="8 earlier renewals of the credentials hang"):
        store.get()
    hang.set()
    for thread in threads:
        thread.join()
    assert store.get().headers() == {"authorization": "Bearer secret"}


def test_plugin_with_a_certificate(tmp_path: Path) -> None:
    """A plugin may return a client certificate and its key."""
    output = credential(clientCertificateData="certificate", clientKeyData="key")
    it = load(kubeconfig(tmp_path, **plugin(tmp_path, output)), "")
    assert Path(it.cert_file).read_text() == "certificate"
    assert Path(it.key_file).read_text() == "key"


def test_plugin_that_fails(tmp_path: Path) -> None:
    """A plugin without output is an error with its reason, not a request without credentials."""
    path = kubeconfig(
        tmp_path, exec={"command": "/bin/false", "apiVersion": "client.authentication.k8s.io/v1"}
    )
    with pytest.raises(
        SourceError, match=r"cannot use kubeconfig .*: credential plugin /bin/false exited with"
    ):
        load(path, "")
    path = kubeconfig(tmp_path, **plugin(tmp_path, "hello"))
    with pytest.raises(SourceError, match=r"cannot use kubeconfig .*: .* printed no ExecCredential"):
        load(path, "")
    path = kubeconfig(tmp_path, **plugin(tmp_path, credential(clientKeyData="key")))
    with pytest.raises(SourceError, match="printed neither a token nor"):
        load(path, "")
    path = kubeconfig(tmp_path, exec={"command": "/bin/true"})
    with pytest.raises(SourceError, match=r"cannot use kubeconfig .*: invalid exec: .*apiVersion"):
        load(path, "")


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[]", "a: [", "{}", "clusters: 5\nusers: 5\ncontexts: 5\ncurrent-context: x\n", "\x00"],
)
def test_invalid_kubeconfig(tmp_path: Path, text: str) -> None:
    """An invalid kubeconfig is an error of one line with its path."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(SourceError) as caught:
        load(str(path), "")
    assert str(caught.value).startswith(f"cannot use kubeconfig {path}: ")
    assert "\n" not in str(caught.value)


def test_missing_kubeconfig(tmp_path: Path) -> None:
    """The error names the path; there is no fallback."""
    with pytest.raises(SourceError, match="absent does not exist"):
        load(str(tmp_path / "absent"), "")


def test_no_api_server_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a pod and without flags, the error says which flags to set."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="set --kubeconfig or --master"):
        load("", "")
