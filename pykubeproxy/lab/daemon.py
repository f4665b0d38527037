"""Labs that run in the background: start one, find it, run commands in it, end it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

from pykubeproxy.lab import machine
from pykubeproxy.lab.agents import node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.machine import LabError, RunDirectory
from pykubeproxy.lab.network import entered, lab_namespaces, namespace_prefix
from pykubeproxy.lab.pods import workload

STOP_SECONDS = 20.0


def up(name: str, backend: str, pods: int) -> None:
    """Start a lab in the background, with a Service `web`, its pods and a pod `client`; return when it is ready.

    Raises LabError.
    """
    machine.check_requirements()
    driver = subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.daemon", name, backend, str(pods)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert driver.stdout is not None
    first = driver.stdout.readline().decode().strip()
    if first != "ready":
        output = [first, *driver.stdout.read().decode().strip().splitlines()]
        raise LabError(f"cannot start the lab: {output[-1]}")


def run(name: str, backend: str, pods: int) -> None:
    """Run the driver: build the lab, print "ready", wait for SIGTERM."""
    check_signals = exit_on_signals(signal.SIGINT)
    with Lab(name, backend=backend) as lab:
        lab.deploy("web", pods)
        client = lab.start_pod("client", "client", "node1", workload("client"))
        client.wait_answering()
        vip = lab.service("web", type="NodePort").vip()
        if pods:
            probers = [node.prober for node in lab.nodes.values()]
            lab.until(
                lambda: not any(prober.tcp(vip).failed for prober in probers), f"{vip} answers on all nodes"
            )
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        # The parent exits now and closes its end of the pipe.
        with (lab.logs / "driver.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        while True:
            check_signals()
            signal.pause()


def exit_on_signals(*more: signal.Signals) -> Callable[[], None]:
    """Raise SystemExit on SIGTERM, SIGHUP and `more`, so that the process cleans up before it ends.

    Python drops exceptions that are raised inside certain callbacks. Call the returned function now and then: it
    raises SystemExit again after a signal.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise SystemExit(128 + received[0])

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        check()

    for number in (signal.SIGTERM, signal.SIGHUP, *more):
        signal.signal(number, handle)
    return check


def down(name: str) -> bool:
    """Remove a lab, also one without a driver; return whether there was one. Raises LabError."""
    machine.check_requirements()
    directory = RunDirectory(name)
    existed = directory.held or directory.path.exists() or bool(lab_namespaces(name))
    driver = directory.read_state().get("driver")
    if directory.held and driver:
        machine.end_process(driver, signal.SIGTERM, STOP_SECONDS)
    directory.lock(timeout=STOP_SECONDS)
    try:
        machine.clean_up(name)
    finally:
        directory.release()
    return existed


def select_lab(name: str | None) -> RunDirectory:
    """Return the running lab of this name, or the only one. Raises LabError."""
    machine.check_requirements()
    running = [lab for lab in machine.lab_names() if RunDirectory(lab).held]
    if not running:
        raise LabError("no lab is running; start one with `pykubeproxy lab up`")
    if name is None and len(running) == 1:
        return RunDirectory(running[0])
    if name in running:
        return RunDirectory(name)
    if name is not None:
        raise LabError(f"no lab {name} is running; running: {', '.join(running)}")
    raise LabError(f"select a lab with --name: {', '.join(running)}")


def execute(directory: RunDirectory, host: str, command: list[str]) -> None:
    """Replace this process with a command on a node, a pod, the outside client or the fabric.

    KUBECONFIG names the lab's API server, so that kubectl finds it. A shell shows the host in its prompt.

    Raises LabError for an unknown host, OSError if the command cannot be run.
    """
    prefix = namespace_prefix(directory.lab)
    hosts = [name.removeprefix(prefix) for name in lab_namespaces(directory.lab)]
    if host not in hosts:
        raise LabError(f"no host {host!r} in lab {directory.lab}; use one of {', '.join(hosts)}")
    environment = {**node_environment(directory.logs, host), "KUBECONFIG": str(directory.kubeconfig)}
    environment["PS1"] = f"{host} # "
    with entered(f"{prefix}{host}"):
        os.execvpe(command[0], command, environment)  # noqa: S606 - the user's command


if __name__ == "__main__":
    try:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (LabError, TimeoutError, RuntimeError) as error:
        sys.exit(str(error))
