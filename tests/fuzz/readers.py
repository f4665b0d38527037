"""Whatever reads foreign input, each given any bytes: it fails only for a defect."""

import contextlib
import json
from collections.abc import Callable, Sequence
from unittest import mock

import click
import msgspec

from pykubeproxy import config
from pykubeproxy.agent import http
from pykubeproxy.agent.observe import object_documents as told
from pykubeproxy.agent.observe import pages, status
from pykubeproxy.cli import explain, terminal
from pykubeproxy.inspect import explain_forms, matching
from pykubeproxy.inspect.dump import views
from pykubeproxy.inspect.forms import document
from pykubeproxy.inspect.packet import Host, Packet
from pykubeproxy.inspect.rule import read as read_rule
from pykubeproxy.inspect.trace import walk
from pykubeproxy.inspect.trace_forms import text as trace_text
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.kernel import chains, conntrack, netfilter, nfacct
from pykubeproxy.kernel.iptables import canonical
from pykubeproxy.objects import Family, Kind, Undecodable, Updated, decode
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.rules.programmed import Programmed
from pykubeproxy.rules.removal import removal
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import parse
from pykubeproxy.rules.saved import read_counted
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import documents, wire
from pykubeproxy.sources.failures import Failure
from tests.grammar import violations
from tests.junk import WHOLE
from tests.strategies import NODE

CONFIG = config.load(None, {}).config


def an_object(kind: Kind) -> Callable[[bytes], None]:
    def run(raw: bytes) -> None:
        """An object is decoded or refused in one line; what it leads to is of the forms that rules have."""
        try:
            made = decode(kind, raw)
        except Undecodable as error:
            assert str(error).isprintable()
            return
        cluster = Cluster()
        for other, whole in WHOLE.items():
            if other is not kind:
                cluster.apply(Updated(decode(other, json.dumps(whole).encode())))
        cluster.apply(Updated(made))
        for family in Family:
            on = terms(CONFIG, NODE, cluster.node(NODE), KernelFacts(), family)
            assert not violations(full_input(render(cluster, on), on.options))

    return run


def watch(raw: bytes) -> None:
    """The lines of a watch, and a page of a list."""
    with contextlib.suppress(Failure):
        for line in wire.lines(iter((raw[: len(raw) // 2], raw[len(raw) // 2 :]))):
            with contextlib.suppress(Failure, Undecodable):
                event = wire.event(line)
                wire.meta(event.object)
                decode(Kind.SERVICE, event.object)
    with contextlib.suppress(Failure):
        for it in wire.page(iter((raw,)), Kind.SERVICE).items or ():
            wire.meta(it)


def configuration(raw: bytes) -> None:
    """A configuration is refused in one line, or writes itself down as it was read."""
    try:
        loaded = config.load(raw, {})
    except config.ConfigError as error:
        assert str(error).isprintable()
        return
    assert all(warning.isprintable() for warning in loaded.warnings)
    assert config.load(config.dump(loaded.config), {}).config == loaded.config
    for family in Family:
        on = terms(loaded.config, NODE, None, KernelFacts(), family)
        assert not violations(full_input(render(Cluster(), on), on.options))


def manifests(raw: bytes) -> None:
    """Documents of YAML or JSON: objects, and one line for each that is none."""
    for name in ("objects.yaml", "objects.json"):
        try:
            contents = documents.read(raw, name)
        except documents.Unparsable as error:
            assert str(error).isprintable()
        else:
            assert all(line.isprintable() for line in (*contents.complaints, *contents.skipped))


def saved(raw: bytes) -> None:
    """What iptables-save prints, read in both ways, and what would be done about it."""
    text = canonical(raw.decode("utf-8", "surrogateescape"))
    # No kernel holds chains that lead back to themselves.
    with contextlib.suppress(ValueError, RecursionError):
        counted, counters = read_counted(Family.IPV4, text)
        for key in counted.chains:
            counted.chains[key]
        views(counted, counters)
    try:
        live = parse(Family.IPV4, text)
    except ValueError:
        return
    removal(live).restore_input(200)
    Programmed(live)
    with contextlib.suppress(RecursionError):
        document(views(live, {}))
        trace_text(walk(live, Packet("tcp", "10.244.1.5", "10.96.0.10", 80), Host(frozenset())))


def rule(raw: bytes) -> None:
    """One rule, somebody else's: taken apart, and met by a packet."""
    text = raw.decode("utf-8", "surrogateescape")
    rule = read_rule(text)
    _ = rule.target, rule.comment, rule.destination, rule.port, rule.protocol, rule.unconditional
    matching.parse_rule(text).meet(Packet("tcp", "10.244.1.5", "10.96.0.10", 80), Host(frozenset()))


def request(raw: bytes) -> None:
    """The head of a request, and what pages make of it."""
    with contextlib.suppress(http._Refused):
        method, request = http._request(raw)
        assert method in ("GET", "HEAD")
        assert request.path.startswith("/")
        pages.preferred(request.accept, (http.TEXT, http.HTML, http.JSON))
        with contextlib.suppress(ValueError):
            pages.read_filter(request.query)


def status_of_an_agent(raw: bytes) -> None:
    """The answer of something that is taken for an agent."""
    with contextlib.suppress(ValueError):
        status.decode(raw)


def objects_of_an_agent(raw: bytes) -> None:
    """The same, asked for objects: they are explained, whatever stands in them."""
    with contextlib.suppress(ValueError, config.ConfigError):
        answer = told.decode(raw)
        on = config.load(answer.config.encode(), {}).config
        cluster, here = explain._told_objects(answer.objects)
        with contextlib.suppress(click.ClickException):
            found = explain._explanations(cluster, on, here, Wanted("", "web", ""), [*Family])
            explain_forms.text(found, explain._place(here))
            msgspec.json.encode(explain_forms.document(found, explain._place(here)))


def printed(raw: bytes) -> None:
    """Text that is printed."""
    shown = terminal.printable(raw.decode("utf-8", "surrogateescape"))
    assert terminal.printable(shown) == shown
    shown.encode()


class _Answers:
    """A socket that gives these bytes in one read, and then nothing."""

    def __init__(self, raw: bytes) -> None:
        self._reads = [raw, b""]

    def __enter__(self) -> "_Answers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def recv(self, _: int) -> bytes:
        if not self._reads:
            raise TimeoutError
        return self._reads.pop(0)


def netlink(raw: bytes) -> None:
    """What stands in the place of the kernel's answer."""
    questions: Sequence[Callable[[], object]] = (
        lambda: [*conntrack.udp_flows(Family.IPV4)],
        lambda: [*conntrack.udp_flows(Family.IPV6)],
        lambda: chains.has_chain(Family.IPV4, "nat", "KUBE-SERVICES"),
        lambda: [*chains._rules(Family.IPV4, "nat", "KUBE-SERVICES")],
        lambda: nfacct.read("name"),
        lambda: netfilter.attributes(raw),
    )
    for question in questions:
        with mock.patch.object(netfilter, "_sent", lambda *_: _Answers(raw)), contextlib.suppress(OSError):
            question()
