"""Labs that run in the background: start one, find it, run commands in it, end it."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from pykubeproxy.lab import faults, machine
from pykubeproxy.lab.agents import KubeProxyBinary, node_environment
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.machine import LabError, LabExists, RunDirectory
from pykubeproxy.lab.network import SITES, entered, lab_namespaces, namespace_prefix
from pykubeproxy.lab.pods import workload
from pykubeproxy.wording import suggestion

STOP_SECONDS = 20.0
# Names the lab to commands that run on its hosts.
_HERE = "PYKUBEPROXY_LAB"


def up(name: str, backend: str, pods: int, kube_proxy: KubeProxyBinary | None = None) -> None:
    """Start a lab in the background with a Service `web`, its pods and a pod `client`; return when it is ready.

    Raises LabError.
    """
    machine.check_requirements()
    proxy = map(str, kube_proxy or ())
    driver = subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.daemon", name, backend, str(pods), *proxy],
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


def run(name: str, backend: str, pods: int, kube_proxy: KubeProxyBinary | None) -> None:
    """Run the driver: build the lab, print "ready", do what `request` asks until SIGTERM."""
    check_signals = exit_on_signals(signal.SIGINT)
    with Lab(name, backend=backend, kube_proxy=kube_proxy) as lab, socket.socket(socket.AF_UNIX) as requests:
        requests.bind(str(lab.directory.requests))
        requests.listen()
        lab.deploy(faults.APP, pods)
        lab.start_pod("client", "client", "node1", workload("client")).wait_answering()
        vip = lab.service(faults.APP, type="NodePort").vip()
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
            connection, _ = requests.accept()
            connection.settimeout(STOP_SECONDS)
            # A client may leave at any time.
            with suppress(OSError, ValueError), connection, connection.makefile("rw") as stream:
                answer = _done(lab, json.loads(stream.readline()))
                stream.write(json.dumps(answer))


def _done(lab: Lab, words: list[str]) -> str:
    """Do what a command asks. Return why it failed, "" if it did not."""
    try:
        with lab.changing:
            match words:
                case ["stop", host] if host in lab.agents:
                    if lab.agents[host].alive:
                        lab.agents[host].stop()
                case ["stop", host] if host in lab.pods:
                    lab.stop_pod(lab.pods[host])
                case ["start", host] if host in lab.agents:
                    if not lab.agents[host].alive:
                        lab.agents[host].start()
                case ["scale", number]:
                    _scale(lab, int(number))
                case ["break", name]:
                    faults.break_lab(lab, next(fault for fault in faults.FAULTS if fault.name == name))
                case ["mend"]:
                    faults.mend(lab)
                case [verb, host]:
                    hosts = [*lab.agents, *(lab.pods if verb == "stop" else [])]
                    return f"cannot {verb} {host}: use one of {', '.join(hosts)}"
            lab.publish()
    except Exception as error:  # the lab stays
        return str(error) or repr(error)
    return ""


def _scale(lab: Lab, number: int) -> None:
    present = [pod for pod in lab.pods.values() if pod.app == faults.APP]
    for pod in present[number:]:
        lab.stop_pod(pod)
    on_nodes = Counter(pod.site.name for pod in present)
    for _ in range(number - len(present)):
        node = min(SITES, key=lambda name: on_nodes[name])
        lab.deploy(faults.APP, 1, nodes=[node])
        on_nodes[node] += 1


def request(directory: RunDirectory, *words: str) -> None:
    """Have the driver of a lab change it, as `lab stop web-2` does. Raises LabError."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(directory.requests))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(words) + "\n")
                stream.flush()
                failure = json.loads(stream.readline() or '"its driver has ended"')
    except OSError:
        raise LabError(
            f"lab {directory.lab} takes no requests: only labs of `pykubeproxy lab up` can be changed"
        ) from None
    if failure:
        raise LabError(failure)


@contextmanager
def demo_lab(name: str | None, backend: str) -> Iterator[Lab]:
    """Run a lab in this process; without a name, under the first of demo, demo2 and so on that is free."""
    with ExitStack() as stack:
        for number in itertools.count(1):
            try:
                lab = stack.enter_context(Lab(name or f"demo{number if number > 1 else ''}", backend=backend))
            except LabExists:
                if name:
                    raise
            else:
                break
        yield lab


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


def running_labs() -> list[RunDirectory]:
    """Return the labs that run. Raises LabError."""
    machine.check_requirements()
    return [directory for directory in map(RunDirectory, machine.lab_names()) if directory.held]


def select_lab(name: str | None) -> RunDirectory:
    """Return the running lab of this name, that of this shell, or the only one. Raises LabError."""
    name = name or os.environ.get(_HERE)
    running = [directory.lab for directory in running_labs()]
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
    """Replace this process with a command on a node, in a pod, outside or on the fabric.

    KUBECONFIG names the lab's API server, so that kubectl finds it. Commands for labs select this one. A shell shows the
    host in its prompt.

    Raises LabError for an unknown host, OSError if the command cannot be run.
    """
    hosts = [entry["name"] for entry in directory.read_state().get("hosts", ())]
    if host not in hosts:
        advice = suggestion(host, hosts) or f"use one of {', '.join(hosts)}"
        raise LabError(f"there is no host {host} in lab {directory.lab}; {advice}")
    environment = {**node_environment(directory.logs, host), "KUBECONFIG": str(directory.kubeconfig)}
    environment |= {"PS1": f"{host} # ", _HERE: directory.lab}
    with entered(f"{namespace_prefix(directory.lab)}{host}"):
        os.execvpe(command[0], command, environment)  # noqa: S606 - the user's command


if __name__ == "__main__":
    try:
        _name, _backend, _pods, *_proxy = sys.argv[1:]
        run(_name, _backend, int(_pods), KubeProxyBinary(Path(_proxy[0]), *_proxy[1:]) if _proxy else None)
    except (LabError, TimeoutError, RuntimeError) as error:
        sys.exit(str(error))
