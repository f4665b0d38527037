"""Node setup on a real /proc, in network namespaces."""

import json
import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import Runner, system

pytestmark = pytest.mark.root

LIMIT = Path("/proc/sys/net/netfilter/nf_conntrack_max")
HASHSIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
FLAGS = {
    "conntrack-max-per-core": "0",
    "conntrack-tcp-timeout-established": "2h",
    "conntrack-tcp-timeout-close-wait": "90s",
    "conntrack-tcp-be-liberal": "true",
    "conntrack-udp-timeout": "40s",
    "conntrack-udp-timeout-stream": "100s",
    "oom-score-adj": "500",
}
WRITTEN = {
    "net/netfilter/nf_conntrack_tcp_timeout_established": "7200",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait": "90",
    "net/netfilter/nf_conntrack_tcp_be_liberal": "1",
    "net/netfilter/nf_conntrack_udp_timeout": "40",
    "net/netfilter/nf_conntrack_udp_timeout_stream": "100",
}
# Runs in a separate process; prints its log as JSON lines, then its oom_score_adj.
PROGRAM = """
import json, sys
from pathlib import Path
from structlog.testing import capture_logs
from pykubeproxy.agent.node_setup import set_up
from pykubeproxy.config import load

with capture_logs() as logs:
    set_up(load(None, json.loads(sys.argv[1])).config)
for line in logs:
    print(json.dumps(line))
print(Path("/proc/self/oom_score_adj").read_text().strip())
"""


def run(runner: Runner, flags: dict[str, str]) -> tuple[list[dict[str, object]], int]:
    """Return the log of a setup and the process's oom_score_adj afterwards."""
    outcome = runner.run((sys.executable, "-c", PROGRAM, json.dumps(flags)))
    assert outcome.exit_code == 0, outcome.stderr
    *lines, adjusted = outcome.stdout.splitlines()
    return [json.loads(line) for line in lines], int(adjusted)


def test_a_second_setup_changes_no_setting(inside: str, runner: Runner) -> None:
    """Except the process's own oom_score_adj."""
    logs, adjusted = run(runner, FLAGS)
    assert {name: system.read_setting(name) for name in WRITTEN} == WRITTEN
    assert adjusted == 500
    assert {line["event"] for line in logs} == {"kernel setting changed"}
    second_log, _ = run(runner, FLAGS)
    assert [line["setting"] for line in second_log] == ["/proc/self/oom_score_adj"]


def test_a_read_only_proc_causes_warnings(inside: str, runner: Runner) -> None:
    """As in a container. Other settings are applied."""
    script = f"mount -o bind,ro /proc/sys /proc/sys && exec {sys.executable} -c '{PROGRAM}' \"$0\""
    limited = Runner((*runner.prefix, "unshare", "-m", "sh", "-c", script))
    outcome = limited.run((json.dumps(FLAGS),))
    *lines, adjusted = outcome.stdout.splitlines()
    warnings = [line for line in map(json.loads, lines) if line["log_level"] == "warning"]
    assert {line["setting"] for line in warnings} == {f"/proc/sys/{name}" for name in WRITTEN}
    assert {line["error"] for line in warnings} == {"Read-only file system"}
    assert all("--init-only" in line["advice"] for line in warnings)
    assert int(adjusted) == 500


def test_a_setup_without_capabilities_needs_no_changes(inside: str, runner: Runner) -> None:
    """After a privileged setup, only oom_score_adj causes a warning."""
    run(runner, FLAGS)
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    logs, _ = run(limited, {**FLAGS, "oom-score-adj": "-500"})
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["setting"] == "/proc/self/oom_score_adj"
    assert line["error"] == "Permission denied"
    assert "CAP_SYS_RESOURCE" in str(line["advice"])


def test_conntrack_size_is_not_writable_in_a_network_namespace(inside: str, runner: Runner) -> None:
    """Warnings name the settings, and the values stay."""
    before = LIMIT.read_text(), HASHSIZE.read_text()
    if int(before[0]) >= 1048576:
        pytest.skip("this machine's nf_conntrack_max is as high as it gets")
    logs, _ = run(runner, {**FLAGS, "conntrack-max-per-core": "1048576"})
    failed = [line["setting"] for line in logs if line["log_level"] == "warning"]
    assert f"/{LIMIT.relative_to('/')}" in failed
    assert (LIMIT.read_text(), HASHSIZE.read_text()) == before
