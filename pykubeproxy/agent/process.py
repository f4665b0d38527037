"""The agent as a process: its parts put together, a thread for each that waits for something, and its end."""

import signal
import socket
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import msgspec
import structlog

import pykubeproxy
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Stop
from pykubeproxy.agent.node_setup import set_up
from pykubeproxy.agent.observe.events import ApiRecorder, NoRecorder
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.status_service import StatusService
from pykubeproxy.agent.reload import ConfigWatch
from pykubeproxy.agent.startup import Families, open_families, without_garbage_collection
from pykubeproxy.config import Config, Loaded
from pykubeproxy.kernel import AddressWatch
from pykubeproxy.sources import Client, ManifestWatch, SourceError, Watch, api_watches

log = structlog.get_logger()


class RunOptions(msgspec.Struct, frozen=True):
    """What a process is to do.

    `loaded` is the configuration, whose warnings the caller tells. `manifests` is where objects come from, None for an
    API server. `flags` are those given, for /flagz. `config_file` is watched for changes if it is not empty, and then
    read by `reload`.
    """

    loaded: Loaded
    flags: Mapping[str, object]
    reload: Callable[[], Loaded]
    config_file: str = ""
    manifests: str | None = None
    once: bool = False


def serve(order: RunOptions) -> int:
    """Be the agent of this node until told to stop; returns the exit status.

    Raises KernelError, SourceError and BindFailed for what stands in the way of a start.
    """
    config = order.loaded.config
    node_name = config.hostname_override or socket.gethostname().lower()
    # First what may be wrong with the configuration: nothing of the node is touched then.
    client = _client(config) if order.manifests is None else None
    set_up(config)
    without_garbage_collection()
    mailbox = Mailbox()
    families = open_families(config, None if order.once else mailbox.put)
    watches = api_watches(client, node_name) if client else (ManifestWatch(order.manifests or ""),)
    _announce(node_name, families)

    recorder = ApiRecorder(client, node_name) if client and not order.once else NoRecorder()
    observers = Observers(
        config,
        node_name,
        [it.tables.family for it in families.opened],
        recorder,
        needs_node=client is not None,
    )
    flows = FlowCleaner(config.logging.verbosity, observers.metrics.reconciled)
    agent = Agent(
        config,
        node_name,
        families,
        mailbox,
        observers,
        flows,
        wait_for_node=client is not None,
        once=order.once,
    )
    _stop_on_signals(mailbox)
    try:
        if order.once:
            return _run_once(agent, watches, mailbox, flows)
        desk = StatusService(node_name, families, observers, mailbox.put, watches)
        observers.serve(order.flags, desk.status, desk.objects)
        observers.metrics.watching(watches)
        _start_threads(order, watches, mailbox, flows)
        if families.watch:
            _start(families.watch.name, families.watch.run, mailbox)
        return agent.run()
    finally:
        observers.close()


def _announce(node_name: str, families: Families) -> None:
    log.info(
        "starting",
        version=pykubeproxy.__version__,
        node=node_name,
        backend=families.backend.value,
        families=[opened.tables.family.value for opened in families.opened],
    )
    for family, reason in families.lacking.items():
        log.warning("a family is left out", family=family.value, reason=reason)


def _client(config: Config) -> Client:
    to = config.client
    return Client(to.kubeconfig, to.master, to.qps, to.burst)


def _run_once(agent: Agent, watches: tuple[Watch, ...], mailbox: Mailbox, flows: FlowCleaner) -> int:
    for watch in watches:
        for listed in watch.once():
            mailbox.put(listed)
    code = agent.run()
    flows.clean()
    return code


def _start_threads(
    order: RunOptions, watches: tuple[Watch, ...], mailbox: Mailbox, flows: FlowCleaner
) -> None:
    """Whatever thread dies, the process ends, for whoever started it to start it anew."""

    def died(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "unknown"
        try:
            log.error("a thread died", thread=name, exc_info=args.exc_value)
        finally:
            # Whatever keeps the log from being written, such as want of memory.
            mailbox.put(Stop(1, f"the thread {name} died: {args.exc_value!r}"))

    threading.excepthook = died
    AddressWatch(lambda: mailbox.put(AddressesChanged()))
    for watch in watches:
        _start(watch.name, lambda watch=watch: watch.run(mailbox.put), mailbox)  # type: ignore[misc]
    _start(flows.name, flows.run, mailbox)
    if order.config_file:
        reload = ConfigWatch(order.config_file, order.loaded, order.reload, mailbox)
        _start(reload.name, reload.run, mailbox)


def _start(name: str, body: Callable[[], None], mailbox: Mailbox) -> None:
    def run() -> None:
        try:
            body()
            mailbox.put(Stop(1, f"the thread {name} has ended"))
        except SourceError as error:
            mailbox.put(Stop(1, str(error)))

    threading.Thread(target=run, name=name, daemon=True).start()


def _stop_on_signals(mailbox: Mailbox) -> None:
    def stop(number: int, _: FrameType | None) -> None:
        mailbox.put(Stop(0, signal.Signals(number).name))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
