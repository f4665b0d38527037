"""Run the agent as a process: build its parts, start their threads, and stop on signals."""

import socket
import threading
from collections.abc import Callable, Mapping

import msgspec
import structlog

import pykubeproxy
from pykubeproxy.agent.config_file import ConfigFileWatch
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Stop
from pykubeproxy.agent.node_setup import set_up
from pykubeproxy.agent.observe.events import ApiRecorder, Recorder
from pykubeproxy.agent.observe.heartbeat import Heartbeat
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.status_service import StatusService
from pykubeproxy.agent.standby import take_over
from pykubeproxy.agent.startup import Families, collect_garbage_rarely, open_families
from pykubeproxy.agent.stop_signals import stop_on_signals
from pykubeproxy.config import Config, Loaded
from pykubeproxy.kernel import InstanceLock, watch_addresses
from pykubeproxy.sources import Client, ManifestWatch, SourceError, Watch, api_watches

log = structlog.get_logger()


class RunOptions(msgspec.Struct, frozen=True):
    """The options of `pykubeproxy run`.

    `loaded` is the configuration; the caller logs its warnings. `flags` are the given flags, for /flagz. `manifests` is
    a path with objects; None means an API server. A change of `config_file`, if not empty, ends the process.
    `dropped_lines` returns how many log lines were dropped; `drain_log` waits up to some seconds until all are written.
    """

    loaded: Loaded
    flags: Mapping[str, object]
    config_file: str = ""
    manifests: str | None = None
    once: bool = False
    dropped_lines: Callable[[], int] = lambda: 0
    drain_log: Callable[[float], None] = lambda _: None


def serve(options: RunOptions) -> int:
    """Run the agent of this node until it is stopped, and return the exit status. Wait while another agent runs.

    Raises KernelError, SourceError and BindFailed if it cannot start; with `once`, AlreadyRunning beside another agent.
    """
    config = options.loaded.config
    node_name = config.hostname_override or socket.gethostname().lower()
    mailbox = Mailbox()
    config_watch = ConfigFileWatch(options.config_file, mailbox.put) if options.config_file else None
    # Report errors of the configuration before changing anything on the node.
    client = _client(config) if options.manifests is None else None
    with InstanceLock() if options.once else take_over(config, node_name, options.flags) as lock:
        stop_on_signals(mailbox, options.drain_log)
        return _serve(options, node_name, mailbox, config_watch, client, lock)


def _serve(
    options: RunOptions,
    node_name: str,
    mailbox: Mailbox,
    config_watch: ConfigFileWatch | None,
    client: Client | None,
    lock: InstanceLock,
) -> int:
    config = options.loaded.config
    set_up(config)
    collect_garbage_rarely()
    heartbeat = Heartbeat()
    families = open_families(config, None if options.once else mailbox.put, heartbeat.progress)
    watches = api_watches(client, node_name) if client else (ManifestWatch(options.manifests or ""),)
    api_servers = client.server_addresses if client else frozenset
    _log_start(node_name, families)

    recorder = ApiRecorder(client, node_name) if client and not options.once else Recorder()
    names = [opened.tables.family for opened in families.opened]
    observers = Observers(
        config, node_name, names, recorder, client is not None, mailbox.waiting_since, heartbeat
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
        once=options.once,
        api_servers=api_servers,
    )
    try:
        if options.once:
            return _run_once(agent, watches, mailbox, flows)
        service = StatusService(
            node_name, families, observers, mailbox.put, watches, api_servers, lock.waiting
        )
        observers.serve(options.flags, service.status, service.objects)
        observers.metrics.watching(watches)
        observers.metrics.cleaning_flows(flows.waiting_seconds)
        observers.metrics.read_dropped_lines(options.dropped_lines)
        _stop_on_thread_death(mailbox)
        watch_addresses(lambda: mailbox.put(AddressesChanged()))
        for watch in watches:
            _start(watch.name, lambda watch=watch: watch.run(mailbox.put), mailbox)  # type: ignore[misc]
        if client:
            _start("api-contact", client.contact.run, mailbox)
        for worker in (flows, config_watch, families.watch):
            if worker:
                _start(worker.name, worker.run, mailbox)
        return agent.run()
    finally:
        observers.close()


def _log_start(node_name: str, families: Families) -> None:
    log.info(
        "starting",
        version=pykubeproxy.__version__,
        node=node_name,
        backend=families.backend.value,
        families=[opened.tables.family.value for opened in families.opened],
    )
    for family, reason in families.unsupported.items():
        log.warning("address family not supported", family=family.value, reason=reason)


def _client(config: Config) -> Client:
    settings = config.client
    client = Client(settings.kubeconfig, settings.master, settings.qps, settings.burst)
    if not client.verifies_server:
        log.warning(
            "api server certificate not verified", server=client.server, reason="insecure-skip-tls-verify"
        )
    return client


def _run_once(agent: Agent, watches: tuple[Watch, ...], mailbox: Mailbox, flows: FlowCleaner) -> int:
    for watch in watches:
        for listed in watch.once():
            mailbox.put(listed)
    code = agent.run()
    flows.clean()
    return code


def _stop_on_thread_death(mailbox: Mailbox) -> None:
    """End the process if any thread dies; the kubelet restarts the container."""

    def died(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "unknown"
        try:
            log.error("thread died", thread=name, exc_info=args.exc_value)
        finally:
            # Even if logging fails, for example without memory.
            mailbox.put(Stop(1, f"thread {name} died: {args.exc_value!r}"))

    threading.excepthook = died


def _start(name: str, body: Callable[[], None], mailbox: Mailbox) -> None:
    def run() -> None:
        try:
            body()
            mailbox.put(Stop(1, f"thread {name} ended"))
        except SourceError as error:
            mailbox.put(Stop(1, str(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
