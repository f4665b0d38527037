"""Find, merge and read kubeconfigs as kubectl and client-go do, and load their credentials.

Only identity providers (`auth-provider`) need the Python client of Kubernetes: importing it takes 0.2 s of CPU time and
17 MB.
"""

import atexit
import base64
import math
import os
import string
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from urllib3.util import make_headers

from pykubeproxy.config import yaml
from pykubeproxy.sources import plugin
from pykubeproxy.sources.credentials import (
    Credentials,
    Kubeconfigs,
    Overrides,
    ServerConfig,
    server_url,
)
from pykubeproxy.sources.proxies import proxy_for
from pykubeproxy.sources.watch import SourceError

_Settings = TypeVar("_Settings", bound=msgspec.Struct)
# The settings of a cluster or user that name files.
_PATHS = ("certificate_authority", "client_certificate", "client_key", "token_file")
# Renew credentials of a plugin this many seconds before they expire.
_EARLY = 60.0
# The characters of a header's name, except "%", which escapes the others.
_LEGAL = frozenset((string.ascii_letters + string.digits + "!#$&'*+-.^_`|~").encode())
_NO_OVERRIDES = Overrides()
# Temporary files by their content.
_temporary_files: dict[bytes, str] = {}


class KubeconfigCluster(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """How to reach an API server."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: tuple[dict[str, Any], ...] = ()

    @property
    def has_authority(self) -> bool:
        """Whether there is a certificate authority."""
        return bool(self.certificate_authority or self.certificate_authority_data)


class KubeconfigUser(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """How to authenticate, and which user to impersonate."""

    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    username: str = ""
    password: str = ""
    auth_provider: dict[str, Any] | None = None
    exec: dict[str, Any] | None = None
    as_: str = msgspec.field(default="", name="as")
    as_uid: str = ""
    as_groups: tuple[str, ...] = ()
    as_user_extra: dict[str, tuple[str, ...]] = {}

    @property
    def has_certificate(self) -> bool:
        """Whether there is a client certificate."""
        return bool(self.client_certificate or self.client_certificate_data)


class _KubeconfigContext(msgspec.Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(msgspec.Struct):
    name: str = ""
    cluster: KubeconfigCluster = KubeconfigCluster()


class _NamedUser(msgspec.Struct):
    name: str = ""
    user: KubeconfigUser = KubeconfigUser()


class _NamedContext(msgspec.Struct):
    name: str = ""
    context: _KubeconfigContext = _KubeconfigContext()


class _KubeconfigFile(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()


def user_kubeconfigs(
    path: str, context: str, environment: Mapping[str, str], overrides: Overrides = _NO_OVERRIDES
) -> Kubeconfigs | None:
    """Return the kubeconfigs that kubectl would read: `path`, else those of KUBECONFIG, else ~/.kube/config.

    Return None if there are none in a pod, where kubectl then uses the service account. Raises SourceError if there are
    none elsewhere and `overrides` name no server.
    """
    if path:
        return Kubeconfigs((path,), context, overrides)
    named = list(filter(None, environment.get("KUBECONFIG", "").split(os.pathsep)))
    paths = tuple(dict.fromkeys(named or [str(Path.home() / ".kube" / "config")]))
    if any(Path(name).is_file() for name in paths):
        return Kubeconfigs(paths, context, overrides)
    if overrides.server:
        return Kubeconfigs((), context, overrides)
    if named:
        raise SourceError(f"KUBECONFIG names no file that exists: {os.pathsep.join(named)}")
    if context or "KUBERNETES_SERVICE_HOST" not in environment:
        raise SourceError("there is no kubeconfig; set --kubeconfig or KUBECONFIG")
    return None


class _CurrentContext(NamedTuple):
    cluster: KubeconfigCluster
    user: KubeconfigUser
    namespace: str


def context_namespace(kubeconfigs: Kubeconfigs) -> str:
    """Return the namespace of the context, "" if it names none. Raises SourceError."""
    with _errors_of(kubeconfigs):
        return _current_context(kubeconfigs).namespace


def load_kubeconfig(
    kubeconfigs: Kubeconfigs, master: str, fresh_until: float, with_plugin: bool
) -> Credentials:
    """Read kubeconfigs and the files that they name, and run the credential plugin if `with_plugin` is set.

    `fresh_until` applies to credentials from files. Raises SourceError.
    """
    with _errors_of(kubeconfigs):
        context = _current_context(kubeconfigs)
        cluster, user = effective(context.cluster, context.user, master)
        credentials = _credentials(cluster, user, fresh_until, with_plugin)
    proxy = proxy_for(cluster.server, cluster.proxy_url, os.environ)
    return replace(credentials, server=replace(credentials.server, proxy=proxy))


@contextmanager
def _errors_of(kubeconfigs: Kubeconfigs) -> Iterator[None]:
    if kubeconfigs.paths and not any(path.is_file() for path in kubeconfigs.files()):
        raise SourceError(f"kubeconfig {kubeconfigs} does not exist or is not a file")
    try:
        yield
    except (SourceError, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SourceError(f"cannot use kubeconfig {kubeconfigs}: {_reason(error)}") from None


def _current_context(kubeconfigs: Kubeconfigs) -> _CurrentContext:
    """Return what the current context names, empty where it names nothing. Raises SourceError, OSError and YAMLError."""
    files, given = [_read(path) for path in kubeconfigs.files() if path.is_file()], kubeconfigs.overrides
    name = kubeconfigs.context or next((file.current_context for file in files if file.current_context), "")
    files.reverse()  # the first file wins
    contexts = {named.name: named.context for file in files for named in file.contexts}
    if name and name not in contexts:
        raise SourceError(f"it has no context {name!r}")
    context = contexts.get(name, _KubeconfigContext())
    clusters = {named.name: named.cluster for file in files for named in file.clusters}
    users = {named.name: named.user for file in files for named in file.users}
    for kind, chosen, known in (("cluster", given.cluster, clusters), ("user", given.user, users)):
        if chosen and chosen not in known:
            raise SourceError(f"it has no {kind} {chosen!r}")
    cluster = clusters.get(given.cluster or context.cluster) or KubeconfigCluster()
    user = users.get(given.user or context.user) or KubeconfigUser()
    return _CurrentContext(*_overridden(cluster, user, given), context.namespace)


def _overridden(
    cluster: KubeconfigCluster, user: KubeconfigUser, given: Overrides
) -> tuple[KubeconfigCluster, KubeconfigUser]:
    if given.server:
        cluster = replace(cluster, server=given.server, tls_server_name="")
    if given.insecure_skip_tls_verify:
        cluster = replace(
            cluster, insecure_skip_tls_verify=True, certificate_authority="", certificate_authority_data=""
        )
    if given.token:
        user = replace(
            user, token=given.token, token_file="", username="", password="", exec=None, auth_provider=None
        )
    if given.as_user or given.as_groups:
        user = replace(user, as_=given.as_user or user.as_, as_groups=given.as_groups or user.as_groups)
    return cluster, user


def _read(path: Path) -> _KubeconfigFile:
    documents = [document.content for document in yaml.documents(path.read_bytes())]
    if len(documents) > 1:
        raise SourceError(f"{path} has more than one document")
    content = documents[0] if documents else None
    file = msgspec.convert(_without_nulls(content or {}), _KubeconfigFile)
    folder = path.absolute().parent
    for cluster in file.clusters:
        cluster.cluster = _with_absolute_paths(cluster.cluster, folder)
    for user in file.users:
        user.user = _with_absolute_paths(user.user, folder)
    return file


def _with_absolute_paths(settings: _Settings, folder: Path) -> _Settings:
    """As kubectl does, resolve relative paths from the folder of the kubeconfig, and a plugin with a slash."""
    changed: dict[str, Any] = {
        name: os.path.normpath(folder / path) for name in _PATHS if (path := getattr(settings, name, ""))
    }
    plugin = getattr(settings, "exec", None) or {}
    if isinstance(command := plugin.get("command"), str) and "/" in command:
        changed["exec"] = {**plugin, "command": os.path.normpath(folder / command)}
    return replace(settings, **changed)


def _without_nulls(value: Any) -> Any:
    """Drop the nulls of mappings: as in client-go, they mean unset."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def effective(
    cluster: KubeconfigCluster, user: KubeconfigUser, master: str
) -> tuple[KubeconfigCluster, KubeconfigUser]:
    """Return what applies to requests; `master` replaces the server unless it is empty.

    A server without a scheme gets https if there are settings for TLS, else http. Without TLS, the client sends no
    credentials. Raises SourceError.
    """
    if master:
        cluster = replace(cluster, server=master, tls_server_name="")
    _check(cluster, user)
    tls = cluster.has_authority or cluster.insecure_skip_tls_verify or user.has_certificate
    cluster = replace(cluster, server=server_url(cluster.server, tls=tls))
    if cluster.server.startswith("https:"):
        if cluster.has_authority and cluster.insecure_skip_tls_verify:
            raise SourceError("insecure-skip-tls-verify and a certificate authority exclude each other")
        return cluster, user
    impersonated = KubeconfigUser(
        as_=user.as_, as_uid=user.as_uid, as_groups=user.as_groups, as_user_extra=user.as_user_extra
    )
    plain = KubeconfigCluster(
        server=cluster.server, proxy_url=cluster.proxy_url, disable_compression=cluster.disable_compression
    )
    return plain, impersonated


def _check(cluster: KubeconfigCluster, user: KubeconfigUser) -> None:
    mistakes = {
        "the current context has no server": not cluster.server,
        "certificate-authority and certificate-authority-data exclude each other": (
            cluster.certificate_authority and cluster.certificate_authority_data
        ),
        "client-certificate and client-certificate-data exclude each other": (
            user.client_certificate and user.client_certificate_data
        ),
        "client-key and client-key-data exclude each other": (
            user.has_certificate and user.client_key and user.client_key_data
        ),
        "a client certificate needs client-key or client-key-data": (
            user.has_certificate and not (user.client_key or user.client_key_data)
        ),
        "a token and a user name with password exclude each other": (
            (user.token or user.token_file) and (user.username or user.password)
        ),
        "exec and auth-provider exclude each other": user.exec and user.auth_provider,
        "as-uid, as-groups (--as-group) and as-user-extra need as (--as)": (
            not user.as_ and (user.as_uid or user.as_groups or user.as_user_extra)
        ),
    }
    for mistake, made in mistakes.items():
        if made:
            raise SourceError(mistake)


def _credentials(
    cluster: KubeconfigCluster, user: KubeconfigUser, fresh_until: float, with_plugin: bool
) -> Credentials:
    """Return the credentials of a user; run the credential plugin or identity provider only if `with_plugin` is set."""
    token = _token(user)
    header = f"Bearer {token}" if token else _basic(user)
    server = ServerConfig(
        url=cluster.server,
        verify=not cluster.insecure_skip_tls_verify,
        ca_file=_pem_file(cluster.certificate_authority_data, cluster.certificate_authority),
        cert_file=_pem_file(user.client_certificate_data, user.client_certificate),
        key_file=_pem_file(user.client_key_data, user.client_key),
        tls_server_name=cluster.tls_server_name or None,
    )
    impersonation = impersonation_headers(user)
    credentials = Credentials(
        server, fresh_until, lambda: header, impersonation, not cluster.disable_compression
    )
    if not with_plugin:
        return replace(credentials, fresh_until=-math.inf)
    if user.auth_provider is not None:
        renewed = plugin.provider_authorization(user.auth_provider)
        return replace(credentials, authorization=renewed or credentials.authorization, fresh_until=math.inf)
    if user.exec is not None and not token:
        return _with_plugin(credentials, user.exec, cluster)
    return credentials


def _token(user: KubeconfigUser) -> str:
    """Return the token; that of a file wins."""
    if not user.token_file:
        # A line break at its end is illegal in a header.
        return user.token.strip()
    try:
        if token := Path(user.token_file).read_text().strip():
            return token
        reason = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        reason = _reason(error)
    if user.token:
        return user.token.strip()
    raise SourceError(f"cannot read the token in {user.token_file}: {reason}")


def _basic(user: KubeconfigUser) -> str:
    if not user.username:
        return ""
    return make_headers(basic_auth=f"{user.username}:{user.password}")["authorization"]


def _with_plugin(
    credentials: Credentials, settings: dict[str, Any], cluster: KubeconfigCluster
) -> Credentials:
    """Run the credential plugin. Without a date, only a 401 shows that its credentials have expired."""
    try:
        program = msgspec.convert(settings, plugin.CredentialPlugin)
    except msgspec.ValidationError as error:
        raise SourceError(f"invalid exec: {error}") from None
    found = plugin.run(program, _cluster_info(cluster) if program.provideClusterInfo else None)
    left = found.seconds_left()
    credentials = replace(
        credentials, fresh_until=math.inf if left is None else time.monotonic() + left - _EARLY
    )
    if found.token:
        header = f"Bearer {found.token.strip()}"
        credentials = replace(credentials, authorization=lambda: header)
    if found.clientCertificateData and found.clientKeyData:
        cert_file = _temporary_file(found.clientCertificateData.encode())
        key_file = _temporary_file(found.clientKeyData.encode())
        server = replace(credentials.server, cert_file=cert_file, key_file=key_file)
        credentials = replace(credentials, server=server)
    return credentials


def _cluster_info(cluster: KubeconfigCluster) -> dict[str, Any]:
    """Return the cluster in the form of the ExecCredential API: with the contents of files, not their paths."""
    info: dict[str, Any] = msgspec.to_builtins(cluster)
    if authority := info.pop("certificate-authority", ""):
        try:
            content = Path(authority).read_bytes()
        except OSError as error:
            raise SourceError(f"cannot read the certificate authority: {error}") from None
        info["certificate-authority-data"] = base64.b64encode(content).decode()
    for extension in info.pop("extensions", ()):
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info


def _pem_file(data: str, path: str) -> str | None:
    """Return the path of a file with the decoded `data`, or that of a file that must exist; None without both."""
    if data:
        try:
            return _temporary_file(base64.b64decode(data))
        except ValueError as error:
            raise SourceError(f"certificate data or key data is not base64: {error}") from None
    if path and not Path(path).is_file():
        raise SourceError(f"file does not exist: {path}")
    return path or None


def _temporary_file(content: bytes) -> str:
    """Return the path of a file with this content, which exists until the process ends: TLS reads files only."""
    path = _temporary_files.get(content, "")
    if not Path(path).is_file():
        if not _temporary_files:
            atexit.register(_remove_temporary_files)
        number, path = tempfile.mkstemp()
        with os.fdopen(number, "wb") as file:
            file.write(content)
        _temporary_files[content] = path
    return path


def _remove_temporary_files() -> None:
    for path in _temporary_files.values():
        Path(path).unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, SourceError | OSError | msgspec.ValidationError)
        else f"{type(error).__name__}: {text}"
    )


def impersonation_headers(user: KubeconfigUser) -> tuple[tuple[str, str], ...]:
    """Return the headers for `as` and its siblings in a kubeconfig, one for each group and value; none without `as`."""
    if not user.as_:
        return ()
    headers = [("Impersonate-User", user.as_)]
    if user.as_uid:
        headers.append(("Impersonate-Uid", user.as_uid))
    headers += [("Impersonate-Group", group) for group in user.as_groups]
    for key, values in user.as_user_extra.items():
        headers += [(f"Impersonate-Extra-{_escaped(key)}", value) for value in values]
    # The client encodes headers as Latin-1, the server decodes them as UTF-8.
    return tuple((name, value.encode().decode("latin-1")) for name, value in headers)


def _escaped(key: str) -> str:
    return "".join(chr(byte) if byte in _LEGAL else f"%{byte:02X}" for byte in key.encode())
