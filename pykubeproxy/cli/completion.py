"""`pykubeproxy completion`: shell completion of commands, options and names of Services."""

import re
from collections.abc import Iterable, Iterator

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class

from pykubeproxy.cli.help import command
from pykubeproxy.services.ports import PortName

_ROOTS = (("nat", "KUBE-SERVICES"), ("filter", "KUBE-SERVICES"), ("filter", "KUBE-EXTERNAL-SERVICES"))
# Shells may run what they complete: accept only DNS labels.
_LABEL = re.compile(r"[a-z0-9][-a-z0-9]*")
# A service port in the comment of a rule.
_TITLE = re.compile(rb"([a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*(?::[a-z0-9-]+)?)[ \0]")
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


@command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and names of Services.

    Names come from the agent on this node, or else from the live rules, which requires root.

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


def services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an argument of the form [NAMESPACE/]NAME[:PORT]."""
    namespace = ctx.params.get("namespace") or ""
    ports = [it for it in _service_ports() if namespace in ("", it.namespace)]
    if ":" in incomplete:
        name, _, port = incomplete.rpartition(":")
        matching = (it for it in ports if name in (it.service, str(it.service_key)))
        matches = {f"{name}:{it.port}" for it in matching if it.port and it.port.startswith(port)}
    else:
        full = {str(it.service_key) for it in ports} if not namespace else set()
        bare = {it.service for it in ports} if namespace or incomplete else set()
        matches = {name for name in full | bare if name.startswith(incomplete)}
    return [CompletionItem(name) for name in sorted(matches)]


def namespaces(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a namespace that has Services."""
    matches = {it.namespace for it in _service_ports() if it.namespace.startswith(incomplete)}
    return [CompletionItem(name) for name in sorted(matches)]


def _service_ports() -> Iterable[PortName]:
    """Return service ports with valid names; none on any failure, as completion must not print errors."""
    for read in (_from_agent, _from_rules):
        try:
            return [it for it in read() if _has_valid_names(it)]
        except Exception:  # noqa: S112
            continue
    return []


def _has_valid_names(port: PortName) -> bool:
    return all(map(_LABEL.fullmatch, (port.namespace, port.service, port.port or "0")))


def _from_agent() -> Iterator[PortName]:
    from pykubeproxy.agent.observe.object_documents import decode
    from pykubeproxy.cli.client import DEFAULT_URL, fetch

    for service in decode(fetch(DEFAULT_URL, "/servicez")).objects.services:
        for port in service.ports:
            yield PortName(service.namespace, service.name, port.name, port.protocol.value)


def _from_rules() -> Iterator[PortName]:
    from pykubeproxy import kernel
    from pykubeproxy.inspect.dump.model import find_ports
    from pykubeproxy.inspect.filter import ServiceFilter, parse_title
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
