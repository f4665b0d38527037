"""Shell completion of commands, options and names: `pykubeproxy completion`, and kubectl_complete-pykubeproxy.

Names come from the files of -f, --rules and --bundle, from the agent, from live rules, or from an API server.
"""

import gzip
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import BashComplete, CompletionItem, ShellComplete, get_completion_class

from pykubeproxy.cli.help import command
from pykubeproxy.inspect.targets import KIND_PREFIXES, TargetKind
from pykubeproxy.objects import EndpointSlice, Key, Kind, Node, Service
from pykubeproxy.services.ports import PortName

_ROOTS = (("nat", "KUBE-SERVICES"), ("filter", "KUBE-SERVICES"), ("filter", "KUBE-EXTERNAL-SERVICES"))
# Shells may run what they complete: accept only DNS labels, for pods and nodes with dots.
_LABEL = re.compile(r"[a-z0-9][-a-z0-9]*")
_SUBDOMAIN = re.compile(r"[a-z0-9][-.a-z0-9]*")
# A completion must not take seconds: larger files give no names.
_MOST_JSON, _MOST_YAML, _MOST_RULES = 64 << 20, 1 << 20, 64 << 20
_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BUNDLE = 8 << 20  # compressed
_GZIP = b"\x1f\x8b"
# A service port in the comment of a saved rule: "default/web:http cluster IP" or "default/web:http -> 10.0.0.1:80".
_SAVED_TITLE = re.compile(rb'--comment "?([a-z0-9][-a-z0-9]*)/([a-z0-9][-a-z0-9]*)(?::([-a-z0-9]+))?[ "]')
# Directives to kubectl: do not complete names of files, or do.
_NO_FILES, _FILES = ":4", ":0"
# A service port at the beginning of a rule's comment, which follows the zero byte of an attribute's header.
_TITLE = re.compile(rb"\0([a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*(?::[a-z0-9-]+)?)[ \0]")
# In bash a colon ends a word, so bash gets only the part of "ns/name:port" after the last colon.
_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value last
    # The letter preserves a trailing space.
    local -a words=(${line}x)
    last=${words[-1]%%x}
    local ahead=""
    if [[ $COMP_WORDBREAKS == *:* && $last == *:* ]]; then
        ahead=${last%%"${last##*:}"}
    fi
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$ahead"}") ;;
        esac
    done < <(COMP_WORDS=$line COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class KnownNames(NamedTuple):
    """Service ports, pods and nodes; names that occur twice may be there twice."""

    ports: Sequence[PortName] = ()
    pods: Sequence[Key] = ()
    nodes: Sequence[str] = ()


@command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and the names of Services, pods and nodes.

    Names come from the files of -f, --rules and --bundle if the command line has them before the name; else from the
    agent on this node, or from the live rules, which requires root. Rules name Services only.

    \b
    pykubeproxy completion bash > /etc/bash_completion.d/pykubeproxy
    pykubeproxy completion zsh > /usr/local/share/zsh/site-functions/_pykubeproxy
    pykubeproxy completion fish > ~/.config/fish/completions/pykubeproxy.fish
    """
    class_ = _Bash if shell == "bash" else get_completion_class(shell)
    assert class_ is not None, "click knows these shells"
    click.echo(class_(ctx.find_root().command, {}, "pykubeproxy", "_PYKUBEPROXY_COMPLETE").source())


class _Bash(BashComplete):
    source_template = _BASH

    @classmethod
    def _check_version(cls) -> None:
        """Skip click's check of the local bash: the script may be for another machine."""


def main() -> None:
    """Print completions for the arguments of this program, kubectl_complete-pykubeproxy, which kubectl runs.

    They are those of the plugin, the last one as far as it is typed. The last line is a directive, as for the completion
    of kubectl itself.
    """
    *arguments, incomplete = sys.argv[1:] or [""]
    for line in plugin_completions(arguments, incomplete):
        sys.stdout.write(f"{line}\n")


def plugin_completions(arguments: list[str], incomplete: str) -> list[str]:
    """Return the completions of a word after these arguments of the plugin, and the directive."""
    from pykubeproxy.cli.kubectl import plugin

    items = ShellComplete(plugin, {}, "kubectl pykubeproxy", "").get_completions(arguments, incomplete)
    plain = [item for item in items if item.type == "plain"]
    described = [f"{item.value}\t{item.help}" if item.help else str(item.value) for item in plain]
    return [*described, _FILES if len(plain) < len(items) else _NO_FILES]


def services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a Service with an optional port, in the form that was begun: by default [NAMESPACE/]NAME."""
    return _items(_services(ctx, incomplete))


def sources(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the source of a packet: pod/[NAMESPACE/]NAME or node/NAME."""
    return _items(_pods_and_nodes(ctx, incomplete))


def destinations(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the destination of a packet: svc/[NAMESPACE/]NAME[:PORT], NAME.NAMESPACE[:PORT], a pod or a node."""
    if any(mark in incomplete for mark in "/.") and _begun_kind(incomplete) is None:
        return _items(_services(ctx, incomplete))
    prefixed = {*_services(ctx, incomplete, "svc")} if "svc".startswith(incomplete.partition("/")[0]) else ()
    by_word = _services(ctx, incomplete) if _begun_kind(incomplete) is TargetKind.SERVICE else ()
    return _items({*prefixed, *by_word, *_pods_and_nodes(ctx, incomplete)})


def namespaces(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a namespace that has Services."""
    return _items(port.namespace for port in _service_ports(ctx) if port.namespace.startswith(incomplete))


def nodes(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a Node."""
    return _items(node for node in _known(ctx, {TargetKind.NODE}).nodes if node.startswith(incomplete))


def _items(values: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(value) for value in sorted(set(values))]


def _begun_kind(incomplete: str) -> TargetKind | None:
    """Return the kind that a prefix such as "svc/" names."""
    prefix, slash, _ = incomplete.partition("/")
    return KIND_PREFIXES.get(prefix) if slash else None


def _services(ctx: click.Context, incomplete: str, prefix: str = "") -> Iterator[str]:
    """Yield Services, or after a colon their ports, in the form that was begun; `prefix` stands before the others."""
    namespace = ctx.params.get("namespace") or ""
    if _begun_kind(incomplete) is TargetKind.SERVICE:
        prefix = incomplete.partition("/")[0]
    before, colon, port = incomplete.partition(":")
    for port_name in _service_ports(ctx):
        if namespace not in ("", port_name.namespace):
            continue
        spelled = {f"{port_name.service}.{port_name.namespace}"} if "." in before else set()
        path = str(port_name.service_key)
        if prefix:
            spelled |= {f"{prefix}/{path}", *([f"{prefix}/{port_name.service}"] if namespace else [])}
        else:
            spelled |= {path} if not namespace or "/" in before else set()
            # The plugin takes a lone name for one in the namespace of the context.
            spelled |= {port_name.service} if namespace or (incomplete and not _of_plugin(ctx)) else set()
        if not colon:
            yield from (name for name in spelled if name.startswith(before))
        elif before in spelled and port_name.port.startswith(port) and port_name.port:
            yield f"{before}:{port_name.port}"


def _pods_and_nodes(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """Yield pods and nodes in the form that was begun."""
    head, slash, _ = incomplete.partition("/")
    begun = [head] if slash else [word for word in ("pod", "node") if word.startswith(head)]
    words = {KIND_PREFIXES.get(word): word for word in begun}
    if not words.keys() & {TargetKind.POD, TargetKind.NODE}:
        return
    known, spelled = _known(ctx, words), list[str]()
    if word := words.get(TargetKind.POD):
        here = [key.name for key in known.pods if key.namespace == ctx.params.get("namespace")]
        spelled += (f"{word}/{name}" for name in (*map(str, known.pods), *here))
    if word := words.get(TargetKind.NODE):
        spelled += (f"{word}/{node}" for node in known.nodes)
    yield from (name for name in spelled if name.startswith(incomplete))


def _service_ports(ctx: click.Context) -> Sequence[PortName]:
    return _known(ctx, {TargetKind.SERVICE}).ports


def _known(ctx: click.Context, kinds: Collection[TargetKind | None]) -> KnownNames:
    """Return valid names of these kinds from the place that the command line names, or its default.

    Return none on any failure, as completion must not print errors.
    """
    for read in _places(ctx, kinds):
        try:
            return _valid(read())
        except Exception:  # noqa: S112
            continue
    return KnownNames()


def _of_plugin(ctx: click.Context) -> bool:
    return any(param.name == "context_name" for param in ctx.command.params)


def _places(ctx: click.Context, kinds: Collection[TargetKind | None]) -> Sequence[Callable[[], KnownNames]]:
    """Return what reads names: the API server for the plugin; else the files, or the agent and then the live rules."""
    if _of_plugin(ctx):
        return (lambda: _from_cluster(ctx, kinds),)
    path, rules, bundle = (ctx.params.get(option) for option in ("filename", "files", "bundle_file"))
    if path:
        return (lambda: _names_in_objects(path),)
    if rules:
        return (lambda: _names_in_rules(rules),)
    if bundle:
        return (lambda: _from_bundle(bundle),)
    return (lambda: _from_agent(TargetKind.POD in kinds), _from_rules)


def _valid(names: KnownNames) -> KnownNames:
    return KnownNames(
        ports=[port for port in names.ports if _are(_LABEL, port.namespace, port.service, port.port or "0")],
        pods=[pod for pod in names.pods if _are(_LABEL, pod.namespace) and _are(_SUBDOMAIN, pod.name)],
        nodes=[node for node in names.nodes if _are(_SUBDOMAIN, node)],
    )


def _are(pattern: re.Pattern[str], *names: str) -> bool:
    return all(map(pattern.fullmatch, names))


def _from_cluster(ctx: click.Context, kinds: Collection[TargetKind | None]) -> KnownNames:
    from pykubeproxy.cli.cluster import ClusterOptions
    from pykubeproxy.sources.queries import list_kind

    given = {name: ctx.params[name] for name in ClusterOptions._fields if ctx.params.get(name)}
    client = ClusterOptions(**{"kubeconfig": "", "context_name": "", **given}).client()
    found = KnownNames()
    if TargetKind.NODE in kinds:
        found = found._replace(nodes=[node.name for node in list_kind(client, Kind.NODE).objects])
    if TargetKind.POD in kinds:
        from pykubeproxy.sources.pods import list_pods

        found = found._replace(pods=[pod.key for pod in list_pods(client)])
    if TargetKind.SERVICE in kinds:
        listed = list_kind(client, Kind.SERVICE).objects
        services = [service for service in listed if isinstance(service, Service)]
        found = found._replace(ports=_names_of(services).ports)
    return found


def _from_agent(with_pods: bool) -> KnownNames:
    from pykubeproxy.nodes.agent import DEFAULT_URL, fetch

    return _names_in_page(fetch(DEFAULT_URL, "/servicez", **({"slices": "all"} if with_pods else {})))


def _from_bundle(path: str) -> KnownNames:
    """Return the names of the objects in a bundle; without objects that this version can read, those in its rules."""
    from pykubeproxy.bundle.layout import OBJECTS, TABLES
    from pykubeproxy.bundle.read import read_bundle

    if not Path(path).is_file() or Path(path).stat().st_size > _MOST_BUNDLE:
        raise ValueError(f"{path} is no small file")
    with Path(path).open("rb") as file:
        bundle = read_bundle(file, path)
    with suppress(KeyError, ValueError):
        return _names_in_page(bundle.files[OBJECTS])
    return _names_in_texts(bundle.files[table] for table in TABLES if table in bundle.files)


def _names_in_page(page: bytes) -> KnownNames:
    from pykubeproxy.pages.servicez import decode

    objects = decode(page).objects
    return _names_of(objects.services, objects.slices, [objects.node.name])


def _names_of(
    services: Iterable[Service], slices: Iterable[EndpointSlice] = (), nodes: Sequence[str] = ()
) -> KnownNames:
    endpoints = [(slice_.namespace, endpoint) for slice_ in slices for endpoint in slice_.endpoints]
    return KnownNames(
        ports=[
            PortName(*service.key, name, "")
            for service in services
            for name in [port.name or str(port.port) for port in service.ports] or [""]
        ],
        pods=[Key(namespace, endpoint.pod) for namespace, endpoint in endpoints if endpoint.pod],
        nodes=nodes,
    )


def _from_rules() -> KnownNames:
    return KnownNames(list(_live_ports()))


def _live_ports() -> Iterator[PortName]:
    from pykubeproxy import kernel
    from pykubeproxy.inspect.dump.model import find_ports
    from pykubeproxy.inspect.targets import ServiceFilter, parse_title
    from pykubeproxy.kernel.nftables import texts_below
    from pykubeproxy.objects import Family
    from pykubeproxy.rules.skeleton import NAT_SERVICES

    backend = kernel.choose_backend("auto", holding=NAT_SERVICES)
    for family in Family:
        if backend is kernel.Backend.LEGACY:
            yield from find_ports(kernel.open_iptables(backend, family).save_counted()[0], ServiceFilter())
            continue
        for table, root in _ROOTS:
            for title in texts_below(family, table, root, _TITLE):
                yield parse_title(title, "TCP")


def _names_in_objects(path: str) -> KnownNames:
    """Return the names in a file or a folder with objects. Raises ValueError, OSError and SourceError."""
    from pykubeproxy.sources.manifests import load_manifests

    root = Path(path)
    files = [file for file in root.iterdir() if file.suffix in _SUFFIXES] if root.is_dir() else [root]
    if not all(map(_is_quick, files)):
        raise ValueError(f"{path} takes too long to read")
    found = load_manifests(path)
    services = [object_ for object_ in found.objects if isinstance(object_, Service)]
    slices = [object_ for object_ in found.objects if isinstance(object_, EndpointSlice)]
    nodes = [object_.name for object_ in found.objects if isinstance(object_, Node)]
    names = _names_of(services, slices, nodes)
    return names._replace(pods=[*names.pods, *(pod.key for pod in found.pods)])


def _is_quick(path: Path) -> bool:
    """Return whether a regular file takes less than seconds to decode."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        most = _MOST_JSON if file.read(1) in (b"{", b"[") else _MOST_YAML
    return path.stat().st_size <= most


def _names_in_rules(paths: Sequence[str]) -> KnownNames:
    return _names_in_texts(_rules(Path(path)) for path in paths)


def _names_in_texts(texts: Iterable[bytes]) -> KnownNames:
    """Return the service ports that comments in output of iptables-save name."""
    found = {match.groups(default=b"") for text in texts for match in _SAVED_TITLE.finditer(text)}
    ports = [(name.decode() for name in names) for names in found]
    return KnownNames([PortName(namespace, name, port, "TCP") for namespace, name, port in ports])


def _rules(path: Path) -> bytes:
    if path.stat().st_size > _MOST_RULES:
        return b""
    raw = path.read_bytes()
    if raw.startswith(_GZIP):
        with gzip.open(path) as unpacked:
            return unpacked.read(_MOST_RULES)
    return raw
