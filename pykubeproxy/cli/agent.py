"""Start the agent for `pykubeproxy run`, which imports this module only then."""

from collections.abc import Mapping

import msgspec
import structlog

from pykubeproxy.agent.errors import BindFailed
from pykubeproxy.agent.process import serve
from pykubeproxy.agent.run_options import RunOptions
from pykubeproxy.cli.log_queue import LogQueue
from pykubeproxy.config import Loaded
from pykubeproxy.kernel import AlreadyRunning, KernelError
from pykubeproxy.sources import SourceError

log = structlog.get_logger()

# The exit status of `run --once` if another agent runs on this node.
OCCUPIED = 3


def start(
    loaded: Loaded, flags: Mapping[str, object], manifests: str | None, once: bool, log_queue: LogQueue | None
) -> int:
    """Run the agent until it is stopped, and return the exit status. Log why it cannot start."""
    options = RunOptions(
        loaded=loaded,
        flags=flags,
        config_file=str(flags.get("config", "")),
        manifests=manifests,
        once=once,
    )
    if log_queue:
        options = msgspec.structs.replace(
            options, dropped_lines=log_queue.dropped_lines, drain_log=log_queue.drain
        )
    try:
        return serve(options)
    except (KernelError, SourceError, BindFailed) as error:
        log.error("agent failed", error=str(error))
        return OCCUPIED if isinstance(error, AlreadyRunning) else 1
