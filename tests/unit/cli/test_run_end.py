"""How the process of `run` ends."""

import subprocess
import sys

import pytest

from pykubeproxy.cli import main

# Run an agent that ends at once with status 7. OpenSSL cleans up in a function of C's `exit`, as `abort` is here.
PROGRAM = """
import ctypes
from unittest import mock
import structlog
from pykubeproxy.cli import main

def start(*_):
    structlog.get_logger().error("agent failed")
    return 7

c = ctypes.CDLL(None)
c.__cxa_atexit(c.abort, None, None)
with mock.patch("pykubeproxy.cli.agent.start", start):
    main()
"""


def test_an_agent_ends_without_the_cleanup_of_libraries_that_its_threads_may_use() -> None:
    """But with its log written."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert done.stderr.endswith("agent failed\n")


@pytest.mark.parametrize(("argument", "status"), [("--no-such-flag", 2), ("extra", 2), ("--v=x", 1)])
def test_wrong_usage_has_a_status_of_its_own(argument: str, status: int) -> None:
    """kube-proxy exits with 1 for all of these."""
    with pytest.raises(SystemExit) as ended:
        main(["run", argument])
    assert ended.value.code == status
