"""Choose the proxy in front of an API server as client-go does: proxy-url of the kubeconfig, else the environment."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from pykubeproxy.objects.check import cidr
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

SOCKS = ("socks5", "socks5h")
_PORTS = {"http": "80", "https": "443"}
_ADVICE = "use an http://, https:// or socks5:// URL"


def proxy_for(server: str, proxy_url: str, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy for the URL of a server, None without a proxy.

    `proxy_url` is that of the kubeconfig, or empty; NO_PROXY does not apply to it. Raises SourceError.
    """
    if not proxy_url:
        return _from_environment(urlsplit(server), environment)
    if _is_url(proxy_url, ("http", "https", "socks5")):
        return proxy_url
    raise SourceError(f"cannot use proxy-url {_shown(proxy_url)}: {_ADVICE}")


def user_of(url: str) -> tuple[str, str]:
    """Return the user and the password in a URL, empty if there are none."""
    parts = urlsplit(url)
    return unquote(parts.username or ""), unquote(parts.password or "")


def bypasses_proxy(server: SplitResult, no_proxy: str) -> bool:
    """Return whether NO_PROXY excludes a server. localhost and loopback addresses are always excluded."""
    host, port = server.hostname or "", str(server.port or _PORTS[server.scheme])
    ip = _ip(host)
    if host == "localhost" or (ip and ip.is_loopback):
        return True
    entries = [entry.strip().lower() for entry in no_proxy.split(",")]
    return "*" in entries or any(_matches(entry, host, port, ip) for entry in entries)


def _from_environment(server: SplitResult, environment: Mapping[str, str]) -> str | None:
    name = f"{server.scheme.upper()}_PROXY"
    value = _variable(environment, name)
    # client-go ignores a value with a space too.
    if not _is_word(value) or bypasses_proxy(server, _variable(environment, "NO_PROXY")):
        return None
    proxy = value if "://" in value else f"http://{value}"
    if name == "HTTP_PROXY" and environment.get("REQUEST_METHOD"):
        # In a CGI program, a client of the web server sets this variable, by the header "Proxy".
        raise SourceError("cannot use HTTP_PROXY while REQUEST_METHOD is set, as in a CGI program: unset one")
    if not _is_url(proxy, ("http", "https", *SOCKS)):
        raise SourceError(f"cannot use {name}={_shown(proxy)}: {_ADVICE}")
    return proxy


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name) or environment.get(name.lower(), "")


def _is_word(text: str) -> bool:
    return bool(text) and text.isprintable() and " " not in text


def _is_url(text: str, schemes: tuple[str, ...]) -> bool:
    try:
        url = urlsplit(text)
        return _is_word(text) and url.scheme in schemes and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _shown(proxy: str) -> str:
    return without_password(proxy if "//" in proxy else f"//{proxy}").removeprefix("//")


def _matches(entry: str, host: str, port: str, ip: _Ip | None) -> bool:
    """Return whether an entry of NO_PROXY names a host: a network, or an address or domain with an optional port.

    A domain includes its subdomains; with a leading dot, it means only these.
    """
    try:
        network = ipaddress.ip_network(cidr(entry, "NO_PROXY"))
    except ValueError:
        pass
    else:
        return ip is not None and ip in network
    name, only_port = _split(entry)
    if not name or only_port not in ("", port):
        return False
    if ip:
        return _ip(name) == ip
    name = name.removeprefix("*") if name.startswith("*.") else name
    return host.endswith(name) if name.startswith(".") else f".{host}".endswith(f".{name}")


def _split(entry: str) -> tuple[str, str]:
    """Return the host and the port of an entry of NO_PROXY; the port may be missing."""
    name, colon, port = entry.rpartition(":")
    if colon and name.startswith("[") and name.endswith("]"):
        return name[1:-1], port
    return (name, port) if colon and ":" not in name else (entry, "")


def _ip(host: str) -> _Ip | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
