"""Effects of settings on rules, log lines and requests, with the real command."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fakes.certificates import certificate
from tests.fakes.cluster import node, server, service, slice_of, unverified
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, PROGRAM, answers, inside_a_namespace, running, saved

WEB = service(
    "web",
    type="NodePort",
    clusterIP="10.96.0.10",
    clusterIPs=["10.96.0.10"],
    externalIPs=["198.51.100.1"],
    ports=[{"port": 80, "nodePort": 30080}],
)
# The API server adds the empty name; manifests must contain it.
SLICE = {**slice_of("web", "10.244.0.5"), "ports": [{"name": "", "port": 8080}]}


@pytest.fixture
def manifests(tmp_path: Path) -> Iterator[Path]:
    """A NodePort service with an external IP and one endpoint, in a new namespace."""
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all([WEB, SLICE, node("node1", "192.168.99.10")]))
    with inside_a_namespace():
        yield path


def once(manifests: Path, *flags: str) -> None:
    fixed = ("--once", "--manifests", str(manifests), "--hostname-override=node1", "--oom-score-adj=0")
    done = subprocess.run([*PROGRAM, *fixed, *flags], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def has(*words: str) -> bool:
    """Return whether one live rule has all these words."""
    return any(all(word in rule for word in words) for rule in saved())


# A flag, words of a rule, and whether the rule is there without the flag.
EFFECTS = [
    (["--iptables-masquerade-bit=20"], ["-A KUBE-MARK-MASQ", "0x100000/0x100000"], False),
    (["--masquerade-all"], ["-A KUBE-SVC", "-d 10.96.0.10/32", "-j KUBE-MARK-MASQ"], False),
    (["--cluster-cidr=10.244.0.0/16"], ["! -s 10.244.0.0/16", "-j KUBE-MARK-MASQ"], False),
    (
        ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cbr0"],
        ["! -i cbr0", "-j KUBE-MARK-MASQ"],
        False,
    ),
    (
        ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"],
        ["! -i veth+", "-j KUBE-MARK-MASQ"],
        False,
    ),
    (["--nodeport-addresses=127.0.0.0/8"], ["-d 127.0.0.1/32", "-j KUBE-NODEPORTS"], False),
    (
        ["--nodeport-addresses=primary", "--bind-address=192.168.99.10"],
        ["-j KUBE-NODEPORTS", "--dst-type LOCAL"],
        True,
    ),
    (["--iptables-localhost-nodeports=false"], ["! -d 127.0.0.0/8", "-j KUBE-NODEPORTS"], False),
    (["--feature-gates=AllowServiceExternalIPs=false"], ["-d 198.51.100.1/32"], True),
]


@pytest.mark.root
def test_each_flag_changes_its_rule(manifests: Path) -> None:
    """With the flag a rule appears or disappears, whatever flag the agent before had."""
    once(manifests)
    for _, words, present_without in EFFECTS:
        assert has(*words) is present_without, words
    for flags, words, present_without in EFFECTS:
        once(manifests, *flags)
        assert has(*words) is not present_without, flags


@pytest.mark.root
@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_rules_are_in_the_configured_backend_only(manifests: Path, backend: str) -> None:
    once(manifests, f"--iptables-backend={backend}")
    found = {
        it: any("-d 10.96.0.10/32" in rule for rule in saved(f"iptables-{it}-save"))
        for it in ("nft", "legacy")
    }
    assert found == {"nft": backend == "nft", "legacy": backend == "legacy"}


@pytest.mark.root
def test_requests_are_rate_limited(tmp_path: Path) -> None:
    """With qps 0.5 and burst 1, three lists take four seconds."""
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        flags = ("--master", api.url, "--hostname-override=node1", "--kube-api-qps=0.5", "--kube-api-burst=1")
        with running(tmp_path / "log", *flags):
            api.requests.wait(1, "list")
            started = time.monotonic()
            api.requests.wait(3, "list", seconds=20)
            assert time.monotonic() - started > 3
            eventually(lambda: answers(HEALTH, "/readyz", 200))


def test_json_log_lines(tmp_path: Path) -> None:
    """One object per line, with level and time."""
    flags = ("--logging-format=json", "--healthz-port=10256", f"--write-config-to={tmp_path}/config")
    done = subprocess.run([*PROGRAM, *flags], capture_output=True, text=True, timeout=30, check=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["event"] == "configuration warning"
    assert line["reason"] == "The flag --healthz-port is deprecated; use --healthz-bind-address instead."
    assert line["level"] == "warning"
    assert line.keys() == {"event", "level", "reason", "timestamp"}


@pytest.mark.root
@pytest.mark.parametrize(("dispatch", "most"), [("flat", 60), ("tree", 20)])
def test_dispatch_setting_selects_flat_or_tree(tmp_path: Path, dispatch: str, most: int) -> None:
    """Flat dispatch has one rule per address in KUBE-SERVICES, a tree only branches."""
    objects = []
    for number in range(60):
        name, address = f"s{number}", f"10.96.0.{number + 1}"
        objects.append(service(name, clusterIP=address, clusterIPs=[address]))
        objects.append({**slice_of(name, "10.244.0.5"), "ports": [{"name": "", "port": 8080}]})
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    with inside_a_namespace():
        once(path, f"--dispatch={dispatch}")
        first = [rule for rule in saved() if rule.startswith("-A KUBE-SERVICES -d")]
        assert 0 < len(first) <= most
        assert has("-d 10.96.0.60/32", "-j KUBE-SVC")
        assert (len(first) == 60) is (dispatch == "flat")


@pytest.mark.root
def test_an_unverified_server_is_one_log_line(tmp_path: Path) -> None:
    """And no warning of the HTTP client for each request."""
    with inside_a_namespace(), server(tls=certificate(tmp_path)) as api:
        api.store.create(node("node1", "192.168.99.10"))
        path = unverified(api, tmp_path / "kubeconfig")
        fixed = ("--once", "--kubeconfig", path, "--hostname-override=node1", "--oom-score-adj=0")
        done = subprocess.run([*PROGRAM, *fixed], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if re.search("verif|insecure|Warning", line)]
    assert "api server certificate not verified" in line
    assert "reason=insecure-skip-tls-verify" in line
