"""Completing the names of Services: from the agent that runs on this node, else from the live rules."""

import re
from collections.abc import Iterable, Iterator

import click
from click.shell_completion import CompletionItem

from pykubeproxy.services.ports import PortName

_ROOTS = (("nat", "KUBE-SERVICES"), ("filter", "KUBE-SERVICES"), ("filter", "KUBE-EXTERNAL-SERVICES"))
# What shells get to see, for they may run what else it holds: DNS labels, and a port may have no name.
_LABEL = re.compile(r"[a-z0-9][-a-z0-9]*")
# A service port as comments of rules name it.
_TITLE = re.compile(rb"([a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*(?::[a-z0-9-]+)?)[ \0]")


def services(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For an argument that is a name, namespace/name, or either with ":port"."""
    namespace = ctx.params.get("namespace") or ""
    known = [it for it in _known() if namespace in ("", it.namespace)]
    if ":" in incomplete:
        name, _, port = incomplete.rpartition(":")
        matching = (it for it in known if name in _spellings(it) and it.port.startswith(port))
        found = {f"{name}:{it.port}" for it in matching if it.port}
    else:
        # A name alone is completed as it was begun.
        full = {f"{it.namespace}/{it.service}" for it in known} if not namespace else set()
        bare = {it.service for it in known} if namespace or incomplete else set()
        found = {it for it in full | bare if it.startswith(incomplete)}
    return [CompletionItem(it) for it in sorted(found)]


def namespaces(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For an option that is a namespace."""
    found = {it.namespace for it in _known() if it.namespace.startswith(incomplete)}
    return [CompletionItem(it) for it in sorted(found)]


def _spellings(it: PortName) -> tuple[str, str]:
    return it.service, f"{it.namespace}/{it.service}"


def _known() -> Iterable[PortName]:
    """All service ports; none if there is nobody to ask, for whoever types waits for no error.

    Whatever listens at the agent's address while there is no agent, a line that is typed gets nothing but names of it.
    """
    try:
        return [it for it in _of_agent() if _is_named(it)]
    except Exception:
        try:
            return [it for it in _of_rules() if _is_named(it)]
        except Exception:
            return []


def _is_named(it: PortName) -> bool:
    return all(map(_LABEL.fullmatch, (it.namespace, it.service, it.port or "0")))


def _of_agent() -> Iterator[PortName]:
    """Raises NoAnswer, ValueError."""
    from pykubeproxy.agent.observe.object_documents import decode
    from pykubeproxy.cli.asking import DEFAULT_URL, ask

    for it in decode(ask(DEFAULT_URL, "/servicez")).objects.services:
        for port in it.ports:
            yield PortName(it.namespace, it.name, port.name, port.protocol.value)


def _of_rules() -> Iterator[PortName]:
    """From the comments of live rules. Raises KernelError, OSError."""
    from pykubeproxy import kernel
    from pykubeproxy.inspect.dump import find
    from pykubeproxy.inspect.wanted import Wanted
    from pykubeproxy.kernel.chains import words_below
    from pykubeproxy.objects import Family
    from pykubeproxy.rules.skeleton import NAT_SERVICES

    backend = kernel.choose("auto", holding=NAT_SERVICES)
    for family in Family:
        if backend is kernel.Backend.LEGACY:
            yield from find(kernel.open_iptables(backend, family).save_counted()[0], Wanted())
            continue
        for table, root in _ROOTS:
            for title in words_below(family, table, root, _TITLE):
                namespace, _, rest = title.partition("/")
                service, _, port = rest.partition(":")
                yield PortName(namespace, service, port, "TCP")
