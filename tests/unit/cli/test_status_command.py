"""`pykubeproxy status` with an agent, another server or none."""

import json
import re
import socket

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from pykubeproxy import http
from pykubeproxy.cli.status import status
from pykubeproxy.pages.statusz import AgentStatus, FamilyStatus, RepairRecord, SyncRecord, encode
from pykubeproxy.rules.drift import TableDrift
from tests.fakes.http_client import free_port
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

NOW = 1_795_218_836.0
TOLD = AgentStatus(
    version="1.2.3",
    node="node1",
    backend="nft",
    started=NOW - 93_784,
    now=NOW,
    healthy=True,
    ready=True,
    alive=True,
    node_eligible=True,
    families=(
        FamilyStatus("IPv4", False, NOW - 3, 5000, 50000, {"nat": 160675, "filter": 3}),
        FamilyStatus("IPv6", False),
    ),
    unavailable_families={
        "IPv6": "the kernel has no IPv6 NAT in the nft backend (modules nft_compat and xt_nat)"
    },
    pending_services=2,
    pending_endpoints=1,
    syncs=(
        SyncRecord(NOW - 9, "IPv4", True, 2.5, 160675),
        SyncRecord(
            NOW - 4,
            "IPv4",
            False,
            0.0,
            0,
            "iptables-restore rejected line 7, '-A KUBE-SVC-X -j NONE': " + "no " * 30,
        ),
        SyncRecord(NOW - 3, "IPv4", False, 0.004, 31),
    ),
)


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(status, arguments)


def shown(result: Result) -> list[str]:
    """Return the lines of text, without styles and the widths of columns."""
    return [re.sub(r"(?<=\S) {2,}", "  ", line).strip() for line in click.unstyle(result.stdout).splitlines()]


def at(serve: Serve, body: bytes, code: int = 200) -> str:
    page = http.router({"/statusz": lambda _: http.Response(body, http.JSON, code)})
    return f"http://127.0.0.1:{serve(page)}"


def test_a_failed_sync_is_not_called_up_to_date(serve: Serve) -> None:
    """While the last sync of a family has failed, neither the headline nor its row says that rules are up to date."""
    failing = msgspec.structs.replace(TOLD, syncs=TOLD.syncs[:2])
    result = asked("--url", at(serve, encode(failing)))
    lines = shown(result)
    assert result.exit_code == 1
    assert lines[1] == "Behind: the last IPv4 sync failed; rules stay in place but may miss changes."
    assert "IPv4  last sync failed  5000  50000  160678  3 s ago" in lines


def test_text(serve: Serve) -> None:
    """Show health, families, recent syncs and pending changes in 80 columns."""
    result = asked("--url", at(serve, encode(TOLD)))
    lines = shown(result)
    assert result.exit_code == 0
    assert max(map(len, click.unstyle(result.stdout).splitlines())) <= 80
    assert lines[:2] == ["node1  1.2.3, backend nft, up 1 d 2 h", "Healthy: rules are up to date."]
    assert "IPv4  up to date  5000  50000  160678  3 s ago" in lines
    assert "IPv6  not synced yet  0  0  0  never" in lines
    assert "Last 3 syncs: median 4 ms, longest 2.5 s, 1 failed" in lines
    assert "ENDED  FAMILY  SYNC  DURATION  RULES WRITTEN" in lines
    assert "3 s ago  IPv4  partial  4 ms  31" in lines
    assert "iptables-restore rejected line 7, '-A KUBE-SVC-X -j NONE': no no no no no no" in lines
    assert "2 changed Services and 1 Service with changed endpoints wait" in " ".join(lines[2:4])


def test_wide_has_every_line_of_text_and_probes_times_and_tables(serve: Serve) -> None:
    """Also the syncs and repairs that the text leaves out."""
    repairs = tuple(
        RepairRecord(NOW - age, "IPv4", 0.5, (TableDrift("nat", rules=2),)) for age in (50, 40, 30, 20)
    )
    syncs = tuple(SyncRecord(NOW - age, "IPv4", False, 0.004, 31) for age in range(20, 1, -1))
    url = at(serve, encode(msgspec.structs.replace(TOLD, syncs=syncs, repairs=repairs)))
    lines, wide = shown(asked("--url", url)), shown(asked("--url", url, "-o", "wide"))
    assert set(lines) < set(wide)
    assert "50 s ago  IPv4  in 500 ms" not in lines
    assert {"50 s ago  IPv4  in 500 ms", "20 s ago  IPv4  partial  4 ms  31", "IPv4  nat  160675"} <= set(
        wide
    )
    assert wide[1] == "HEALTHY  READY  ALIVE  NODE ELIGIBLE  STARTED  ANSWERED"
    assert wide[2].startswith("yes  yes  yes  yes  2026-11-")


def test_repairs(serve: Serve) -> None:
    """Show the last repairs of drift in 80 columns."""
    repair = RepairRecord(
        NOW - 3, "IPv4", 0.123, (TableDrift("nat", rules=2),), ('"iptables-nft" (process 4711)',)
    )
    result = asked("--url", at(serve, encode(msgspec.structs.replace(TOLD, repairs=(repair,)))))
    lines = shown(result)
    assert "3 s ago  IPv4  in 123 ms" in lines
    assert 'nat: 2 rules missing (by "iptables-nft" (process 4711))' in lines


def test_exit_code(serve: Serve) -> None:
    """Exit with 1 if the agent is not healthy."""
    told = msgspec.structs.replace(TOLD, healthy=False, alive=False, ready=False)
    result = asked("--url", at(serve, encode(told)))
    assert result.exit_code == 1
    assert "the reconcile loop hangs" in result.stdout


def test_json(serve: Serve) -> None:
    """The document has what the agent says."""
    result = asked("--url", at(serve, encode(TOLD)), "-o", "json")
    (found,) = json.loads(result.stdout)["nodes"]
    assert found["agent"] == json.loads(encode(TOLD))
    assert (found["node"], found["state"], found["problem"]) == ("node1", "healthy", "")


def test_no_agent() -> None:
    """Print one line that says what to do."""
    port = free_port()
    result = asked("--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: cannot reach an agent at http://127.0.0.1:{port}: Connection refused;"
        " start the agent or set --url to its metrics address\n"
    )


SOMEBODY = [
    b"kube-proxy statusz",
    b"{}",
    b'{"apiVersion": "other/v1"}',
    b"\xff\xfe",
    b'{"x":' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", SOMEBODY)
def test_other_server(serve: Serve, body: bytes) -> None:
    """Print one line for kube-proxy, another version or any other server."""
    result = asked("--url", at(serve, body))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "is not an agent of this pykubeproxy version" in result.stderr


@pytest.mark.parametrize("status", [404, 406])
def test_error_status(serve: Serve, status: int) -> None:
    """kube-proxy has such a page too; it refuses JSON with status 406."""
    result = asked("--url", at(serve, b"", status))
    assert result.exit_code == 2
    assert f"returned status {status}; another program answers there" in result.stderr


def test_a_page_for_the_node_is_refused_elsewhere(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes' status 406: the agent answers clients over loopback only."""
    url = at(serve, b"", 406).replace("127.0.0.1", "node1.test")
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest: resolve("127.0.0.1", *rest))
    result = asked("--url", url)
    assert (result.exit_code, "over loopback only" in result.stderr) == (2, True)


@pytest.mark.parametrize("url", ["127.0.0.1:10249", "ftp://a", "http://", "http://[::1"])
def test_invalid_url(url: str) -> None:
    """An invalid URL is a usage error."""
    result = asked("--url", url)
    assert result.exit_code == 2
    assert "is not a URL such as http://address:port" in result.stderr
