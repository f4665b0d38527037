"""What applies of a kubeconfig. The expected values are those of client-go 1.36, tried with its code."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubeproxy.sources import SourceError, credential_store
from pykubeproxy.sources.credentials import Credentials
from tests.fakes.certificates import certificate

HTTPS = {"server": "https://10.0.0.1:6443"}
BEARER = {"authorization": "Bearer secret"}
TOKEN = {"token": "secret"}


def load(
    folder: Path, cluster: dict[str, Any], user: dict[str, Any] | None = None, master: str = ""
) -> Credentials:
    """Load the credentials of a kubeconfig with this cluster and user."""
    content = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    return load_content(folder, content, master)


def load_content(folder: Path, content: dict[str, Any], master: str = "") -> Credentials:
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return credential_store.load(str(path), master)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key and a file with a token."""
    folder = tmp_path_factory.mktemp("files")
    certificate(folder)
    (folder / "token").write_text("of-the-file\n")
    return folder


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("https://10.0.0.1:6443/", "https://10.0.0.1:6443"),
        ("HTTPS://host/prefix/", "https://host/prefix"),
        ("https://host/prefix?query#fragment", "https://host/prefix"),
        ("http://[fd00::1]:8080", "http://[fd00::1]:8080"),
        ("10.0.0.1:6443", "http://10.0.0.1:6443"),
        ("10.0.0.1", "http://10.0.0.1"),
        ("localhost:8080", "http://localhost:8080"),
        ("[::1]:8080/", "http://[::1]:8080"),
    ],
)
@pytest.mark.parametrize("way", ["server", "master"])
def test_the_url_of_a_server(tmp_path: Path, server: str, url: str, way: str) -> None:
    """Without a scheme and without settings for TLS, it is http."""
    loaded = credential_store.load("", server) if way == "master" else load(tmp_path, {"server": server})
    assert loaded.server.url == url


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({"certificate-authority": "certificate.pem"}, {}),
        ({"certificate-authority-data": "Y2E="}, {}),
        ({"insecure-skip-tls-verify": True}, {}),
        ({}, {"client-certificate": "certificate.pem", "client-key": "key.pem"}),
    ],
)
def test_a_server_without_a_scheme_gets_https_with_settings_for_tls(
    files: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    loaded = load(files, {"server": "10.0.0.1:6443", **cluster}, {**TOKEN, **user})
    assert loaded.server.url == "https://10.0.0.1:6443"
    assert loaded.headers() == BEARER


@pytest.mark.parametrize(
    "server", ["ftp://h", "h/path", "//h", "https://", "https://h:port", "https://h x", "http:/h"]
)
def test_an_invalid_server_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(SourceError, match=r"invalid API server address '.*': use an http:// or"):
        load(tmp_path, {"server": server})


def test_master_replaces_server_and_server_name(files: Path) -> None:
    """The rest of the kubeconfig stays in force: here, what a plain server would not need."""
    cluster = {"server": "http://h", "certificate-authority": "certificate.pem", "tls-server-name": "name"}
    loaded = load(files, cluster, TOKEN, master="https://other")
    assert loaded.server.url == "https://other"
    assert loaded.server.ca_file == str(files / "certificate.pem")
    assert not loaded.server.tls_server_name
    assert loaded.headers() == BEARER


def test_master_needs_no_context(tmp_path: Path) -> None:
    assert load_content(tmp_path, {"kind": "Config"}, "https://h").server.url == "https://h"


@pytest.mark.parametrize("user", [TOKEN, {"tokenFile": "token"}, {"username": "me", "password": "pw"}])
def test_no_credentials_are_sent_without_tls(files: Path, user: dict[str, str]) -> None:
    """A plugin does not even run."""
    assert load(files, {"server": "http://10.0.0.1"}, user).headers() == {}
    plugin = {"exec": {"command": "/bin/false", "apiVersion": "client.authentication.k8s.io/v1"}}
    assert load(files, {"server": "http://10.0.0.1"}, plugin).headers() == {}


def test_user_and_password_in_the_url_are_sent(files: Path) -> None:
    """As for any HTTP server, and only without other credentials."""
    basic = {"authorization": "Basic " + base64.b64encode(b"me:p@w").decode()}
    assert load(files, {"server": "https://me:p%40w@h"}).headers() == basic
    assert load(files, {"server": "https://me:pw@h"}, TOKEN).headers() == BEARER


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "secret", "tokenFile": "token"}, "Bearer of-the-file"),
        ({"token": "secret", "tokenFile": "missing"}, "Bearer secret"),
        ({"token": "", "tokenFile": "token"}, "Bearer of-the-file"),
        ({"token": None, "tokenFile": "token"}, "Bearer of-the-file"),
        ({"username": "me", "password": "pw"}, "Basic bWU6cHc="),
        ({"username": "me"}, "Basic bWU6"),
    ],
)
def test_a_token_file_wins_over_a_token(files: Path, user: dict[str, Any], header: str) -> None:
    """Unless it cannot be read. A password may be missing."""
    assert load(files, HTTPS, user).headers() == {"authorization": header}


def test_an_empty_token_does_not_keep_the_plugin_from_running(tmp_path: Path) -> None:
    exec_ = {"command": "/bin/false", "apiVersion": "client.authentication.k8s.io/v1"}
    with pytest.raises(SourceError, match="credential plugin /bin/false exited"):
        load(tmp_path, HTTPS, {"token": "", "exec": exec_})


@pytest.mark.parametrize(
    ("cluster", "user", "mistake"),
    [
        ({"server": ""}, {}, "the current context has no server"),
        ({"server": None}, {}, "the current context has no server"),
        ({"server": 5}, {}, "Expected `str`, got `int`"),
        (
            HTTPS | {"certificate-authority": "certificate.pem", "insecure-skip-tls-verify": True},
            {},
            "insecure-skip-tls-verify and a certificate authority exclude each other",
        ),
        (
            HTTPS | {"certificate-authority": "certificate.pem", "certificate-authority-data": "Y2E="},
            {},
            "certificate-authority and certificate-authority-data exclude",
        ),
        (HTTPS | {"certificate-authority": "missing"}, {}, "File does not exist: .*/missing"),
        (HTTPS, {"client-certificate": "certificate.pem"}, "a client certificate needs client-key"),
        (
            HTTPS,
            {"client-certificate": "certificate.pem", "client-key": "key.pem", "client-key-data": "a2V5"},
            "client-key and client-key-data exclude",
        ),
        (HTTPS, {"token": "secret", "username": "me"}, "a token and a user name with password exclude"),
        (HTTPS, {"tokenFile": "token", "username": "me"}, "a token and a user name with password exclude"),
        (HTTPS, {"tokenFile": "missing"}, "cannot read the token in .*/missing: .*No such file"),
        (HTTPS, {"tokenFile": "/dev/null"}, "cannot read the token in /dev/null: it is empty"),
        (
            HTTPS,
            {"exec": {"command": "x"}, "auth-provider": {"name": "oidc"}},
            "exec and auth-provider exclude",
        ),
        (HTTPS, {"as-groups": ["a"]}, "as-uid, as-groups and as-user-extra need as"),
        (HTTPS, {"as": "me", "as-user-extra": {"a": [1]}}, "Expected `str`, got `int`"),
        (HTTPS | {"proxy-url": "socks4://p"}, {}, "cannot use proxy-url socks4://p"),
    ],
)
def test_mistakes_that_client_go_refuses_are_refused(
    files: Path, cluster: dict[str, Any], user: dict[str, Any], mistake: str
) -> None:
    """In one line."""
    with pytest.raises(SourceError, match=mistake) as caught:
        load(files, cluster, user)
    assert "\n" not in str(caught.value)


def test_a_missing_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="it has no context 'x'"):
        load_content(tmp_path, {"current-context": "x"})


def test_a_missing_user_means_no_credentials(tmp_path: Path) -> None:
    content = {
        "clusters": [{"name": "c", "cluster": HTTPS}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "missing"}}],
        "current-context": "x",
    }
    assert load_content(tmp_path, content).headers() == {}


def test_unknown_fields_and_nulls_are_ignored(tmp_path: Path) -> None:
    cluster = HTTPS | {"certificate-authority": None, "unknown": 1, "extensions": None}
    assert load(tmp_path, cluster, {"token": None, "unknown": 1}).headers() == {}


def test_the_user_to_impersonate(tmp_path: Path) -> None:
    """One header for each group and value; keys are escaped, values are UTF-8."""
    user = {
        "as": "system:serviceaccount:a:b",
        "as-uid": "7",
        "as-groups": ["a, b", "é"],
        "as-user-extra": {"acme.com/Ünit%": ["x", "y"], "scopes": []},
    }
    assert list(load(tmp_path, HTTPS, user | TOKEN).headers().iteritems()) == [
        ("Impersonate-User", "system:serviceaccount:a:b"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a, b"),
        ("Impersonate-Group", "é".encode().decode("latin-1")),
        ("Impersonate-Extra-acme.com%2F%C3%9Cnit%25", "x"),
        ("Impersonate-Extra-acme.com%2F%C3%9Cnit%25", "y"),
        ("authorization", "Bearer secret"),
    ]


def test_a_plugin_gets_the_cluster_if_it_wants(files: Path) -> None:
    """With the certificate authority itself, not its path, and the server in force."""
    cluster = {
        "server": "https://old",
        "certificate-authority": "certificate.pem",
        "proxy-url": "http://p:1",
        "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"a": 1}}],
    }
    program = files / "plugin"
    program.write_text(f'#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >{files}/info\nexit 1\n')
    program.chmod(0o700)
    settings = {
        "command": "./plugin",
        "apiVersion": "client.authentication.k8s.io/v1",
        "provideClusterInfo": True,
    }
    with pytest.raises(SourceError, match="exited with status 1"):
        load(files, cluster, {"exec": settings}, master="https://h:1")
    assert json.loads((files / "info").read_text())["spec"] == {
        "interactive": False,
        "cluster": {
            "server": "https://h:1",
            "certificate-authority-data": base64.b64encode((files / "certificate.pem").read_bytes()).decode(),
            "proxy-url": "http://p:1",
            "config": {"a": 1},
        },
    }
