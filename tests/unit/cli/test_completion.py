"""Completion of Service names from the agent or from live rules."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem

from pykubeproxy.cli import completion
from pykubeproxy.cli.completion import KnownNames
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.trace import trace
from pykubeproxy.nodes import agent as client
from pykubeproxy.objects import Family, Key
from pykubeproxy.services.ports import PortName
from tests.cases import as_restore_input
from tests.fakes.bundles import sections_of, written
from tests.fakes.process import agent
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

PORTS = [
    PortName("default", "web", "http", "TCP"),
    PortName("default", "web", "metrics", "TCP"),
    PortName("kube-system", "dns", "dns", "UDP"),
    PortName("kube-system", "web", "", "TCP"),
]
KNOWN = KnownNames(
    PORTS,
    [Key("default", "web-1"), Key("default", "web-1"), Key("kube-system", "dns-0")],
    ["n1", "n2.example"],
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_from_agent", lambda with_pods: KNOWN)


def completed(incomplete: str, namespace: str = "") -> list[str]:
    context = click.Context(dump_rules)
    context.params = {"namespace": namespace}
    return [it.value for it in completion.services(context, dump_rules.params[0], incomplete)]


@pytest.mark.parametrize(
    ("incomplete", "namespace", "wanted"),
    [
        ("", "", ["default/web", "kube-system/dns", "kube-system/web"]),
        ("def", "", ["default/web"]),
        ("w", "", ["web"]),
        ("", "default", ["web"]),
        ("kube-system/w", "", ["kube-system/web"]),
        ("default/web:", "", ["default/web:http", "default/web:metrics"]),
        ("web:m", "default", ["web:metrics"]),
        ("nosuch", "", []),
        ("svc/", "", ["svc/default/web", "svc/kube-system/dns", "svc/kube-system/web"]),
        ("service/w", "default", ["service/web"]),
        ("svc/default/web:h", "", ["svc/default/web:http"]),
        ("web.", "", ["web.default", "web.kube-system"]),
        ("web.default:", "", ["web.default:http", "web.default:metrics"]),
    ],
)
def test_services(known: None, incomplete: str, namespace: str, wanted: list[str]) -> None:
    """Complete namespace/name, plain names, and ports after a colon."""
    assert completed(incomplete, namespace) == wanted


@pytest.mark.parametrize(
    ("incomplete", "namespace", "wanted"),
    [
        ("p", "", ["pod/default/web-1", "pod/kube-system/dns-0"]),
        ("pod/kube", "", ["pod/kube-system/dns-0"]),
        ("pods/w", "default", ["pods/web-1"]),
        ("node/", "", ["node/n1", "node/n2.example"]),
        ("s", "", ["svc/default/web", "svc/kube-system/dns", "svc/kube-system/web"]),
        ("svc/default/web:m", "", ["svc/default/web:metrics"]),
        ("svc/w", "default", ["svc/web"]),
        ("web.d", "", ["web.default"]),
        ("default/w", "", ["default/web"]),
        ("10.", "", []),
    ],
)
def test_ends_of_a_connection(known: None, incomplete: str, namespace: str, wanted: list[str]) -> None:
    """Complete pods, nodes and Services in the form that was begun; no Service is a source."""
    assert completed_end(incomplete, namespace) == wanted
    from_here = [it for it in wanted if it.startswith(("pod", "node"))]
    assert completed_end(incomplete, namespace, completion.sources) == from_here


def completed_end(
    incomplete: str, namespace: str = "", complete: Complete = completion.destinations, **params: object
) -> list[str]:
    context = click.Context(trace)
    context.params = {"namespace": namespace, **params}
    return [it.value for it in complete(context, trace.params[0], incomplete)]


def test_names_in_the_agent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent on this node knows Services, the pods of its EndpointSlices and its own Node."""
    monkeypatch.setattr(client, "DEFAULT_URL", agent(serve))
    assert completed_end("") == ["node/node1", "pod/ns/web-1", "svc/ns/api", "svc/ns/web"]
    assert completed_end("svc/ns/web:") == ["svc/ns/web:http"]


def test_names_in_an_objects_file(tmp_path: Path) -> None:
    """A file of -f on the command line comes before the agent; YAML, JSON and Lists are read."""
    items = [
        {
            "kind": "Service",
            "metadata": {"name": "db", "namespace": "shop"},
            "spec": {"clusterIP": "10.96.0.9", "ports": [{"name": "sql", "port": 5432}]},
        },
        {
            "kind": "Service",
            "metadata": {"name": "old", "namespace": "shop"},
            "spec": {"type": "ExternalName", "externalName": "a.b"},
        },
        {"kind": "Node", "metadata": {"name": "n1"}, "spec": {"podCIDR": "10.244.1.0/24"}},
        {"kind": "NetworkPolicy", "metadata": {"name": "deny", "namespace": "shop"}, "spec": {"ports": 7}},
        {
            "kind": "EndpointSlice",
            "metadata": {
                "name": "db-x",
                "namespace": "shop",
                "labels": {"kubernetes.io/service-name": "db"},
            },
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": ["10.244.1.5"], "targetRef": {"kind": "Pod", "name": "db-0"}},
                {"addresses": ["10.244.1.6"], "targetRef": None},
            ],
        },
    ]
    (tmp_path / "one.json").write_text(json.dumps({"kind": "List", "items": items}))
    (tmp_path / "two.yaml").write_text(
        "kind: Pod\nmetadata: {name: client, namespace: shop}\nspec: {containers: []}\n"
    )
    everything = ["node/n1", "pod/shop/client", "pod/shop/db-0", "svc/shop/db", "svc/shop/old"]
    assert completed_end("", filename=str(tmp_path)) == everything
    assert completed_end("svc/shop/db:", filename=str(tmp_path)) == ["svc/shop/db:sql"]
    assert completed_end("svc/", filename=str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("packed", [False, True])
def test_names_in_a_rules_file(tmp_path: Path, packed: bool) -> None:
    """Comments of rules name Services and their ports."""
    text = as_restore_input("multi-port", Family.IPV4).encode()
    path = tmp_path / "rules"
    path.write_bytes(gzip.compress(text) if packed else text)
    assert completed_end("", files=(str(path),)) == ["svc/default/kubernetes", "svc/ns1/web"]
    assert completed_end("svc/ns1/web:", files=(str(path),)) == ["svc/ns1/web:http", "svc/ns1/web:https"]


@pytest.mark.parametrize("with_objects", [True, False])
def test_names_in_a_bundle(tmp_path: Path, with_objects: bool) -> None:
    """Those of its objects, which include pods and the Node; without objects, the Services that its rules name."""
    tables = {"iptables-nft-save.txt": as_restore_input("multi-port", Family.IPV4)}
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written(sections_of("multi-port", tables, with_objects=with_objects)))
    found = completed_end("", bundle_file=str(path))
    assert [it for it in found if it.startswith("svc")] == ["svc/default/kubernetes", "svc/ns1/web"]
    assert (len(found) > 2) is with_objects
    assert completed_end("svc/ns1/web:", bundle_file=str(path)) == ["svc/ns1/web:http", "svc/ns1/web:https"]


def test_names_in_no_bundle(tmp_path: Path, known: None) -> None:
    """Those of the agent on this node are not offered instead."""
    (tmp_path / "damaged").write_bytes(b"x")
    for path in ("-", str(tmp_path), str(tmp_path / "damaged")):
        assert completed_end("", bundle_file=path) == []


def test_namespaces(known: None) -> None:
    """Complete namespaces that have Services."""
    found = completion.namespaces(click.Context(dump_rules), dump_rules.params[1], "k")
    assert [it.value for it in found] == ["kube-system"]


@pytest.mark.parametrize("odd", ["$(reboot)", "a b", "a\nb", "\x1b[2J", "-x", "A", "", "a`b`", "ä"])
def test_invalid_names_are_not_completed(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """A shell inserts completions into the line: any other server at the agent's address must not choose them."""
    told = [
        PortName(odd, "web", "", "TCP"),
        PortName("ns", odd, "", "TCP"),
        PortName("ns", "db", "x;y", "TCP"),
    ]
    names = KnownNames(
        [*told, PortName("ns", "web", "http", "TCP")], [Key("ns", odd), Key(odd, "web-1")], [odd]
    )
    monkeypatch.setattr(completion, "_from_agent", lambda with_pods: names)
    assert completed("") == ["ns/web"]
    assert completed("ns/web:") == ["ns/web:http"]
    assert completed("ns/db:") == []
    assert completed_end("") == ["svc/ns/web"]


def test_no_completion_without_agent_and_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a source there are no completions and no error."""

    def fail(with_pods: bool = False) -> None:
        raise OSError

    monkeypatch.setattr(completion, "_from_agent", fail)
    monkeypatch.setattr(completion, "_from_rules", fail)
    assert completed("web") == []


SCRIPT = """
eval "$1"
COMP_WORDBREAKS=$' \\t\\n":='
COMP_LINE=$2 COMP_POINT=${#2}
pykubeproxy() { echo "plain,$COMP_WORDS|$COMP_CWORD"; echo plain,default/web:http; }
_pykubeproxy_completion pykubeproxy
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pykubeproxy explain default/web:ht", ["pykubeproxy explain default/web:ht|2", "http"]),
        ("pykubeproxy explain ", ["pykubeproxy explain |2", "default/web:http"]),
        ("pykubeproxy ex", ["pykubeproxy ex|1", "default/web:http"]),
    ],
)
def test_colons_in_bash(line: str, words: list[str]) -> None:
    """In bash a colon ends a word: bash gets the part after it, the program gets the whole word."""
    program = [sys.executable, "-c", "from pykubeproxy.cli import main; main()", "completion", "bash"]
    script = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    bash = shutil.which("bash") or "bash"
    done = subprocess.run(
        [bash, "-c", SCRIPT, "bash", script, line], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == words
