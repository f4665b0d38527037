"""`pykubeproxy run --init-only`: set up the node."""

import structlog

from pykubeproxy.agent.loopback import set_up_loopback
from pykubeproxy.agent.node_setup import provide_modules, set_up
from pykubeproxy.config import Config
from pykubeproxy.kernel import KernelError

log = structlog.get_logger()


def init(config: Config) -> None:
    """Do what needs the node's privileges, so that the agent can run without them."""
    set_up(config)
    try:
        backend = provide_modules(config)
    except KernelError as error:
        log.warning("kernel modules not loaded, route_localnet not set", error=str(error))
    else:
        set_up_loopback(config, backend)
