"""What is fuzzed: readers, and what each usually reads, from which near-misses are made."""

import json
import socket
import struct
from collections.abc import Callable, Iterator

import msgspec

from pykubeproxy import config
from pykubeproxy.agent.observe import object_documents
from pykubeproxy.kernel import netfilter
from pykubeproxy.objects import Family, Kind, Node
from tests.cases import NAMES, expected, load_case
from tests.fuzz import readers
from tests.fuzz.readers import CONFIG
from tests.invalid_objects import WHOLE
from tests.objects import endpoint, service, slice_of
from tests.strategies import NODE


class Target(msgspec.Struct, frozen=True):
    """A reader. `tokens` are pieces of its language, for making text that gets far."""

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...] = ()


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
        yield Target(f"object-{kind.value.lower()}", readers.an_object(kind), (whole[kind],), json_tokens)
    listed = b'{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"7","continue":"x"},"items":[%s]}'
    changed = b'{"type":"MODIFIED","object":%s}\n' % whole[Kind.SERVICE]
    error = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
    yield Target("watch", readers.watch, (listed % whole[Kind.SERVICE], changed + error), json_tokens)
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
        readers.configuration,
        (written, b"kind: KubeProxyConfiguration\n", json.dumps(config.configz(CONFIG)).encode()),
        yaml_tokens,
    )
    manifest = b"apiVersion: v1\nkind: List\nitems:\n- " + whole[Kind.SERVICE].replace(
        b"{", b"{kind: Service, ", 1
    )
    yield Target(
        "manifests",
        readers.manifests,
        (manifest, b"---\nkind: Service\n---\n" + whole[Kind.NODE]),
        yaml_tokens,
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
        readers.saved,
        (saved, b"*nat\n:A - [0:0]\n[1:2] -A A -j B\nCOMMIT\n"),
        (*words, b"*nat\n", b":KUBE-SERVICES - [0:0]\n", b"COMMIT\n"),
    )
    yield Target("rule", readers.rule, (*(rule.encode() for rule in rules[::7]), *foreign), words)
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
        readers.netlink,
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
        readers.request,
        (head, b"HEAD http://h:1/p HTTP/1.0\r\nA: b"),
        (b"\r\n", b"\n", b": ", b"Content-Length", b"%00", b"http://["),
    )
    yield Target(
        "status",
        readers.status_of_an_agent,
        (b'{"apiVersion":"pykubeproxy/v1","version":"1","node":"n","backend":"nft","syncs":[]}',),
    )
    objects = object_documents.Objects(
        Node(NODE, ("192.0.2.1",), zone="a"),
        (service("web", external_ips=("192.0.2.5",), source_ranges=("10.0.0.0/8",), affinity_seconds=60),),
        (slice_of(endpoint("10.244.1.5", zone_hints=("a",)), service="web"),),
    )
    yield Target(
        "servicez",
        readers.objects_of_an_agent,
        (object_documents.encode(object_documents.ObjectDocument(objects, config.dump(CONFIG))),),
        (b"null", b'""', b"[]", b"-1", b"1e999", b'"\\u0000"', b'"\\ud800"', b'"::1"', b"\\n"),
    )
    yield Target(
        "printed",
        readers.printed,
        (b"a \x1b[31mred\x1b[0m\n", "\u202e\x9b".encode()),
        (b"\x1b[", b"\x1b]0;", b"m"),
    )


TARGETS = {target.name: target for group in (_sources, _kernels, _answers) for target in group()}
