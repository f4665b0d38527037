"""`pykubeproxy run`: the agent."""

import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click
import structlog

import pykubeproxy
from pykubeproxy.agent.events import ApiRecorder, NoRecorder
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import Mailbox, Stop, Wake
from pykubeproxy.agent.observers import BindFailed, Observers
from pykubeproxy.agent.startup import open_node
from pykubeproxy.cli import logs
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, action_options, config_options, is_on, load_config
from pykubeproxy.config import Config, dump
from pykubeproxy.kernel import AddressWatch, KernelError
from pykubeproxy.sources import Client, ManifestWatch, SourceError, Watch, api_watches

log = structlog.get_logger()


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--manifests",
    metavar="PATH",
    help='Take objects from a YAML or JSON file, a folder, or "-" instead of an API server.',
)
@click.option("--once", is_flag=True, help="Sync once, then exit.")
@config_options
@action_options
def run(manifests: str | None, once: bool, flags: dict[str, object]) -> None:
    """Keep this node's iptables rules in line with the cluster's Services.

    Takes kube-proxy's flags and its configuration file. Without --kubeconfig, --master or --manifests it uses the
    service account of its pod. The rules stay in place when it ends.

    \b
    pykubeproxy run --config /var/lib/kube-proxy/config.conf --hostname-override node1
    pykubeproxy run --manifests objects.yaml --cluster-cidr 10.244.0.0/16 --once
    """
    if is_on(flags, "version"):
        click.echo(f"pykubeproxy {pykubeproxy.__version__}")
        return
    config, warnings = load_config(flags)
    if path := str(flags.get("write-config-to", "")):
        Path(path).write_text(dump(config))
        return
    logs.set_up(config.logging.format)
    for warning in warnings:
        log.warning(warning)
    try:
        sys.exit(_serve(config, flags, manifests, once))
    except (KernelError, SourceError, BindFailed) as error:
        log.error(str(error))
        sys.exit(1)


def _serve(config: Config, flags: Mapping[str, object], manifests: str | None, once: bool) -> int:
    node_name = config.hostname_override or socket.gethostname().lower()
    node = open_node(config)
    client = _client(config) if manifests is None else None
    watches = api_watches(client, node_name) if client else (ManifestWatch(manifests or ""),)
    log.info(
        "starting",
        version=pykubeproxy.__version__,
        node=node_name,
        backend=node.backend.value,
        families=[opened.tables.family.value for opened in node.families],
    )
    for family, reason in node.lacking.items():
        log.warning("a family is left out", family=family.value, reason=reason)
    mailbox = Mailbox()
    observers = Observers(
        config,
        node_name,
        [opened.tables.family for opened in node.families],
        ApiRecorder(client, node_name) if client and not once else NoRecorder(),
        needs_node=client is not None,
    )
    agent = Agent(
        config,
        node_name,
        node.families,
        node.lacking,
        mailbox,
        observers,
        wait_for_node=client is not None,
        once=once,
    )
    _stop_on_signals(mailbox)
    if config.node_port_addresses:
        AddressWatch(lambda: mailbox.put(Wake("addresses")))
    if once:
        for event in (event for watch in watches for event in watch.once()):
            mailbox.put(event)
    else:
        observers.serve(flags)
        for watch in watches:
            _start(watch, mailbox)
    try:
        return agent.run()
    finally:
        observers.close()


def _client(config: Config) -> Client:
    to = config.client
    return Client(to.kubeconfig, to.master, to.qps, to.burst)


def _stop_on_signals(mailbox: Mailbox) -> None:
    def stop(number: int, _: FrameType | None) -> None:
        mailbox.put(Stop(0, signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _start(watch: Watch, mailbox: Mailbox) -> None:
    """Run a watch in a thread; should it ever end, so does the process, for whoever started it to start it anew."""

    def body() -> None:
        try:
            watch.run(mailbox.put)
            mailbox.put(Stop(1, f"{watch.name} has ended"))
        except SourceError as error:
            mailbox.put(Stop(1, str(error)))
        except BaseException as error:
            log.exception("a thread died", thread=watch.name)
            mailbox.put(Stop(1, f"{watch.name} died: {error!r}"))

    threading.Thread(target=body, name=watch.name, daemon=True).start()
