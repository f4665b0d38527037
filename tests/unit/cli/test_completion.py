"""Completion of Service names from the agent or from live rules."""

import shutil
import subprocess
import sys

import click
import pytest

from pykubeproxy.cli import completion
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.services.ports import PortName

KNOWN = [
    PortName("default", "web", "http", "TCP"),
    PortName("default", "web", "metrics", "TCP"),
    PortName("kube-system", "dns", "dns", "UDP"),
    PortName("kube-system", "web", "", "TCP"),
]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_from_agent", lambda: iter(KNOWN))


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
    ],
)
def test_services(known: None, incomplete: str, namespace: str, wanted: list[str]) -> None:
    """Complete namespace/name, plain names, and ports after a colon."""
    assert completed(incomplete, namespace) == wanted


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
    monkeypatch.setattr(
        completion, "_from_agent", lambda: iter([*told, PortName("ns", "web", "http", "TCP")])
    )
    assert completed("") == ["ns/web"]
    assert completed("ns/web:") == ["ns/web:http"]
    assert completed("ns/db:") == []


def test_no_completion_without_agent_and_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a source there are no completions and no error."""

    def fail() -> None:
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
