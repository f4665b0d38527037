"""`dump-rules`, `trace` and `diff` with the rules of another node in files, without root or network."""

import gzip
import itertools
import json
import tarfile
from pathlib import Path
from random import Random

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import pykubeproxy.cli
from pykubeproxy import kernel
from pykubeproxy.cli.diff import diff
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.trace import trace
from pykubeproxy.inspect.dump.model import in_order, views
from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.kernel import KernelError, Missing, NotPermitted
from pykubeproxy.nodes import saved as saved_nodes
from pykubeproxy.objects import Family
from tests.cases import ADDRESSES, NAMES, expected, load_case, saved_text
from tests.traces import trace_text

pytestmark = pytest.mark.usefixtures("no_command_runs")

POD, OUTSIDE, NODE = "10.244.1.11", "203.0.113.77", "192.168.99.10"


def written(case: str, folder: Path) -> Path:
    """Both families in one file."""
    path = folder / "rules.txt"
    path.write_text("".join(saved_text(case, family) for family in Family))
    return path


def invoke(command: click.Command, *arguments: object, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(command, [str(it) for it in arguments], input=stdin, catch_exceptions=False)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return written("nodeport", tmp_path)


@pytest.fixture
def objects(tmp_path: Path) -> tuple[str, ...]:
    """Options for the recorded objects and configuration."""
    return options_of("nodeport", tmp_path)


def options_of(name: str, folder: Path) -> tuple[str, ...]:
    case = load_case(name)
    items = [*case["objects"], case["node"]]
    (folder / "objects.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    (folder / "config.json").write_text(json.dumps(case["config"]))
    return "-f", str(folder / "objects.json"), "--config", str(folder / "config.json")


@pytest.mark.parametrize("name", NAMES)
def test_recorded_rules_read_as_on_the_node(name: str, tmp_path: Path) -> None:
    """All commands take kube-proxy's rules from a file; diff finds no difference."""
    path = written(name, tmp_path)
    result = invoke(dump_rules, "--rules", path, "-o", "json")
    found = [view for family in Family for view in views(expected(load_case(name), family), {})]
    assert json.loads(result.stdout)["nodes"][0]["services"] == json.loads(
        msgspec.json.encode(in_order(found))
    )
    traced = invoke(trace, POD, "10.96.1.1:80", "--rules", path, "--node-address", NODE)
    packet, network = Packet("tcp", POD, "10.96.1.1", 80), NodeNetwork(frozenset([NODE]))
    assert traced.stdout == click.unstyle(trace_text(expected(load_case(name), Family.IPV4), packet, network))
    addresses = [option for it in ADDRESSES for option in ("--node-address", it)]
    compared = invoke(diff, "--rules", path, *options_of(name, tmp_path), *addresses)
    assert (compared.exit_code, compared.stdout) == (0, "")


def test_standard_input_gzip_and_two_files_read_alike(rules: Path, tmp_path: Path) -> None:
    whole = invoke(dump_rules, "--rules", rules).stdout
    assert "ns1/web:http" in whole
    raw = rules.read_bytes()
    assert invoke(dump_rules, "--rules", "-", stdin=raw).stdout == whole
    packed = tmp_path / "rules.gz"
    packed.write_bytes(gzip.compress(raw))
    assert invoke(dump_rules, "--rules", packed).stdout == whole
    assert invoke(dump_rules, "--rules", "-", stdin=packed.read_bytes()).stdout == whole
    files = [tmp_path / family.value for family in Family]
    for family, file in zip(Family, files, strict=True):
        file.write_text(saved_text("nodeport", family))
    assert invoke(dump_rules, "--rules", files[1], "--rules", files[0]).stdout == whole


def test_files_written_on_windows_are_read(rules: Path) -> None:
    whole = invoke(dump_rules, "--rules", rules).stdout
    text = rules.read_text().replace("\n", "\r\n")
    for raw in (text.encode("utf-8-sig"), text.encode("utf-16")):
        assert invoke(dump_rules, "--rules", "-", stdin=raw).stdout == whole


def test_counters_are_shown(rules: Path) -> None:
    """As with `iptables-save -c`."""
    lines = [f"[7:420] {it}" if it.startswith("-A") else it for it in rules.read_text().splitlines()]
    result = invoke(dump_rules, "web", "--rules", "-", "-o", "json", stdin="\n".join(lines))
    endpoints = [
        it for service in json.loads(result.stdout)["nodes"][0]["services"] for it in service["endpoints"]
    ]
    assert {(it["packets"], it["bytes"]) for it in endpoints} == {(7, 420)}


def test_trace_asks_for_the_addresses_of_the_node(rules: Path) -> None:
    """Node ports are served at addresses that only the node knows."""
    arguments = (OUTSIDE, f"{NODE}:30080", "--rules", rules)
    result = invoke(trace, *arguments)
    assert "not through a Service" in result.stdout
    assert "Give each with --node-address" in result.stderr
    result = invoke(trace, *arguments, "--node-address", NODE)
    assert "goes to one of" in result.stdout
    assert result.stderr == ""


def test_diff_finds_a_changed_rule(rules: Path, objects: tuple[str, ...]) -> None:
    rules.write_text(
        rules.read_text().replace("--to-destination 10.244.1.11:8080", "--to-destination 10.244.1.99:8080")
    )
    result = invoke(diff, "--rules", rules, *objects, "-o", "json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    (node,) = found["nodes"]
    assert node["before"] == f"rules in {rules}"
    (service,) = node["rules"]["ports"]
    assert [it["address"] for it in service["policies"][0]["endpointsRemoved"]] == ["10.244.1.99"]


def test_diff_names_a_family_that_is_not_compared(rules: Path, objects: tuple[str, ...]) -> None:
    rules.write_text(saved_text("nodeport", Family.IPV4))
    result = invoke(diff, "--rules", rules, *objects)
    assert result.exit_code == 0
    assert f"IPv6 rules are not compared: there are none in {rules}." in result.stderr
    result = invoke(diff, "--rules", rules, *objects, "--family", "ipv6")
    assert result.exit_code == 2
    assert "add the output of ip6tables-save with --rules" in result.stderr


def test_diff_needs_the_name_of_the_node(rules: Path, tmp_path: Path) -> None:
    """A file does not tell it, and this machine is another one."""
    without_nodes = tmp_path / "services.yaml"
    without_nodes.write_text("{apiVersion: v1, kind: Service, metadata: {name: a, namespace: b}, spec: {}}")
    for objects in ((), ("-f", without_nodes)):
        result = invoke(diff, "--rules", rules, *objects)
        assert result.exit_code == 2
        assert "give it with --hostname-override" in result.stderr


def test_rules_of_the_other_backend_are_named(rules: Path) -> None:
    """Packets pass both. An option selects one."""
    text = rules.read_text()
    legacy = text.replace(" (nf_tables)", "").replace("ns1/web", "ns1/old")
    result = invoke(dump_rules, "--rules", "-", stdin=text + legacy)
    assert "Note: this shows the nft tables. The legacy tables have service-proxy rules too" in result.stderr
    assert "ns1/web" in result.stdout
    result = invoke(dump_rules, "--rules", "-", "--iptables-backend", "legacy", stdin=text + legacy)
    assert (result.stderr, "ns1/old" in result.stdout) == ("", True)
    others = "# Generated by iptables-save v1.8.9 on Sun\n*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n"
    result = invoke(dump_rules, "--rules", "-", stdin=others + text)
    assert (result.stderr, "ns1/web" in result.stdout) == ("", True)
    result = invoke(dump_rules, "--rules", rules, "--iptables-backend", "legacy")
    assert "--rules has no output of iptables-legacy-save" in result.stderr


def test_tar_archive_is_named(tmp_path: Path) -> None:
    """A bundle has another option."""
    path = tmp_path / "node1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__, "rules.txt")
    result = invoke(dump_rules, "--rules", path)
    advice = "use --bundle for a bundle, or else unpack it"
    assert (result.exit_code, result.stderr) == (2, f"Error: --rules: {path} is a tar archive; {advice}\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            NotPermitted("cannot read", "no"),
            "only root with CAP_NET_ADMIN can read the rules of this node: sudo dump-rules, or use --rules or --bundle",
        ),
        (
            Missing("iptables-save", "iptables"),
            f"{Missing('iptables-save', 'iptables')}, or read rules from a file with --rules or --bundle",
        ),
    ],
)
def test_live_rules_that_cannot_be_read_may_come_from_a_file(
    monkeypatch: pytest.MonkeyPatch, error: KernelError, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(kernel, "choose_backend", fail)
    monkeypatch.setattr(kernel, "require_linux", lambda: None)
    result = invoke(dump_rules)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {message}\n"


def test_program_that_is_not_installed_is_not_needed_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kernel.NotANode("Python modules not installed: pyroute2; run pip install 'pykubeproxy[node]'")

    monkeypatch.setattr(kernel, "choose_backend", fail)
    assert "[node]', or read rules from a file with --rules" in invoke(dump_rules).stderr


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (dump_rules, ("--watch",), "--watch requires live rules"),
        (dump_rules, ("--rules", "{rules}"), "names a file twice"),
        (dump_rules, ("ns1/nothing",), "there are no rules for ns1/nothing in {rules}"),
        (dump_rules, ("--rules", "/nowhere"), "cannot read /nowhere: No such file or directory"),
        (dump_rules, ("--rules", "/"), "cannot read /: Is a directory"),
        (trace, (POD, "10.96.1.1:80", "--rules", "-", "-f", "-"), 'only one of -f and --rules can be "-"'),
        (diff, ("--against", "objects.yaml"), "--rules cannot be combined with --against"),
        (diff, ("--rules", "-", "-f", "-"), 'only one of -f, --against, --rules and --bundle can be "-"'),
        (diff, ("--url", "http://127.0.0.1:1", "-f", "-"), "--url cannot be combined with -f"),
    ],
)
def test_wrong_use_is_an_error(
    rules: Path, command: click.Command, arguments: tuple[str, ...], message: str
) -> None:
    options = [it.format(rules=rules) for it in arguments]
    result = invoke(command, "--rules", rules, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.format(rules=rules) in result.stderr


def test_what_nft_prints_is_not_enough_without_the_rules_of_iptables(rules: Path, tmp_path: Path) -> None:
    """nft does not show rules of iptables, so an answer would leave out all Services."""
    items = [
        {"chain": {"table": table, "family": family, "name": "PREROUTING", "hook": "prerouting"} | kind}
        for table, family, kind in (
            ("nat", "ip", {"type": "nat", "prio": -100}),
            ("nat", "ip6", {"type": "nat", "prio": -100}),
            ("hostfw", "inet", {"type": "filter", "prio": 0}),
        )
    ]
    listed = tmp_path / "nft.json"
    listed.write_text(json.dumps({"nftables": items}))
    alone = invoke(trace, POD, "10.96.1.1:80", "--rules", listed)
    message = "Error: the rules of iptables are missing (IPv4 nat); add the output of iptables-save\n"
    assert (alone.exit_code, alone.stderr) == (2, message)
    both = invoke(trace, POD, "10.96.1.1:80", "--rules", listed, "--rules", rules, "--node-address", NODE)
    assert (both.exit_code, both.stderr) == (0, "")


def test_node_addresses_have_no_effect_on_live_rules() -> None:
    result = invoke(trace, POD, "10.96.1.1:80", "--node-address", NODE)
    assert "--node-address has no effect on live rules" in result.stderr


def test_damaged_and_huge_files_are_errors(rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small gzip file may hold a huge text."""
    packed = gzip.compress(rules.read_bytes())
    assert "is damaged" in invoke(dump_rules, "--rules", "-", stdin=packed[:200]).stderr
    assert "is damaged" in invoke(dump_rules, "--rules", "-", stdin=packed[:200] + b"x" * 999).stderr
    assert "is damaged" in invoke(dump_rules, "--rules", "-", stdin=b"\xff\xfe1").stderr
    monkeypatch.setattr(saved_nodes, "MOST_BYTES", 10_000)
    result = invoke(dump_rules, "--rules", "-", stdin=gzip.compress(b" " * 10_001))
    assert "more than 0 MiB" in result.stderr


def test_hostile_bytes_in_comments_are_escaped(rules: Path) -> None:
    """They could control the terminal, or break the JSON document."""
    bad = b"\x1b[2Jx\x9b\xc2\x9b\xe2\x80\xae"
    raw = rules.read_bytes().replace(b'kubernetes service portals"', b"kubernetes " + bad + b'"')
    arguments = ("trace", POD, "10.96.1.1:80", "--rules", "-")
    text = invoke(pykubeproxy.cli.main, *arguments, stdin=raw).stdout
    assert text.replace("\n", "").isprintable()
    found = invoke(pykubeproxy.cli.main, *arguments, "-o", "json", stdin=raw).stdout
    assert found.replace("\n", "").isprintable()
    assert "\x1b[2J" in json.dumps(json.loads(found)).encode().decode("unicode_escape")


def test_chains_that_multiply_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain jumps to the next one many times: a walk through all of them would take years."""
    count = RuleLimit.count
    monkeypatch.setattr(RuleLimit, "count", lambda limit, rules: count(limit, 20 * rules))
    names = ["KUBE-SERVICES", *(f"KUBE-SVC-{n:016}" for n in range(15))]
    jumps = "".join(f"-A {one} -j {to}\n" * 30 for one, to in itertools.pairwise(names))
    last = "-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-0000000000000000\n"
    text = "*nat\n:PREROUTING -\n" + "".join(f":{it} -\n" for it in names) + jumps + last + "COMMIT\n"
    for command, arguments in (
        (dump_rules, ()),
        (dump_rules, ("-o", "rules")),
        (trace, ("10.0.0.2", "10.0.0.1:80")),
    ):
        result = invoke(command, *arguments, "--rules", "-", stdin=text)
        assert result.exit_code == 2
        assert "the chains jump to each other too many times" in result.stderr


def test_shells_complete_file_names() -> None:
    for command in (dump_rules, trace, diff):
        completion = ShellComplete(command, {}, "x", "_X_COMPLETE")
        assert [it.type for it in completion.get_completions(["--rules"], "")] == ["file"]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_rules_never_raise(seed: int, tmp_path: Path, objects: tuple[str, ...]) -> None:
    """Whatever the bytes, commands print their answer or an error."""
    random = Random(seed)
    raw = bytearray(
        written(random.choice(["nodeport", "lb-source-ranges", "affinity"]), tmp_path).read_bytes()
    )
    if random.random() < 0.5:
        raw = raw.replace(b"\n-A", b"\n[1:2] -A")
    for _ in range(random.randint(1, 30)):
        start = random.randrange(len(raw))
        end = start + random.choice([0, 1, 1, 1, 8])
        raw[start:end] = random.choice(
            [b'"', b"\\", b"-", b" ", b"9" * 30, b"\xff", b"KUBE-SERVICES", b"::", b"", b"!"]
        )
    path = tmp_path / "damaged.txt"
    path.write_bytes(raw)
    for command, arguments in (
        ("dump-rules", ("-o", random.choice(["text", "wide", "json", "yaml", "name", "rules"]))),
        ("trace", (POD, "10.96.1.1:80", "--node-address", NODE, "-o", random.choice(["text", "json"]))),
        ("trace", (OUTSIDE, f"{NODE}:30080", "--node-address", NODE)),
        ("diff", (*objects, "-o", random.choice(["text", "wide", "name", "rules", "json"]))),
    ):
        result = invoke(pykubeproxy.cli.main, command, *arguments, "--rules", path)
        assert result.exit_code in (0, 1, 2)
