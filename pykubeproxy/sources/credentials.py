"""The values that say which server gets requests, and with which credentials."""

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from urllib3 import HTTPHeaderDict
from urllib3.util import make_headers

from pykubeproxy.sources.proxies import shown, user_of
from pykubeproxy.sources.watch import SourceError


class Overrides(msgspec.Struct, frozen=True):
    """What replaces settings of a kubeconfig, as kubectl's options of these names do; empty values replace nothing.

    `cluster` and `user` name other entries than those of the context.
    """

    server: str = ""
    cluster: str = ""
    user: str = ""
    token: str = ""
    as_user: str = ""
    as_groups: tuple[str, ...] = ()
    insecure_skip_tls_verify: bool = False


class Kubeconfigs(msgspec.Struct, frozen=True):
    """Kubeconfigs to merge, the context to use, "" for their current one, and what replaces its settings.

    The first file with an entry of a name, or with a current context, wins. Missing files count as empty.
    """

    paths: tuple[str, ...]
    context: str = ""
    overrides: Overrides = Overrides()

    def __str__(self) -> str:
        return os.pathsep.join(self.paths)

    def files(self) -> tuple[Path, ...]:
        return tuple(Path(path).expanduser() for path in self.paths)


class ServerConfig(msgspec.Struct, frozen=True):
    """The URLs of an API server and of the proxy in front of it, and the settings of TLS, with paths of PEM files.

    Without `ca_file`, the system's certificate authorities count; nothing verifies the server unless `verify` is set.
    """

    url: str
    proxy: str | None = None
    verify: bool = True
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    tls_server_name: str | None = None


class Credentials(msgspec.Struct, frozen=True):
    """Credentials and the server they are for. They need renewal after `fresh_until` on the monotonic clock.

    `authorization` returns the header of that name, empty without one; it may take as long as an identity provider, and
    raise SourceError. `impersonation` are the headers that name the user to impersonate. `compression` is False if the
    kubeconfig disables compressed responses.
    """

    server: ServerConfig
    fresh_until: float
    authorization: Callable[[], str] = str
    impersonation: tuple[tuple[str, str], ...] = ()
    compression: bool = True

    def headers(self) -> HTTPHeaderDict:
        """Return the headers that authenticate a request, if there is a token or user name, and those to impersonate.

        Raises SourceError.
        """
        headers = HTTPHeaderDict(self.impersonation)
        user, password = user_of(self.server.url)
        if authorization := self.authorization():
            # The HTTP client's own error would show the token.
            if not (authorization.isascii() and authorization.isprintable()):
                raise SourceError(
                    "invalid token: it has a line break or another character illegal in a header"
                )
            headers["authorization"] = authorization
        elif user:
            headers.update(make_headers(basic_auth=f"{user}:{password}"))
        return headers


def server_url(server: str, *, tls: bool) -> str:
    """Return the URL for a server without a final slash; without a scheme, use https if `tls`. Raises SourceError."""
    complete = "://" in server
    try:
        url = urlsplit(server if complete else f"{'https' if tls else 'http'}://{server}")
        valid = url.scheme in ("http", "https") and url.hostname and url.port != 0 and " " not in server
    except ValueError:
        valid = False
    if not valid or not (complete or url.path in ("", "/")):
        raise SourceError(f"invalid API server address {shown(server)!r}: use an http:// or https:// URL")
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
