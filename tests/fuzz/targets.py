"""What is fuzzed: each target takes any bytes and fails only for a defect; its seeds are what it usually reads."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import msgspec

from pykubeproxy import config, sources
from pykubeproxy.agent import http, pages, status
from pykubeproxy.cli import terminal
from pykubeproxy.inspect import matching
from pykubeproxy.inspect.dump import views
from pykubeproxy.inspect.forms import document
from pykubeproxy.inspect.packet import Host, Packet
from pykubeproxy.inspect.rule import read as read_rule
from pykubeproxy.inspect.trace import walk
from pykubeproxy.inspect.trace_forms import text as trace_text
from pykubeproxy.kernel import chains, conntrack, netfilter, nfacct
from pykubeproxy.kernel.iptables import canonical
from pykubeproxy.objects import Family, Kind, Undecodable, Updated, decode
from pykubeproxy.rules.programmed import Programmed
from pykubeproxy.rules.removal import removal
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import parse
from pykubeproxy.rules.saved import read_counted
from pykubeproxy.rules.terms import Kernel, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources import documents, wire
from pykubeproxy.sources.failures import Failure
from tests.cases import NAMES, expected, load_case
from tests.grammar import violations
from tests.junk import WHOLE
from tests.strategies import NODE

CONFIG = config.load(None, {}).config


class Target(msgspec.Struct, frozen=True):
    """A reader. `tokens` are pieces of its language, for making text that gets far."""

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...] = ()


def _object(kind: Kind) -> Callable[[bytes], None]:
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
            on = terms(CONFIG, NODE, cluster.node(NODE), Kernel(), family)
            assert not violations(full_input(render(cluster, on), on.options))

    return run


def _watch(raw: bytes) -> None:
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


def _config(raw: bytes) -> None:
    """A configuration is refused in one line, or writes itself down as it was read."""
    try:
        loaded = config.load(raw, {})
    except config.ConfigError as error:
        assert str(error).isprintable()
        return
    assert all(warning.isprintable() for warning in loaded.warnings)
    assert config.load(config.dump(loaded.config), {}).config == loaded.config
    for family in Family:
        on = terms(loaded.config, NODE, None, Kernel(), family)
        assert not violations(full_input(render(Cluster(), on), on.options))


def _manifests(raw: bytes) -> None:
    """Documents of YAML or JSON: objects, and one line for each that is none."""
    for name in ("objects.yaml", "objects.json"):
        try:
            contents = documents.read(raw, name)
        except documents.Unparsable as error:
            assert str(error).isprintable()
        else:
            assert all(line.isprintable() for line in (*contents.complaints, *contents.skipped))


def _saved(raw: bytes) -> None:
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


def _rule(raw: bytes) -> None:
    """One rule, somebody else's: taken apart, and met by a packet."""
    text = raw.decode("utf-8", "surrogateescape")
    rule = read_rule(text)
    _ = rule.target, rule.comment, rule.destination, rule.port, rule.protocol, rule.unconditional
    matching.parse_rule(text).meet(Packet("tcp", "10.244.1.5", "10.96.0.10", 80), Host(frozenset()))


def _request(raw: bytes) -> None:
    """The head of a request, and what pages make of it."""
    with contextlib.suppress(http._Refused):
        method, request = http._request(raw)
        assert method in ("GET", "HEAD")
        assert request.path.startswith("/")
        pages.preferred(request.accept, (http.TEXT, http.HTML, http.JSON))
        with contextlib.suppress(ValueError):
            pages.read_filter(request.query)


def _status(raw: bytes) -> None:
    """The answer of something that is taken for an agent."""
    with contextlib.suppress(ValueError):
        status.decode(raw)


def _printed(raw: bytes) -> None:
    """Text that is printed."""
    shown = terminal.printable(raw.decode("utf-8", "surrogateescape"))
    assert terminal.printable(shown) == shown
    shown.encode()


class _Answers:
    """A socket that gives these bytes in two reads, and then nothing."""

    def __init__(self, raw: bytes) -> None:
        self._reads = [raw[: len(raw) // 2 * 2], raw[len(raw) // 2 * 2 :]]

    def __enter__(self) -> "_Answers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def recv(self, _: int) -> bytes:
        if not self._reads:
            raise TimeoutError
        return self._reads.pop(0)


def _netlink(raw: bytes) -> None:
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


def _sources() -> Iterator[Target]:
    whole = {kind: json.dumps(value).encode() for kind, value in WHOLE.items()}
    json_tokens = (
        b"null",
        b'""',
        b"[]",
        b"{}",
        b"-1",
        b"1e999",
        b"18446744073709551616",
        b'"\\u0000"',
        b'"\\ud800"',
        b"::1",
    )
    for kind in Kind:
        yield Target(f"object-{kind.value.lower()}", _object(kind), (whole[kind],), json_tokens)
    listed = b'{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"7","continue":"x"},"items":[%s]}'
    changed = b'{"type":"MODIFIED","object":%s}\n' % whole[Kind.SERVICE]
    error = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
    yield Target("watch", _watch, (listed % whole[Kind.SERVICE], changed + error), json_tokens)
    yaml_tokens = (
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!int ",
        b"!!binary ",
        b"---\n",
        b"? ",
        b"| \n",
        b"- ",
        b"{",
        b"]",
        b"%TAG ! x\n",
    )
    written = config.dump(CONFIG).encode()
    yield Target(
        "config",
        _config,
        (written, b"kind: KubeProxyConfiguration\n", json.dumps(config.configz(CONFIG)).encode()),
        yaml_tokens,
    )
    manifest = b"apiVersion: v1\nkind: List\nitems:\n- " + whole[Kind.SERVICE].replace(
        b"{", b"{kind: Service, ", 1
    )
    yield Target(
        "manifests", _manifests, (manifest, b"---\nkind: Service\n---\n" + whole[Kind.NODE]), yaml_tokens
    )


def _kernels() -> Iterator[Target]:
    rules = [
        rule
        for name in NAMES[::9]
        for rules in expected(load_case(name), Family.IPV4).chains.values()
        for rule in rules
    ]
    foreign = (
        b'-m set --match-set x src -m comment --comment "a \\" b" -j LOG --log-prefix "x "',
        b"! -s 10.0.0.0/8 -i eth+ -p tcp -m multiport --dports 80,443,1:2 -m mark ! --mark 0x1/0x1 -g other",
        b"-m iprange --src-range 10.0.0.1-10.0.0.9 -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.0.0.1-10.0.0.5:80-90",
    )
    words = (
        *tuple({word.encode() for rule in rules for word in rule.split() if word.startswith("-")}),
        b"! ",
        b'"',
        b"\\",
        b"\n",
    )
    case = load_case("lb-source-ranges")["expected"]["ipv4"]
    saved = "\n".join(case if isinstance(case, list) else [case]).encode()
    yield Target(
        "saved",
        _saved,
        (saved, b"*nat\n:A - [0:0]\n[1:2] -A A -j B\nCOMMIT\n"),
        (*words, b"*nat\n", b":KUBE-SERVICES - [0:0]\n", b"COMMIT\n"),
    )
    yield Target("rule", _rule, (*(rule.encode() for rule in rules[::7]), *foreign), words)
    flow = struct.pack("=IHHII", 20 + 104, 1 << 8, 2, 1, 0) + b"\x02\0\0\0" + _flow()
    rule = (
        struct.pack("=IHHII", 60, 10 << 8 | 6, 2, 1, 0)
        + b"\x02\0\0\0"
        + b"\xff\xff\xff\xfd\x0c\x00\x02\x00KUBE-SVC-A\0"
        + bytes(18)
    )
    done = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)
    yield Target(
        "netlink",
        _netlink,
        (flow + done, rule + done, struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2)),
        (bytes(4), b"\xff\xff", done),
    )


def _flow() -> bytes:
    """A UDP flow as the kernel writes it."""

    def of(kind: int, value: bytes) -> bytes:
        return netfilter.attribute(kind, value)

    def ends(kind: int) -> bytes:
        addresses = of(1 | 0x8000, of(1, b"\x0a\0\0\1") + of(2, b"\x0a\0\0\2"))
        ports = of(2 | 0x8000, of(1, bytes((socket.IPPROTO_UDP,))) + of(2, b"\x12\x34") + of(3, b"\0\x35"))
        return of(kind | 0x8000, addresses + ports)

    return ends(1) + ends(2)


def _answers() -> Iterator[Target]:
    head = b"GET /statusz?namespace=a&service=b/c&limit=3 HTTP/1.1\r\nHost: x\r\nAccept: text/html;q=0.5, */*\r\n"
    yield Target(
        "request",
        _request,
        (head, b"HEAD http://h:1/p HTTP/1.0\r\nA: b"),
        (b"\r\n", b"\n", b": ", b"Content-Length", b"%00", b"http://["),
    )
    yield Target(
        "status",
        _status,
        (b'{"apiVersion":"pykubeproxy/v1","version":"1","node":"n","backend":"nft","syncs":[]}',),
    )
    yield Target(
        "printed", _printed, (b"a \x1b[31mred\x1b[0m\n", "\u202e\x9b".encode()), (b"\x1b[", b"\x1b]0;", b"m")
    )


TARGETS = {target.name: target for group in (_sources, _kernels, _answers) for target in group()}
__all__ = ["TARGETS", "Target", "sources"]
