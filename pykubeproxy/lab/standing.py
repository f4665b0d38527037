"""A lab that stands until it is taken down: a driver in the background, and how to find and end it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

from pykubeproxy.lab import sweep
from pykubeproxy.lab.agents import node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.namespaces import entered, names, prefix
from pykubeproxy.lab.places import Place
from pykubeproxy.lab.prober import Target
from pykubeproxy.lab.requirements import Unmet, require
from pykubeproxy.lab.rundir import AlreadyRunning, RunDirectory, labs

PATIENCE = 20.0


def up(name: str, backend: str, pods: int) -> None:
    """Start a lab in the background, with a Service `web` and that many pods.

    Returns when it stands. Raises Unmet, AlreadyRunning, or RuntimeError with what the driver said.
    """
    require()
    directory = RunDirectory(name)
    if directory.held:
        raise AlreadyRunning(f"lab {name!r} is there already; `pykubeproxy lab status` shows it")
    driver = subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.standing", name, backend, str(pods)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert driver.stdout is not None
    said = driver.stdout.readline().decode().strip()
    if said != "standing":
        rest = driver.stdout.read().decode().strip().splitlines()
        raise RuntimeError(f"the lab did not come up: {(rest or [said])[-1]}")


def stand(name: str, backend: str, pods: int) -> None:
    """The driver: build the lab, say so on the first line, stay until SIGTERM."""
    leave_if_told = exit_on_signals(signal.SIGINT)
    with Lab(name, backend=backend) as lab:
        lab.deploy("web", pods)
        vip = lab.service("web", protocols=("TCP", "UDP"), type="NodePort").vip()
        if pods:
            for name, node in lab.nodes.items():
                _wait_for_rules(lab, name, node, vip)
        sys.stdout.write("standing\n")
        sys.stdout.flush()
        # Whoever started this goes away now, and with it the other end of the pipe.
        with (lab.logs / "driver.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        while True:
            leave_if_told()
            signal.pause()


def _wait_for_rules(lab: Lab, name: str, node: Place, vip: Target) -> None:
    lab.until(lambda: not node.prober.tcp(vip).failed, f"{vip} answers on {name}")


def exit_on_signals(*more: signal.Signals) -> Callable[[], None]:
    """Let SIGTERM, SIGHUP and `more` end this process through all that is to be cleaned up.

    They raise SystemExit. Python drops an exception that is raised inside certain callbacks, so call what
    is returned now and then: it raises again if a signal came.
    """
    came: list[int] = []

    def leave_if_told() -> None:
        if came:
            raise SystemExit(128 + came[0])

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        leave_if_told()

    for number in (signal.SIGTERM, signal.SIGHUP, *more):
        signal.signal(number, handle)
    return leave_if_told


def down(name: str) -> bool:
    """Take a lab down, also one whose driver died; returns whether there was anything to take down."""
    require()
    directory = RunDirectory(name)
    there = directory.held or directory.path.exists() or bool(names(name))
    driver = directory.read_state().get("driver")
    if directory.held and isinstance(driver, int):
        _end(driver)
    directory.lock(patience=PATIENCE)
    try:
        sweep.sweep(name)
    finally:
        directory.release()
    return there


def _end(driver: int) -> None:
    """Have a driver clear up, and wait until it has."""
    try:
        handle = os.pidfd_open(driver)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [], PATIENCE)
    except ProcessLookupError:
        pass  # it ended by itself
    finally:
        os.close(handle)


def only_lab(name: str | None) -> RunDirectory:
    """The lab of that name, or the only one there is; raises Unmet with what to do."""
    running = [lab for lab in labs() if RunDirectory(lab).held]
    if name is None and len(running) == 1:
        return RunDirectory(running[0])
    if name in running:
        return RunDirectory(name)
    if not running:
        raise Unmet("no lab is up; `pykubeproxy lab up` starts one")
    raise Unmet(f"say which lab with --name: {', '.join(running)}")


def execute(directory: RunDirectory, place: str, command: list[str]) -> None:
    """Become a command that runs in a node, a pod, the client or the fabric; returns only by raising.

    Raises Unmet if there is no such place, and OSError if there is no such command.
    """
    require()
    places = [name.removeprefix(prefix(directory.lab)) for name in names(directory.lab)]
    if place not in places:
        raise Unmet(f"no {place!r} in lab {directory.lab}; there are {', '.join(places)}")
    environment = node_environment(directory.path / "logs", place)
    with entered(f"{prefix(directory.lab)}{place}"):
        os.execvpe(command[0], command, environment)  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    try:
        stand(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (TimeoutError, RuntimeError) as failure:
        sys.exit(str(failure))
