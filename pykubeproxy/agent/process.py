"""Run the agent as a process: take the instance lock, stop on signals, and ask for the lists before the rest starts."""

import socket

import structlog

from pykubeproxy import garbage
from pykubeproxy.agent import RunOptions
from pykubeproxy.agent.config_file import ConfigFileWatch
from pykubeproxy.agent.mailbox import Mailbox, log_stop
from pykubeproxy.agent.standby import take_over
from pykubeproxy.agent.stop_signals import stop_on_signals
from pykubeproxy.agent.threads import start_thread, stop_on_thread_death
from pykubeproxy.config import Config
from pykubeproxy.kernel import InstanceLock
from pykubeproxy.sources import Client, Watch, api_watches

log = structlog.get_logger()


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
        garbage.collect_rarely()
        watches = _watches(options, client, node_name)
        if not options.once:
            stop_on_thread_death(mailbox)
            _start(watches, mailbox)
        # Import most of the agent while the lists arrive.
        from pykubeproxy.agent.assembly import run_agent

        if stop := mailbox.stop():
            return log_stop(stop)
        return run_agent(options, node_name, mailbox, config_watch, client, watches, lock)


def _client(config: Config) -> Client:
    settings = config.client
    client = Client(settings.kubeconfig, settings.master, settings.qps, settings.burst)
    if not client.verifies_server:
        log.warning(
            "api server certificate not verified", server=client.server, reason="insecure-skip-tls-verify"
        )
    return client


def _watches(options: RunOptions, client: Client | None, node_name: str) -> tuple[Watch, ...]:
    if client:
        return api_watches(client, node_name)
    from pykubeproxy.sources.manifests import ManifestWatch

    return (ManifestWatch(options.manifests or ""),)


def _start(watches: tuple[Watch, ...], mailbox: Mailbox) -> None:
    """Start the watches, whose events wait in the mailbox."""
    for watch in watches:
        start_thread(watch.name, lambda watch=watch: watch.run(mailbox.put), mailbox)  # type: ignore[misc]
