"""Build the parts of the agent, start their threads, and run the reconcile loop."""

import structlog

import pykubeproxy
from pykubeproxy.agent import RunOptions
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.loop import Agent
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox
from pykubeproxy.agent.node_setup import set_up
from pykubeproxy.agent.observe.events import NORMAL, ApiRecorder, Recorder
from pykubeproxy.agent.observe.health import Health, Heartbeat
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.status import StatusService
from pykubeproxy.agent.startup import Families, open_families
from pykubeproxy.agent.stops import ConfigFileWatch, start_thread, watch_files
from pykubeproxy.kernel import InstanceLock, watch_addresses
from pykubeproxy.sources import Client, Watch

log = structlog.get_logger()


def run_agent(
    options: RunOptions,
    node_name: str,
    mailbox: Mailbox,
    config_watch: ConfigFileWatch | None,
    client: Client | None,
    watches: tuple[Watch, ...],
    lock: InstanceLock,
) -> int:
    """Run the agent until a Stop arrives, and return the exit status. Raises KernelError, SourceError and BindFailed.

    The watches run already, unless `once` is set.
    """
    config = options.loaded.config
    set_up(config)
    heartbeat = Heartbeat()
    families = open_families(config, None if options.once else mailbox.put, heartbeat.progress)
    api_servers = client.server_addresses if client else frozenset
    recorder = ApiRecorder(client, node_name) if client and not options.once else Recorder(node_name)
    report_start(families, recorder)
    names = [opened.tables.family for opened in families.opened]
    health = Health(
        names, config.iptables.sync_period, client is not None, mailbox.waiting_since, heartbeat.hung
    )
    metrics = Metrics(busy_seconds=heartbeat.busy_seconds, families=names)
    observers = Observers(config, names, recorder, health, metrics)
    flows = FlowCleaner(config.logging.verbosity, metrics.reconciled)
    observers.add(flows.notice)
    agent = Agent(
        config,
        node_name,
        families,
        mailbox,
        observers,
        heartbeat,
        wait_for_node=client is not None,
        once=options.once,
        api_servers=api_servers,
    )
    try:
        if options.once:
            return _run_once(agent, watches, mailbox, flows)
        service = StatusService(
            node_name, families, observers, mailbox.ask, watches, api_servers, lock.waiting
        )
        heartbeat.progress()  # a start that hangs is seen too
        observers.serve(options.flags, service.status, service.objects)
        metrics.watching(watches)
        health.watching(watches)
        metrics.cleaning_flows(flows.waiting_seconds)
        metrics.read_dropped_lines(options.dropped_lines)
        watch_addresses(lambda: mailbox.put(AddressesChanged()))
        start_thread("files", lambda: watch_files(lock, config_watch, mailbox.put), mailbox)
        for worker in (flows, families.watch):
            if worker:
                start_thread(worker.name, worker.run, mailbox)
        return agent.run()
    finally:
        observers.close()


def report_start(families: Families, recorder: Recorder) -> None:
    """Log the start, and report each family that this node cannot serve."""
    node_name = recorder.node_name
    log.info(
        "starting",
        version=pykubeproxy.__version__,
        node=node_name,
        backend=families.backend.value,
        families=[opened.tables.family.value for opened in families.opened],
    )
    for family, reason in families.unsupported.items():
        log.warning("address family not supported", family=family.value, reason=reason)
        note = f"node {node_name} does not serve {family.value}: {reason}"
        recorder.on_node("AddressFamilyNotSupported", note, "StartKubeProxy", NORMAL)


def _run_once(agent: Agent, watches: tuple[Watch, ...], mailbox: Mailbox, flows: FlowCleaner) -> int:
    for watch in watches:
        for listed in watch.once():
            mailbox.put(listed)
    code = agent.run()
    flows.clean()
    return code
