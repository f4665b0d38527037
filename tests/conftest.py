"""Fixtures and hooks for all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

# As in an activated environment: tests find programs of the development dependencies, such as kubectl.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# A shell starts commands in the background with SIGINT ignored, which children would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples have no deadline; in CI they are the same every time.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")


# Files whose tests take longest, the longest first.
# fmt: off
_LONGEST = (
    "test_lab_scenarios", "test_tenants", "test_examples", "test_harnesses", "test_tenants_api_server",
    "test_lab_lifecycle", "test_tenants_views", "test_agent_drift", "test_faults_api_server", "test_kubectl",
)
# fmt: on


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(_PrintFailures(config))


class _PrintFailures:
    """Print the name and the reason of each failure as it happens; the tracebacks come at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (terminal := self._config.pluginmanager.get_plugin("terminalreporter")):
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext
            terminal.write_line(f"\nFAILED {report.nodeid}: {reason.partition(chr(10))[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = _slow_tests_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(
        reason="needs root, for network namespaces and iptables: run as root or with sudo"
    )
    for item in items:
        if "root" in item.keywords:
            item.add_marker(skip)


def _slow_tests_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in such an order that each worker but the last begins with its share of those of whole processes.

    These wait most of the time; the last worker uses the rest of the CPU. A worker gets consecutive tests, and steals from
    the end of the others' when it has done its own.
    """
    slow: dict[str, list[pytest.Item]] = {}
    fast: list[pytest.Item] = []
    for item in items:
        if item.path.parent.name == "system" or item.path.stem in _LONGEST:
            slow.setdefault(item.path.stem, []).append(item)
        else:
            fast.append(item)
    files = sorted(slow, key=lambda file: _LONGEST.index(file) if file in _LONGEST else len(_LONGEST))
    size = -(-len(items) // workers)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = files[worker :: max(1, workers - 1)] if worker < max(1, workers - 1) else []
        ordered += (item for file in share for item in slow[file])
        filling = max(0, (worker + 1) * size - len(ordered))
        ordered += fast[:filling]
        del fast[:filling]
    return ordered + fast


@pytest.fixture(autouse=True)
def restore_structlog() -> Iterator[None]:
    """Restore the structlog configuration after each test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
