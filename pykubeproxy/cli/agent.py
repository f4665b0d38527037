"""Start the agent for `pykubeproxy run`, which imports this module only then."""

from collections.abc import Mapping

import msgspec
import structlog

from pykubeproxy.agent import BindFailed, RunOptions
from pykubeproxy.agent.process import serve
from pykubeproxy.cli.logs import LogQueue
from pykubeproxy.config import Config, Loaded
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


def init(config: Config) -> None:
    """Do what needs the node's privileges, so that the agent can run without them."""
    # Only --init-only needs these before the agent asks for the lists.
    from pykubeproxy.agent.node_rules import set_up_loopback
    from pykubeproxy.agent.node_setup import prepare_backend, set_up

    set_up(config)
    try:
        backend = prepare_backend(config)
    except KernelError as error:
        log.warning("kernel modules not loaded, route_localnet not set", error=str(error))
    else:
        set_up_loopback(config, backend)
