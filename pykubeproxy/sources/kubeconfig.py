"""Read the cluster and the user of a kubeconfig's current context, as client-go does."""

import os
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password


class Kubeconfigs(msgspec.Struct, frozen=True):
    """Kubeconfigs to merge, and the context to use, "" for their current one.

    The first file with an entry of a name, or with a current context, wins. Missing files count as empty.
    """

    paths: tuple[str, ...]
    context: str = ""

    def __str__(self) -> str:
        return os.pathsep.join(self.paths)


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


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str = ""
    cluster: KubeconfigCluster = KubeconfigCluster()


class _NamedUser(msgspec.Struct):
    name: str = ""
    user: KubeconfigUser = KubeconfigUser()


class _NamedContext(msgspec.Struct):
    name: str = ""
    context: _Context = msgspec.field(default_factory=_Context)


class _File(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()


def current(content: object) -> tuple[KubeconfigCluster, KubeconfigUser]:
    """Return cluster and user of the current context of a decoded kubeconfig, empty where it names none.

    Raises SourceError.
    """
    if not isinstance(content, dict):
        raise SourceError("it is empty or not a mapping")
    try:
        file = msgspec.convert(_without_nulls(content), _File)
    except msgspec.ValidationError as error:
        raise SourceError(str(error)) from None
    contexts = {named.name: named.context for named in file.contexts}
    if file.current_context and file.current_context not in contexts:
        raise SourceError(f"it has no context {file.current_context!r}")
    context = contexts.get(file.current_context, _Context())
    clusters = {named.name: named.cluster for named in file.clusters}
    users = {named.name: named.user for named in file.users}
    return clusters.get(context.cluster, KubeconfigCluster()), users.get(context.user, KubeconfigUser())


def effective(
    cluster: KubeconfigCluster, user: KubeconfigUser, master: str
) -> tuple[KubeconfigCluster, KubeconfigUser]:
    """Return what applies to requests; `master` replaces the server unless it is empty.

    A server without a scheme gets https if there are settings for TLS, else http. Without TLS, the client sends no
    credentials. Raises SourceError.
    """
    if master:
        cluster = msgspec.structs.replace(cluster, server=master, tls_server_name="")
    _check(cluster, user)
    tls = cluster.has_authority or cluster.insecure_skip_tls_verify or user.has_certificate
    cluster = msgspec.structs.replace(cluster, server=server_url(cluster.server, tls=tls))
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


def server_url(server: str, *, tls: bool) -> str:
    """Return the URL for a server without a final slash; without a scheme, use https if `tls`. Raises SourceError."""
    complete = "://" in server
    try:
        url = urlsplit(server if complete else f"{'https' if tls else 'http'}://{server}")
        valid = url.scheme in ("http", "https") and url.hostname and url.port != 0 and " " not in server
    except ValueError:
        valid = False
    if not valid or not (complete or url.path in ("", "/")):
        shown = without_password(server if "//" in server else f"//{server}").removeprefix("//")
        raise SourceError(f"invalid API server address {shown!r}: use an http:// or https:// URL")
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"


def _check(cluster: KubeconfigCluster, user: KubeconfigUser) -> None:
    """Raise SourceError for settings that client-go refuses."""
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
        "as-uid, as-groups and as-user-extra need as": (
            not user.as_ and (user.as_uid or user.as_groups or user.as_user_extra)
        ),
    }
    for mistake, made in mistakes.items():
        if made:
            raise SourceError(mistake)


def _without_nulls(value: Any) -> Any:
    """Drop the nulls of mappings: as in client-go, they mean unset."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
