"""`pykubeproxy dump-rules` on real tables."""

import json
import re
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner, Result

from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.nodes import agent as running_agent
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Count
from tests.cases import as_restore_input

pytestmark = pytest.mark.root


def write_rules(iptables: Iptables, case: str, packets: int = 0) -> None:
    """Write kube-proxy's rules of a case. (ip6tables-nft-restore 1.8.9 leaves counts of packets out.)"""
    iptables.restore(as_restore_input(case, iptables.family, packets=packets))


def dumped(*arguments: str) -> Result:
    return CliRunner().invoke(dump_rules, arguments, catch_exceptions=False)


def test_counters_of_rules_are_shown(inside: str, iptables: Iptables, runner: Runner) -> None:
    """Here of the first packets of two flows."""
    iptables.restore(
        "*nat\n:AAA - [0:0]\n-A OUTPUT -p udp -m udp --dport 9 -j AAA\n"
        "-A AAA -m comment --comment two\n-A AAA -p tcp -j ACCEPT\n"
        # Table nat sees packets only if a rule needs connection tracking.
        "-A POSTROUTING -p tcp -j MASQUERADE\nCOMMIT\n"
    )
    runner.run(("ip", "link", "set", "lo", "up"))
    ipv6 = iptables.family is Family.IPV6
    for _ in range(2):
        with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"12", ("::1" if ipv6 else "127.0.0.1", 9))
    ruleset, counters = iptables.save_counted()
    assert ruleset.chains[ChainKey("nat", "AAA")] == ("-m comment --comment two", "-p tcp -j ACCEPT")
    assert counters[ChainKey("nat", "AAA")] == (Count(2, 2 * (50 if ipv6 else 30)), Count(0, 0))
    assert ruleset == iptables.save()


def test_json_and_yaml_are_equal(inside: str, backend: Backend, runner: Runner) -> None:
    """In both backends, with shares, packets and bytes."""
    write_rules(open_iptables(backend, Family.IPV4, runner), "dual-stack", packets=4)
    result = dumped("ns1/web", "-o", "json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert yaml.safe_load(dumped("ns1/web", "-o", "yaml").stdout) == found
    (service,) = found["nodes"][0]["services"]
    assert (service["namespace"], service["name"], service["port"]) == ("ns1", "web", "http")
    assert (service["family"], service["policy"]) == ("IPv4", "Cluster")
    counted = [(e["share"], e["packets"], e["bytes"]) for e in service["endpoints"]]
    assert counted == [(0.5, 4, 240), (0.5, 4, 240)]


def test_both_families_are_shown_by_default(inside: str, backend: Backend, runner: Runner) -> None:
    """Of the backend that holds the rules; one family on request."""
    for family in Family:
        write_rules(open_iptables(backend, family, runner), "dual-stack")
    # Without a terminal, lines have no styles.
    assert "ns1/web:http  TCP IPv4\n" in dumped("web").stdout
    assert "ns1/web:http  TCP IPv6\n" in dumped("web").stdout
    only = dumped("web", "--family", "ipv6").stdout
    assert only.splitlines() == [
        "ns1/web:http  TCP",
        "  Cluster  cluster IP [fd00:10:96::1]:80",
        "      50%  [fd00:10:244:1::11]:8080",
        "      50%  [fd00:10:244:2::12]:8080",
    ]


def test_rules_output_has_iptables_save_format(inside: str, backend: Backend, runner: Runner) -> None:
    iptables = open_iptables(backend, Family.IPV4, runner)
    write_rules(iptables, "lb-source-ranges")
    lines = dumped("web", "-o", "rules").stdout.splitlines()
    saved = runner.run((iptables.tools.save,)).stdout.splitlines()
    assert lines[0] == "# IPv4"
    rules = [line for line in lines if line.startswith("-A")]
    assert len(rules) > 15
    assert set(rules) <= set(saved)


def test_an_unknown_service_is_an_error(inside: str, iptables: Iptables) -> None:
    """One line on standard error and exit code 2."""
    write_rules(iptables, "clusterip-one")
    result = dumped("ns1/nothing", "--iptables-backend", iptables.backend.value)
    where = f"in the {iptables.backend.value} tables of this node"
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"Error: there are no rules for ns1/nothing {where}; run dump-rules without SERVICE to list the services that have\n"
    )


def test_empty_tables_are_shown_and_not_created(inside: str, backend: Backend, runner: Runner) -> None:
    result = dumped("-o", "json", "--iptables-backend", backend.value)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["nodes"][0]["services"] == []
    assert "no rules for services" in result.stderr
    assert not any(open_iptables(Backend.LEGACY, family, runner).legacy_tables() for family in Family)


def test_dump_rules_writes_nothing(inside: str, iptables: Iptables) -> None:
    """Counters stay, too."""
    write_rules(iptables, "lb-local", packets=3)
    before = iptables.save_counted()
    dumped("--iptables-backend", iptables.backend.value)
    assert iptables.save_counted() == before


def test_wide_output_has_counters_and_chains(inside: str, runner: Runner) -> None:
    write_rules(open_iptables(Backend.LEGACY, Family.IPV4, runner), "dual-stack", packets=4)
    lines = dumped("web", "-o", "wide").stdout.splitlines()
    assert re.fullmatch(" {11}chain KUBE-SVC-[A-Z2-7]{16}", lines[2])
    assert lines[3].split() == ["SHARE", "ENDPOINT", "PACKETS", "BYTES", "CHAIN"]
    assert re.fullmatch(r"      50%  10\.244\.1\.11:8080 +4 +240  KUBE-SEP-[A-Z2-7]{16}", lines[4])


def test_watch_prints_changes_of_counters(
    inside: str, backend: Backend, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it with status 0."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    write_rules(iptables, "clusterip-one", packets=4)
    at = next(key for key in iptables.save().chains if key.chain.startswith("KUBE-SEP-"))
    to = next(rule for rule in iptables.save().chains[at] if " DNAT " in rule)
    looks = [14, 14, None]

    def passes(seconds: float) -> None:
        packets = looks.pop(0)
        if packets is None:
            raise KeyboardInterrupt
        iptables.restore(f"*nat\n:{at.chain} - [0:0]\n[{packets}:840] -A {at.chain} {to}\nCOMMIT\n")
        ticks.append(ticks[-1] + 2.0)

    ticks = [0.0]
    clock = SimpleNamespace(sleep=passes, monotonic=lambda: ticks[-1], strftime=time.strftime)
    monkeypatch.setattr("pykubeproxy.cli.dump_rules.time", clock)
    result = dumped("--watch", "--iptables-backend", backend.value)
    assert result.exit_code == 0
    first, second = result.stdout.split("New connections per second at ")[1:]
    assert first.count("/s\n") == 1 and " 5.0/s\n" in first
    assert "100%" in second and "/s\n" not in second


def test_watch_rejects_json(inside: str) -> None:
    assert dumped("--watch", "-o", "json").exit_code == 2


def test_rules_in_both_backends_cause_a_note(inside: str, iptables: Iptables) -> None:
    """The output is about one of them; the note is among its remarks and on standard error."""
    other = Backend.LEGACY if iptables.backend is Backend.NFT else Backend.NFT
    write_rules(iptables, "clusterip-one")
    alone = dumped("-o", "json", "--iptables-backend", iptables.backend.value)
    open_iptables(other, Family.IPV4).restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    both = dumped("-o", "json", "--iptables-backend", iptables.backend.value)
    (shown_alone,), (shown_both,) = (json.loads(it.stdout)["nodes"] for it in (alone, both))
    assert shown_both["services"] == shown_alone["services"]
    assert (len(shown_both["remarks"]), shown_alone["remarks"]) == (1, [])
    assert "packets meet both" not in alone.stderr
    assert f"The {other.value} tables have service-proxy rules too" in both.stderr


def test_the_backend_of_the_agent_is_shown_if_both_have_rules(
    inside: str, iptables: Iptables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the other one has more rules. Without an agent, the one with more rules is shown."""
    other = Backend.LEGACY if iptables.backend is Backend.NFT else Backend.NFT
    write_rules(iptables, "clusterip-one")
    open_iptables(other, Family.IPV4).restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    assert f"this shows the {iptables.backend.value} tables." in dumped("-o", "json").stderr
    monkeypatch.setattr(running_agent, "agent_backend", lambda: other.value)
    assert f"this shows the {other.value} tables, which the agent writes." in dumped("-o", "json").stderr
    chosen = dumped("-o", "json", "--iptables-backend", iptables.backend.value)
    assert f"this shows the {iptables.backend.value} tables." in chosen.stderr


@pytest.mark.parametrize(
    "command", ["dump-rules", "trace 10.0.0.1 10.96.0.1:443", "diff -f OBJECTS", "bundle"]
)
def test_without_root_the_first_words_say_so(command: str, runner: Runner, tmp_path: Path) -> None:
    words = command.replace("OBJECTS", "tests/data/manifests").split()
    folder = ("-o", str(tmp_path)) if words == ["bundle"] else ()
    plain = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "pykubeproxy")
    ended = runner.run((*plain, *words, *folder))
    assert (ended.exit_code, ended.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    if folder:
        assert ended.stderr.startswith("Error: no rules can be read, so there is no bundle: needs root")
    else:
        assert "Error: only root with CAP_NET_ADMIN can read the rules of this node: sudo" in ended.stderr
        assert "iptables" not in ended.stderr
