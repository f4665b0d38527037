"""The sections of a bundle on a node: what they run and read."""

import contextlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import pykubeproxy
from pykubeproxy.bundle import layout
from pykubeproxy.bundle.layout import tables_file
from pykubeproxy.bundle.write import BundleSection, Content
from pykubeproxy.kernel import Backend, KernelError, NotPermitted, Runner, open_iptables
from pykubeproxy.kernel.conntrack import count_entries, flow_lines
from pykubeproxy.kernel.errors import Failed
from pykubeproxy.kernel.iptables import find_tools
from pykubeproxy.kernel.network import all_routes, interfaces, local_addresses, routing_rules
from pykubeproxy.kernel.recent import recent_lines
from pykubeproxy.objects import Family

# How long a command may make no progress. In all it may take ten times as long.
_SECONDS = 20
_MOST_SERVICES = 100
_SYSCTLS = Path("/proc/sys")
# Settings that decide where packets go, as paths below /proc/sys.
_SETTINGS = (
    "net/bridge/bridge-nf-call-*tables",
    "net/core/somaxconn",
    *(
        f"net/ipv4/conf/*/{setting}"
        for setting in ("arp_announce", "arp_ignore", "forwarding", "route_localnet")
    ),
    *(f"net/ipv4/conf/*/{setting}" for setting in ("rp_filter", "src_valid_mark")),
    *(f"net/ipv4/{setting}" for setting in ("ip_forward", "ip_local_port_range", "ip_local_reserved_ports")),
    "net/ipv4/ip_nonlocal_bind",
    "net/ipv4/vs/conntrack",
    *(f"net/ipv6/conf/*/{setting}" for setting in ("disable_ipv6", "forwarding")),
    "net/netfilter/nf_conntrack_*",
)

# Returns the body of a page of the agent, by path and query. Raises an exception that says why there is none.
Fetch = Callable[[str, dict[str, str]], bytes]


def node_sections(
    runner: Runner | None = None, settings: Path = _SYSCTLS, *, with_flows: bool = False
) -> Iterator[BundleSection]:
    """Yield the sections about the node that this program runs on; `with_flows` adds addresses of clients."""
    runner = runner or Runner()
    for backend in Backend:
        for family in Family:
            name = tables_file(family, backend.value)
            program = name.removesuffix(".txt")
            yield BundleSection(name, f"{program} --counters", partial(_tables, backend, family, runner))
    yield BundleSection(layout.NFT_RULESET, "nft -j list ruleset", partial(_nft_ruleset, runner))
    yield BundleSection(layout.ADDRESSES, "rtnetlink", partial(_of_both_families, local_addresses))
    yield BundleSection(layout.INTERFACES, "rtnetlink", lambda content: content.write_json(interfaces()))
    yield BundleSection(layout.ROUTES, "rtnetlink", partial(_of_both_families, all_routes))
    yield BundleSection(layout.ROUTING_RULES, "rtnetlink", partial(_of_both_families, routing_rules))
    yield BundleSection(layout.SYSCTLS, str(settings), partial(_settings, settings))
    yield BundleSection(layout.CONNTRACK, "nfnetlink", _connections)
    if with_flows:
        yield BundleSection(layout.FLOWS, "nfnetlink, /proc/net/xt_recent", _flows)
    yield BundleSection(layout.VERSIONS, "--version of each program", partial(_versions, runner))


def agent_sections(url: str, fetch: Fetch) -> Iterator[BundleSection]:
    """Yield the sections about the agent with this metrics address."""
    pages: tuple[tuple[str, str, dict[str, str]], ...] = (
        (layout.STATUS, "/statusz", {}),
        (layout.OBJECTS, "/servicez", {"slices": "all"}),
        (layout.CONFIGURATION, "/configz", {}),
    )
    for name, path, query in pages:
        fields = "&".join(f"{key}={value}" for key, value in query.items())
        source = f"GET {url}{path}?{fields}" if fields else f"GET {url}{path}"
        yield BundleSection(name, source, partial(_page, fetch, path, query))
    yield BundleSection(
        layout.METRICS, f"GET {url}/metrics", lambda content: content.write(fetch("/metrics", {}))
    )


def _tables(backend: Backend, family: Family, runner: Runner, content: Content) -> None:
    open_iptables(backend, family, runner, _SECONDS).copy_saved(content.write)


def _nft_ruleset(runner: Runner, content: Content) -> None:
    outcome = runner.copy(("nft", "-j", "list", "ruleset"), content.write, _SECONDS)
    if "Operation not permitted" in outcome.stderr:
        raise NotPermitted("nft", "Operation not permitted")
    if outcome.exit_code:
        raise Failed("nft", outcome.exit_code, outcome.stderr.strip())


def _of_both_families(read: Callable[[Family], Iterable[object]], content: Content) -> None:
    content.write_json([item for family in Family for item in read(family)])


def _settings(root: Path, content: Content) -> None:
    """Write lines such as "net.ipv4.ip_forward = 1"; a setting that cannot be read is left out."""
    for pattern in _SETTINGS:
        for path in sorted(root.glob(pattern)):
            # As sysctl does, which swaps both signs: eth0.1 becomes eth0/1.
            name = str(path.relative_to(root)).translate(str.maketrans("./", "/."))
            with contextlib.suppress(OSError, UnicodeError):
                content.write(f"{name} = {' '.join(path.read_text().split())}\n".encode())


def _connections(content: Content) -> None:
    content.write_json({family.value: _connection_counts(family) for family in Family})


def _connection_counts(family: Family) -> dict[str, object]:
    counts = count_entries(family)
    totals: dict[tuple[str, str], int] = {}
    for (protocol, destination, _), number in counts.destinations.items():
        totals[protocol, destination] = totals.get((protocol, destination), 0) + number
    most = sorted(totals, key=lambda key: (-totals[key], key))[:_MOST_SERVICES]
    return {
        "entries": counts.states.total(),
        "states": [
            {"protocol": protocol, "state": state, "entries": number}
            for (protocol, state), number in sorted(counts.states.items())
        ],
        "services": [
            {
                "protocol": protocol,
                "destination": destination,
                "entries": totals[protocol, destination],
                "unreplied": counts.destinations[protocol, destination, False],
            }
            for protocol, destination in most
        ],
    }


def _flows(content: Content) -> None:
    for family in Family:
        for line in flow_lines(family):
            content.write(f"{line}\n".encode())
    for line in recent_lines():
        content.write(f"{line}\n".encode())


def _versions(runner: Runner, content: Content) -> None:
    kernel = platform.uname()
    content.write_json(
        {
            "pykubeproxy": pykubeproxy.__version__,
            "python": sys.version.split()[0],
            "kernel": f"{kernel.system} {kernel.release} {kernel.machine}",
            "kernelBuild": kernel.version,
            "distribution": _distribution(),
            **dict(_iptables_versions(runner)),
            "nft": _nft_version(runner),
            "libraries": dict(_libraries()),
        }
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _iptables_versions(runner: Runner) -> Iterator[tuple[str, str]]:
    for backend in Backend:
        try:
            version = ".".join(map(str, find_tools(backend, Family.IPV4, runner).version))
        except KernelError:
            version = ""
        yield f"iptables-{backend.value}", version


def _nft_version(runner: Runner) -> str:
    try:
        return runner.run(("nft", "--version"), seconds=_SECONDS).stdout.strip()
    except KernelError:
        return ""


def _libraries() -> Iterator[tuple[str, str]]:
    for name in ("kubernetes", "msgspec", "pyroute2", "python-iptables", "urllib3"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _page(fetch: Fetch, path: str, query: dict[str, str], content: Content) -> None:
    try:
        content.write_json_text(fetch(path, query))
    except ValueError:
        raise ValueError(
            f"the answer to {path} is not JSON; is it the metrics address of pykubeproxy?"
        ) from None
