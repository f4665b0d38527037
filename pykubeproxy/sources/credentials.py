"""The server of requests, and the credentials for it."""

from collections.abc import Callable

import msgspec
from urllib3 import HTTPHeaderDict
from urllib3.util import make_headers

from pykubeproxy.sources.proxies import user_of
from pykubeproxy.sources.watch import SourceError


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
