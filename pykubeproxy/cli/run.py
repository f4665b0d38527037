"""`pykubeproxy run`: run the agent."""

import sys
from pathlib import Path

import click
import msgspec
import structlog

import pykubeproxy
from pykubeproxy.agent.loopback import set_up_loopback
from pykubeproxy.agent.node_setup import provide_modules, set_up
from pykubeproxy.agent.observe.listeners import BindFailed
from pykubeproxy.agent.process import RunOptions, serve
from pykubeproxy.cli import logs
from pykubeproxy.cli.cleanup import clean_up_alone
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, action_options, config_options, is_on, load_config
from pykubeproxy.config import Config, dump
from pykubeproxy.kernel import AlreadyRunning, KernelError
from pykubeproxy.sources import SourceError

log = structlog.get_logger()

# The exit status of `run --once` if another agent runs on this node.
OCCUPIED = 3


@click.command(
    context_settings=CONTEXT_SETTINGS,
    short_help="Run the agent: keep this node's rules up to date.",
)
@click.option(
    "--manifests",
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-" instead of an API server.',
)
@click.option("--once", is_flag=True, help="Sync once and exit.")
@config_options
@action_options
def run(manifests: str | None, once: bool, flags: dict[str, object]) -> None:
    """Run the agent: keep this node's iptables rules up to date with the Services of the cluster.

    Accepts the flags and the configuration file of kube-proxy. Without --kubeconfig, --master or --manifests, it uses
    the service account of its pod. The rules stay in place when it exits. If another agent runs on this node, wait until
    it ends and take over.

    \b
    pykubeproxy run --config config.conf --hostname-override node1
    pykubeproxy run --manifests objects.yaml --cluster-cidr 10.244.0.0/16 --once
    """
    if is_on(flags, "version"):
        click.echo(f"pykubeproxy {pykubeproxy.__version__}")
        return
    if is_on(flags, "cleanup"):
        sys.exit(0 if clean_up_alone(all_modes=True) else 1)
    loaded = load_config(flags)
    config = loaded.config
    log_queue = logs.queue_stderr()
    logs.set_up(config.logging.format)
    for warning in loaded.warnings:
        log.warning("configuration warning", reason=warning)
    if path := str(flags.get("write-config-to", "")):
        _write_config(config, path)
        return
    if is_on(flags, "init-only"):
        _init(config)
        return
    order = RunOptions(
        loaded=loaded,
        flags=flags,
        config_file=str(flags.get("config", "")),
        manifests=manifests,
        once=once,
    )
    if log_queue:
        order = msgspec.structs.replace(
            order, dropped_lines=log_queue.dropped_lines, drain_log=log_queue.drain
        )
    try:
        sys.exit(serve(order))
    except (KernelError, SourceError, BindFailed) as error:
        log.error("agent failed", error=str(error))
        sys.exit(OCCUPIED if isinstance(error, AlreadyRunning) else 1)


def _init(config: Config) -> None:
    set_up(config)
    try:
        backend = provide_modules(config)
    except KernelError as error:
        log.warning("kernel modules not loaded, route_localnet not set", error=str(error))
    else:
        set_up_loopback(config, backend)


def _write_config(config: Config, path: str) -> None:
    try:
        Path(path).write_text(dump(config))
    except OSError as error:
        raise click.ClickException(f"--write-config-to: cannot write {path}: {error.strerror}") from None
