"""Run the agent as a process: wait for another one to end, and ask for the lists before the rest starts."""

import signal
import socket
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FrameType

import structlog

from pykubeproxy import garbage
from pykubeproxy.agent import RunOptions
from pykubeproxy.agent.mailbox import Mailbox, log_stop
from pykubeproxy.agent.stops import ConfigFileWatch, start_thread, stop_on_signals, stop_on_thread_death
from pykubeproxy.config import Config
from pykubeproxy.kernel import InstanceLock, lock_holder
from pykubeproxy.sources import Client, Watch, api_watches

_ENDING = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger()


def take_over(config: Config, node_name: str, flags: Mapping[str, object]) -> InstanceLock:
    """Return the instance lock once no other agent holds it.

    Meanwhile, serve the health and metrics addresses as far as they are free: alive but not ready. SIGTERM and SIGINT
    raise SystemExit with status 0, until the caller sets other handlers.
    """
    for number in _ENDING:
        signal.signal(number, _end)
    begun = time.monotonic()
    closing: list[Callable[[], None]] = []

    def wait() -> None:
        log.info("waiting for another agent", holder=lock_holder())
        # Python loses an exception of a signal that arrives in one of an import's own callbacks.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            from pykubeproxy.agent.observe.listeners import serve_standby

            closing.append(serve_standby(config, node_name, flags, lock_holder).close)
            import_module("pykubeproxy.agent.assembly")  # so that taking over is quick
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    try:
        lock = InstanceLock(wait)
    except SystemExit:
        log.info("stopping while waiting for another agent")
        raise
    finally:
        for close in closing:
            close()
    if closing:
        log.info("taking over from another agent", waited=round(time.monotonic() - begun, 3))
    return lock


def _end(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


def serve(options: RunOptions) -> int:
    """Run the agent of this node until it is stopped, and return the exit status. Wait while another agent runs.

    Raises KernelError, SourceError and BindFailed if it cannot start; with `once`, AlreadyRunning beside another agent.
    """
    config = options.loaded.config
    node_name = config.hostname_override or socket.gethostname().lower()
    mailbox = Mailbox()
    config_watch = ConfigFileWatch(options.config_file) if options.config_file else None
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
    for watch in watches:
        start_thread(watch.name, lambda watch=watch: watch.run(mailbox.put), mailbox)  # type: ignore[misc]
