"""`pykubeproxy run`: run the agent."""

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

import pykubeproxy
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, action_options, config_options, is_on, load_config
from pykubeproxy.cli.help import ACTION, FAILED, SOURCE, command, option
from pykubeproxy.cli.terminal import click_errors
from pykubeproxy.config import Config, Loaded, dump

if TYPE_CHECKING:
    from pykubeproxy.cli.logs import LogQueue


@command(
    context_settings={**CONTEXT_SETTINGS, "allow_extra_args": True},
    exit_codes={
        0: "Stopped by a signal, or done.",
        1: "A failure, or the configuration file changed.",
        2: "Wrong usage.",
        3: "With --once: another pykubeproxy runs on this node.",
    },
    failure=FAILED,
    shows_flags=True,
    short_help="Run the agent: keep this node's rules up to date.",
)
@option(
    "--manifests",
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-" instead of an API server.',
    group=SOURCE,
)
@option("--once", is_flag=True, help="Sync once and exit.", group=ACTION)
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
    # As kube-proxy, ignore empty arguments, which templates leave.
    if extra := [*filter(None, click.get_current_context().args)]:
        raise click.UsageError(f"Got unexpected extra argument ({' '.join(extra)})")
    if is_on(flags, "version"):
        click.echo(f"pykubeproxy {pykubeproxy.__version__}")
        return
    cleanup = is_on(flags, "cleanup")
    if path := str(flags.get("write-config-to", "")):
        _write_config(_load(flags)[0].config, path)
        return
    _require_node()
    if cleanup:
        _load(flags)
        from pykubeproxy.cli.cleanup import clean_up_alone

        sys.exit(0 if clean_up_alone(all_modes=True) else 1)
    # Import it before reading the configuration, so that the agent misses no change of the file.
    from pykubeproxy.cli import agent

    loaded, log_queue = _load(flags)
    if is_on(flags, "init-only"):
        agent.init(loaded.config)
    else:
        _end(agent.start(loaded, flags, manifests, once, log_queue))


def _end(code: int) -> NoReturn:
    """End the process; threads may be inside OpenSSL, which then crashes if it cleans up as the process exits."""
    atexit._run_exitfuncs()  # they write the log and remove temporary files
    os._exit(code)


def _require_node() -> None:
    from pykubeproxy.kernel import NotANode, require_node

    with click_errors(NotANode):
        require_node()


def _load(flags: Mapping[str, object]) -> tuple[Loaded, "LogQueue | None"]:
    """Return the configuration, whose warnings are logged, and the queue of the log."""
    import structlog

    from pykubeproxy.cli import logs

    loaded = load_config(flags)
    log_queue = logs.queue_stderr()
    logs.set_up(loaded.config.logging.format)
    for warning in loaded.warnings:
        structlog.get_logger().warning("configuration warning", reason=warning)
    return loaded, log_queue


def _write_config(config: Config, path: str) -> None:
    try:
        Path(path).write_text(dump(config))
    except OSError as error:
        raise click.ClickException(f"--write-config-to: cannot write {path}: {error.strerror}") from None
