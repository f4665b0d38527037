"""What applies of a kubeconfig, and of several. The expected values are those of client-go and kubectl 1.36, tried."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubeproxy.sources import SourceError, credential_store
from pykubeproxy.sources.credentials import Credentials, Overrides
from pykubeproxy.sources.kubeconfig import Kubeconfigs, context_namespace, user_kubeconfigs
from tests.fakes.cluster import certificate
from tests.fakes.kubeconfigs import write_content, write_kubeconfig

HTTPS = {"server": "https://10.0.0.1:6443"}
BEARER = {"authorization": "Bearer secret"}
TOKEN = {"token": "secret"}


def load(
    folder: Path, cluster: dict[str, Any], user: dict[str, Any] | None = None, master: str = ""
) -> Credentials:
    """Load the credentials of a kubeconfig with this cluster and user."""
    return credential_store.load(write_kubeconfig(folder, cluster, user), master)


def load_content(folder: Path, content: dict[str, Any], master: str = "") -> Credentials:
    return credential_store.load(write_content(folder, content), master)


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
    assert loaded.headers() == {}


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


def jwt(**claims: Any) -> str:
    """An unsigned token."""
    return f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln"


@pytest.mark.parametrize(
    ("provider", "header"),
    [
        ({"name": "oidc", "config": {"id-token": jwt(sub="me")}}, f"Bearer {jwt(sub='me')}"),
        ({"name": "gcp", "config": {"cmd-path": "COMMAND"}}, "Bearer of-the-command"),
        ({"name": "unknown"}, "Bearer secret"),
    ],
)
def test_an_identity_provider_gives_the_token(tmp_path: Path, provider: dict[str, Any], header: str) -> None:
    """Without one that is known, the token of the kubeconfig counts."""
    command = tmp_path / "command"
    answer = {"credential": {"access_token": "of-the-command", "token_expiry": "2120-01-01T00:00:00Z"}}
    command.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    command.chmod(0o700)
    settings = json.loads(json.dumps(provider).replace("COMMAND", str(command)))
    loaded = load(tmp_path, HTTPS, {**TOKEN, "auth-provider": settings})
    assert loaded.headers() == {"authorization": header}
    assert loaded.fresh_until == float("inf")


def test_an_identity_provider_that_fails(tmp_path: Path) -> None:
    provider = {"name": "gcp", "config": {"cmd-path": "/bin/false"}}
    with pytest.raises(
        SourceError, match=r"cannot use kubeconfig .*: cannot get a token by auth-provider: .* 1"
    ):
        load(tmp_path, HTTPS, {"auth-provider": provider})


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
        (HTTPS | {"certificate-authority": "missing"}, {}, "file does not exist: .*/missing"),
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
        (HTTPS, {"as-groups": ["a"]}, "as-uid, as-groups .--as-group. and as-user-extra need as .--as."),
        (HTTPS, {"as": "me", "as-user-extra": {"a": [1]}}, "Expected `str`, got `int`"),
        (HTTPS | {"disable-compression": "true"}, {}, "cannot use kubeconfig .*disable-compression"),
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
        "as-user-extra": {"acme.com/Ünit%": ["x", "z"], "scopes": []},
    }
    assert list(load(tmp_path, HTTPS, user | TOKEN).headers().iteritems()) == [
        ("Impersonate-User", "system:serviceaccount:a:b"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a, b"),
        ("Impersonate-Group", "é".encode().decode("latin-1")),
        ("Impersonate-Extra-acme.com%2F%C3%9Cnit%25", "x"),
        ("Impersonate-Extra-acme.com%2F%C3%9Cnit%25", "z"),
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


@pytest.mark.parametrize(("setting", "compression"), [(True, False), (False, True), (None, True)])
@pytest.mark.parametrize("master", ["", "http://127.0.0.1:8080"])
def test_disable_compression(tmp_path: Path, setting: bool | None, compression: bool, master: str) -> None:
    """--master does not change it."""
    loaded = load(tmp_path, {**HTTPS, "disable-compression": setting}, TOKEN, master)
    assert loaded.compression is compression


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "[]",
        "- a",
        "a: [",
        "{}",
        "{}\n---\n{}",
        "clusters: 5\nusers: 5\ncontexts: 5\ncurrent-context: x\n",
        "contexts: [{name: x, context: 5}]\ncurrent-context: x\n",
        "\x00",
    ],
)
def test_invalid_kubeconfig(tmp_path: Path, text: str) -> None:
    """An invalid kubeconfig is an error of one line with its path."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(SourceError) as caught:
        credential_store.load(str(path), "")
    assert str(caught.value).startswith(f"cannot use kubeconfig {path}: ")
    assert "\n" not in str(caught.value)


PRINTED = json.dumps(
    {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "of-the-plugin"},
    }
)
FIRST = """
clusters: [{name: c, cluster: {server: "https://a:1", certificate-authority: ca.pem}}]
users: [{name: u, user: {token: a}}]
contexts: [{name: x1, context: {cluster: c, user: u}}]
"""
SECOND = """
current-context: y1
clusters:
- {name: c, cluster: {server: "https://b:1", proxy-url: "http://p:1"}}
- {name: d, cluster: {server: "https://d:1", certificate-authority: ca.pem}}
users:
- {name: u, user: {token: b, tokenFile: tok}}
- {name: v, user: {exec: {command: ./plug, apiVersion: client.authentication.k8s.io/v1}}}
contexts:
- {name: x1, context: {cluster: d, user: v, namespace: nb}}
- {name: y1, context: {cluster: c, user: v, namespace: ny}}
"""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    """Two kubeconfigs in folders of their own, and one that is missing."""
    for name, text in (("a", FIRST), ("b", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text(text)
        (tmp_path / name / "ca.pem").touch()
    return tuple(str(tmp_path / name / "config") for name in ("a", "b", "missing"))


def test_first_file_wins_with_whole_entries(paths: tuple[str, ...]) -> None:
    """Paths are relative to the file that names them, those of programs too."""
    first, second = (Path(path).parent for path in paths[:2])
    (second / "plug").write_text(f"#!/bin/sh\necho '{PRINTED}'\n")
    (second / "plug").chmod(0o700)
    loaded = credential_store.load(Kubeconfigs(paths), "")
    assert (loaded.server.url, loaded.server.proxy) == ("https://a:1", None)
    assert loaded.server.ca_file == str(first / "ca.pem")
    assert loaded.headers() == {"authorization": "Bearer of-the-plugin"}
    assert credential_store.load(Kubeconfigs(paths, "x1"), "").headers() == {"authorization": "Bearer a"}
    loaded = credential_store.load(Kubeconfigs(paths[1:], "x1"), "")
    assert (loaded.server.url, loaded.server.ca_file) == ("https://d:1", str(second / "ca.pem"))


def test_context_selects_cluster_and_user(paths: tuple[str, ...]) -> None:
    loaded = credential_store.load(Kubeconfigs((paths[0],), "x1"), "http://plain:1")
    assert loaded.server.url == "http://plain:1"
    with pytest.raises(SourceError, match="it has no context 'x2'"):
        credential_store.load(Kubeconfigs(paths, "x2"), "")


def test_namespace_is_that_of_the_context(paths: tuple[str, ...]) -> None:
    assert context_namespace(Kubeconfigs(paths)) == "ny"
    assert context_namespace(Kubeconfigs(paths, "x1")) == ""


def test_order_of_places(paths: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, then the environment, then the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    several = {"KUBECONFIG": f"{paths[1]}::{paths[2]}:{paths[1]}"}
    assert user_kubeconfigs(paths[0], "x1", several) == Kubeconfigs((paths[0],), "x1")
    assert user_kubeconfigs("", "", several) == Kubeconfigs((paths[1], paths[2]))
    assert user_kubeconfigs("", "", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) is None
    home = tmp_path / ".kube" / "config"
    home.parent.mkdir()
    home.write_text(yaml.safe_dump({}))
    assert user_kubeconfigs("", "", {"KUBECONFIG": ""}) == Kubeconfigs((str(home),))


def test_files_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the user names must exist; in a pod without any, the service account counts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SourceError, match="kubeconfig /no/file does not exist"):
        context_namespace(Kubeconfigs(("/no/file",)))
    with pytest.raises(SourceError, match="KUBECONFIG names no file that exists: /no/file"):
        user_kubeconfigs("", "", {"KUBECONFIG": "/no/file"})
    with pytest.raises(SourceError, match="there is no kubeconfig; set"):
        user_kubeconfigs("", "", {})
    with pytest.raises(SourceError, match="there is no kubeconfig; set"):
        user_kubeconfigs("", "x1", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})


OVERRIDDEN = """
clusters:
- {name: a, cluster: {server: "https://a:1", certificate-authority-data: eA==, tls-server-name: inner}}
- {name: b, cluster: {server: "https://b:1"}}
users:
- {name: u, user: {exec: {command: absent, apiVersion: client.authentication.k8s.io/v1}}}
- {name: v, user: {token: of-v}}
contexts: [{name: x, context: {cluster: a, user: u}}]
current-context: x
"""


@pytest.mark.parametrize(
    ("overrides", "url", "headers"),
    [
        (Overrides(cluster="b", user="v"), "https://b:1", {"authorization": "Bearer of-v"}),
        (Overrides(server="https://c:2", token="t"), "https://c:2", {"authorization": "Bearer t"}),
        (
            Overrides(user="v", as_user="jane", as_groups=("ops",)),
            "https://a:1",
            {"authorization": "Bearer of-v", "Impersonate-User": "jane", "Impersonate-Group": "ops"},
        ),
    ],
)
def test_options_replace_settings_of_a_kubeconfig(
    tmp_path: Path, overrides: Overrides, url: str, headers: dict[str, str]
) -> None:
    path = tmp_path / "config"
    path.write_text(OVERRIDDEN)
    loaded = credential_store.load(Kubeconfigs((str(path),), "", overrides), "")
    assert (loaded.server.url, dict(loaded.headers())) == (url, headers)
    assert (loaded.server.tls_server_name == "inner") == (url == "https://a:1")


def test_verification_is_switched_off_and_unknown_entries_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(OVERRIDDEN)
    insecure = Overrides(user="v", insecure_skip_tls_verify=True)
    server = credential_store.load(Kubeconfigs((str(path),), "", insecure), "").server
    assert (server.verify, server.ca_file) == (False, None)
    with pytest.raises(SourceError, match="no user 'w'"):
        credential_store.load(Kubeconfigs((str(path),), "", Overrides(user="w")), "")


def test_a_server_needs_no_kubeconfig(tmp_path: Path) -> None:
    found = user_kubeconfigs("", "", {"HOME": str(tmp_path)}, Overrides(server="http://s:1"))
    assert found == Kubeconfigs((), "", Overrides(server="http://s:1"))
    assert found and credential_store.load(found, "").server.url == "http://s:1"
