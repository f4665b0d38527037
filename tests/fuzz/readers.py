"""Run the parsers of untrusted input on arbitrary bytes; each function fails only if there is a defect."""

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Sequence
from unittest import mock
from xml.etree import ElementTree

import msgspec

from pykubeproxy import config, http
from pykubeproxy.agent.observe import handlers
from pykubeproxy.bundle.read import InvalidBundle, read_bundle
from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.dump.report import service_blocks
from pykubeproxy.inspect.explain.model import explain_nodes
from pykubeproxy.inspect.explain.report import explain_report
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.packets.iptables import compile_rule
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.inspect.trace.svg import svg
from pykubeproxy.kernel import conntrack, leftovers, nfacct, nftables
from pykubeproxy.kernel.netlink import attributes
from pykubeproxy.nodes.objects import agent_objects, context_of
from pykubeproxy.objects import Family, Kind, Undecodable, Updated, decode, object_meta
from pykubeproxy.pages import servicez, statusz
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text as report_text
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.inferred import inferred_facts
from pykubeproxy.rules.iptables_save import canonical, parse, parse_rule, read_counted
from pykubeproxy.rules.known import TABLES, KnownTables
from pykubeproxy.rules.removal import removal
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.save_files import InvalidSave, SavedFile, read_saves
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import wire
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.manifests import InvalidManifest, read_manifest
from pykubeproxy.wording import printable, styled, text_of
from tests.fakes.http_client import exchange
from tests.grammar import violations
from tests.invalid_objects import WHOLE
from tests.strategies import NODE
from tests.traces import report_of, trace_text

CONFIG = config.load(None, {}).config


def an_object(kind: Kind) -> Callable[[bytes], None]:
    def run(raw: bytes) -> None:
        """Decode an object and render it: the error is one line, or the rules have only known forms."""
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
            on = rule_context(CONFIG, NODE, cluster.node(NODE), KernelFacts(), family)
            assert not violations(full_input(render(cluster, on), on.options))

    return run


def bundle(raw: bytes) -> None:
    """Read a bundle: the error is one line."""
    for packed in (raw, gzip.compress(raw, 1)):
        try:
            found = read_bundle(io.BytesIO(packed), "b.tar.gz")
            found.addresses()
            found.routes()
        except InvalidBundle as error:
            assert "\n" not in str(error)


def _read_meta(items: list[msgspec.Raw | wire.Truncated]) -> None:
    for item in items:
        object_meta(item)


def watch(raw: bytes) -> None:
    """Decode the lines of a watch and a page of a list."""
    with contextlib.suppress(Failure):
        for line in wire.lines(iter((raw[: len(raw) // 2], raw[len(raw) // 2 :]))):
            with contextlib.suppress(Failure, Undecodable):
                event = wire.event(line)
                object_meta(event.object)
                decode(Kind.SERVICE, event.object)
    with contextlib.suppress(Failure):
        wire.page(iter((raw,)), Kind.SERVICE.value, _read_meta)


def configuration(raw: bytes) -> None:
    """Load a configuration: the error is one line, or dump and load return the same configuration."""
    try:
        loaded = config.load(raw, {})
    except config.ConfigError as error:
        assert str(error).isprintable()
        return
    assert all(warning.isprintable() for warning in loaded.warnings)
    assert config.load(config.dump(loaded.config), {}).config == loaded.config
    for family in Family:
        on = rule_context(loaded.config, NODE, None, KernelFacts(), family)
        assert not violations(full_input(render(Cluster(), on), on.options))


def manifests(raw: bytes) -> None:
    """Read YAML and JSON documents: each result is an object or a one-line message."""
    for name in ("objects.yaml", "objects.json"):
        try:
            contents = read_manifest(raw, name)
        except InvalidManifest as error:
            assert str(error).isprintable()
        else:
            assert all(line.isprintable() for line in contents.warnings)


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
    KnownTables().observe(live, TABLES)
    with contextlib.suppress(RecursionError):
        report_text(service_blocks(views(live, {})))
        trace = report_of(live, Packet("tcp", "10.244.1.5", "10.96.0.10", 80), NodeNetwork())
        report_text(trace.blocks(wide=False))
        ElementTree.fromstring(svg(trace, wide=True))


def saves(raw: bytes) -> None:
    """Read a file with rules of another node: the error is one line, or all walks through the rules end."""
    try:
        found = read_saves([SavedFile("rules.txt", raw.decode("utf-8", "surrogateescape"))])
    except InvalidSave as error:
        assert str(error).isprintable()
        return
    for tables in found:
        inferred_facts(tables.ruleset, ())
        with contextlib.suppress(TooManyRules):
            report_text(service_blocks(views(tables.ruleset, tables.counters)))
            packet = Packet("tcp", "10.244.1.5", "10.96.0.10", 80)
            trace_text(tables.ruleset, packet, NodeNetwork(), steps=True)


def rule(raw: bytes) -> None:
    """Parse a foreign rule and match a packet against it."""
    text = raw.decode("utf-8", "surrogateescape")
    rule = parse_rule(text)
    _ = rule.target, rule.comment, rule.destination, rule.port, rule.protocol, rule.unconditional
    compiled, packet = compile_rule(text), Packet("tcp", "10.244.1.5", "10.96.0.10", 80)
    compiled.reason(packet, NodeNetwork(), compiled.split(packet, NodeNetwork()))


def request(raw: bytes) -> None:
    """Parse the head of a request and its page filters."""

    def handle(request: http.Request) -> http.Response:
        assert request.path.startswith("/")
        http.accepts(request.headers.get("accept", ""), "application/json")
        with contextlib.suppress(ValueError):
            handlers.read_filter(request.query)
        return http.Response()

    exchange(raw[:8192] + b"\r\n\r\n", handle)


def status_of_an_agent(raw: bytes) -> None:
    """Decode an agent's status document."""
    with contextlib.suppress(ValueError):
        statusz.decode(raw)


def objects_of_an_agent(raw: bytes) -> None:
    """Decode an agent's object document and explain its objects."""
    with contextlib.suppress(ValueError, config.ConfigError):
        answer = servicez.decode(raw)
        on = config.load(answer.config.encode(), {}).config
        source = agent_objects(answer.objects, on)
        here = source.node
        contexts = {entry: context_of(on, here, entry, api_servers=source.api_servers) for entry in Family}
        with contextlib.suppress(LookupError):
            found = explain_nodes(source.cluster, ServiceFilter("", "web", ""), [here], lambda _: contexts)
            report = explain_report(found, [here])
            report_text(report.blocks(wide=True))
            json_text(document(report))


def printed(raw: bytes) -> None:
    """Escape text for the terminal."""
    text = raw.decode("utf-8", "surrogateescape")
    assert printable(text).isprintable()
    shown = text_of([styled(text, "red"), text])
    assert shown == f"\x1b[31m{printable(text)}\x1b[0m\n{printable(text)}\n"
    shown.encode()


class _Answers:
    """A socket that returns these bytes in one read, then nothing."""

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
    """Parse arbitrary bytes as a netlink response."""
    questions: Sequence[Callable[[], object]] = (
        lambda: [*conntrack.udp_flows(Family.IPV4)],
        lambda: [*conntrack.udp_flows(Family.IPV6)],
        lambda: nftables.has_chain(Family.IPV4, "nat", "KUBE-SERVICES"),
        lambda: [*nftables._rules(Family.IPV4, "nat", "KUBE-SERVICES")],
        lambda: nfacct.read("name"),
        leftovers.ipset_names,
        lambda: leftovers.ipset_ports("name"),
        lambda: attributes(raw),
    )
    for question in questions:
        with (
            mock.patch("pykubeproxy.kernel.netlink._connection", lambda *_: _Answers(raw)),
            contextlib.suppress(OSError),
        ):
            question()
