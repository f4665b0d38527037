"""Credentials of plugins and of a pod, and their renewal."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.sources import Client, SourceError, credential_store
from pykubeproxy.sources import plugin as plugin_module
from pykubeproxy.sources.credential_store import CredentialStore
from pykubeproxy.sources.credentials import Credentials
from pykubeproxy.sources.failures import Failure
from tests.fakes.kubeconfigs import write_kubeconfig
from tests.fakes.waiting import eventually


def load(kubeconfig: str, master: str) -> Credentials:
    return credential_store.load(kubeconfig, master)


def kubeconfig(folder: Path, **user: Any) -> str:
    """Write a kubeconfig file for https://10.0.0.1:6443 with this user."""
    return write_kubeconfig(folder, {"server": "https://10.0.0.1:6443"}, user)


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


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Variables and files as in a pod; return the folder of the files."""
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_text("certificate")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(credential_store, "_POD_FOLDER", tmp_path)
    return tmp_path


def test_service_account(pod: Path) -> None:
    """In a pod, address, certificate and token come from the service account."""
    loaded = load("", "")
    assert (loaded.server.url, loaded.server.ca_file, loaded.server.verify) == (
        "https://10.96.0.1:443",
        str(pod / "ca.crt"),
        True,
    )
    assert loaded.headers() == {"authorization": "Bearer first"}


@pytest.mark.parametrize(
    ("host", "url"), [("fd00::1", "https://[fd00::1]:443"), ("api.example", "https://api.example:443")]
)
def test_service_account_with_another_host(
    pod: Path, monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert load("", "").server.url == url


def test_service_account_behind_a_proxy(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a kubeconfig, unless NO_PROXY excludes the server."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert load("", "").server.proxy == "http://proxy:3128"
    monkeypatch.setenv("NO_PROXY", "10.96.0.0/12")
    assert load("", "").server.proxy is None


def test_rotated_service_account_token(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is read again in time, and at once after a 401; a line break at its end is dropped."""
    store = CredentialStore("", "")
    first = store.get()
    (pod / "token").write_text("second\n")
    assert store.get() is first
    store.reject(first)
    second = store.get()
    assert second.headers() == {"authorization": "Bearer second"}
    (pod / "token").write_text("third")
    monkeypatch.setattr("time.monotonic", lambda: second.fresh_until)
    assert store.get().headers() == {"authorization": "Bearer third"}


def test_token_that_is_missing_for_a_moment(pod: Path) -> None:
    """The request fails, and the next one works."""
    store = CredentialStore("", "")
    (pod / "token").write_text("\n")
    with pytest.raises(SourceError, match=r"cannot read the service account in .*/token: it is empty; let "):
        store.get()
    (pod / "token").write_text("second")
    assert store.get().headers() == {"authorization": "Bearer second"}


@pytest.mark.parametrize("name", ["token", "ca.crt"])
@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), (b"\n", "it is empty")])
def test_unusable_service_account(pod: Path, name: str, content: bytes | None, reason: str) -> None:
    """The error names the file and what to do."""
    (pod / name).unlink() if content is None else (pod / name).write_bytes(content)
    expected = f"{pod / name}: {reason}; let the kubelet mount it (automountServiceAccountToken), or set"
    with pytest.raises(SourceError, match=re.escape(expected)):
        load("", "")


def test_service_account_with_a_token_that_is_not_text(pod: Path) -> None:
    (pod / "token").write_bytes(b"\xff")
    with pytest.raises(SourceError, match="token: it is not text; let the kubelet mount it"):
        load("", "")


def test_service_account_whose_certificates_have_comments_that_are_not_utf_8(pod: Path) -> None:
    """OpenSSL reads such files."""
    (pod / "ca.crt").write_bytes(b"# caf\xe9\ncertificate")
    assert load("", "").server.ca_file == str(pod / "ca.crt")


@pytest.mark.parametrize("token", ["first\nsecret", "secret\N{ZERO WIDTH NO-BREAK SPACE}", "\0secret"])
def test_illegal_token_is_not_shown(pod: Path, tmp_path: Path, token: str) -> None:
    (pod / "token").write_text(token)
    for loaded in (load("", ""), load(kubeconfig(tmp_path, token=token), "")):
        with pytest.raises(SourceError, match="invalid token: it has a line break") as error:
            loaded.headers()
        assert "secret" not in str(error.value)


def test_pod_without_a_port(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "")
    with pytest.raises(SourceError, match="KUBERNETES_SERVICE_PORT is not set; set --kubeconfig or --master"):
        load("", "")


@pytest.mark.parametrize(
    ("host", "port"), [("[fd00::1]", "443"), ("a b", "443"), ("a", "tcp://10.0.0.1:443")]
)
def test_pod_with_an_invalid_address(
    pod: Path, monkeypatch: pytest.MonkeyPatch, host: str, port: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    with pytest.raises(SourceError, match="invalid API server address"):
        load("", "")


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


def test_an_identity_provider_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to it do not pile up."""
    monkeypatch.setattr(plugin_module, "_SECONDS", 0.05)
    hang = threading.Event()
    for _ in range(8):
        with pytest.raises(TimeoutError, match="did not answer within"):
            plugin_module._in_time(hang.wait)
    with pytest.raises(TimeoutError, match="8 earlier requests to the identity provider hang"):
        plugin_module._in_time(hang.wait)
    hang.set()
    eventually(lambda: plugin_module._asking._value == 8)
    assert plugin_module._in_time(lambda: "token") == "token"


def test_plugin_with_a_certificate(tmp_path: Path) -> None:
    """A plugin may return a client certificate and its key."""
    output = credential(clientCertificateData="certificate", clientKeyData="key")
    loaded = load(kubeconfig(tmp_path, **plugin(tmp_path, output)), "")
    assert Path(loaded.server.cert_file or "").read_text() == "certificate"
    assert Path(loaded.server.key_file or "").read_text() == "key"


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (None, "credential plugin /bin/false exited with"),
        ("hello", "printed no ExecCredential"),
        (credential(clientKeyData="key"), "printed neither a token nor"),
        ("", "invalid exec: .*apiVersion"),
    ],
)
def test_plugin_that_fails(tmp_path: Path, output: str | None, problem: str) -> None:
    """A plugin without output is an error with its reason, not a request without credentials."""
    user: dict[str, Any] = {"exec": {"command": "/bin/true"}}
    if output is None:
        user = {"exec": {"command": "/bin/false", "apiVersion": "client.authentication.k8s.io/v1"}}
    elif output:
        user = plugin(tmp_path, output)
    with pytest.raises(SourceError, match=f"cannot use kubeconfig .*: {problem}|: .* {problem}"):
        load(kubeconfig(tmp_path, **user), "")


def test_missing_kubeconfig(tmp_path: Path) -> None:
    """The error names the path; there is no fallback."""
    with pytest.raises(SourceError, match="absent does not exist"):
        load(str(tmp_path / "absent"), "")


def test_no_api_server_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a pod and without flags, the error says which flags to set."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="set --kubeconfig or --master"):
        load("", "")


URLS = ["http://me:s3cret@127.0.0.1:1", "https://me:s3c@s3cret@host/path", "http://s3cret@[::1]:1"]


@pytest.mark.parametrize("url", URLS)
def test_a_server_that_does_not_answer_is_named_without_password(url: str) -> None:
    """The message names it without user and password."""
    client = Client(master=url, qps=-1)
    assert "s3cret" not in client.server
    assert client.server.startswith(("http://127.0.0.1:1", "https://host/path", "http://[::1]:1"))
    stream = client.stream("/api/v1/services", {}, resource="services", idle=1.0)
    with pytest.raises(Failure) as caught, stream:
        pass
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://me:s3cret@host", "me:s3cret@host/path"])
def test_an_invalid_url_is_shown_without_password(url: str) -> None:
    """The message names the host only."""
    with pytest.raises(SourceError, match="host") as caught:
        Client(master=url)
    assert "s3cret" not in str(caught.value)
