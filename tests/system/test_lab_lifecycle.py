"""A lab comes, can be used from the command line, and leaves nothing behind however it ends."""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubeproxy.lab import namespaces, standing, sweep
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.rundir import AlreadyRunning, RunDirectory

pytestmark = pytest.mark.root

_numbers = itertools.count()
PROGRAM = [sys.executable, "-c", "from pykubeproxy.cli import main; main()", "lab"]


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test has; whatever a failed test left goes."""
    name = f"tl{os.getpid()}x{next(_numbers)}"
    yield name
    standing.down(name)


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def processes(name: str) -> list[int]:
    """Handles (pidfds) on the processes inside a lab; a process number or a namespace's may be used again."""
    found = [Path("/run/netns", entry).stat() for entry in namespaces.names(name)]
    inside = {(status.st_dev, status.st_ino) for status in found}
    return [os.pidfd_open(pid) for pid in sweep.processes_in(inside)]


def nothing_left(name: str, inside: list[int]) -> bool:
    """No namespace, no directory, and the processes that were inside have ended."""
    ended = select.select(inside, [], [], 0)[0]
    return not namespaces.names(name) and not RunDirectory(name).path.exists() and len(ended) == len(inside)


def links() -> str:
    """What the machine's own namespace looks like from outside of any lab."""
    own = ["ip -o link", "ip -o addr", "ip route", "ip -6 route", "cat /proc/sys/net/ipv4/ip_forward"]
    return subprocess.run(["sh", "-c", "; ".join(own)], capture_output=True, text=True, check=True).stdout


def lab_command(*arguments: str) -> str:
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def driver(name: str) -> Iterator[subprocess.Popen[str]]:
    """A driver in the background, as `lab up` starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.standing", name, "auto", "1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def first_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline()


def test_up_exec_status_down(name: str) -> None:
    """`lab up` leaves a lab standing that can be looked at and used, `lab down` takes it away."""
    lab_command("up", "--name", name, "--pods", "2")
    inside = processes(name)
    status = lab_command("status", "--name", name)
    assert "agent running" in status
    assert "web-2   node2" in status
    document = json.loads(lab_command("status", "--name", name, "-o", "json"))
    places = {it["place"]: it for it in document["places"]}
    assert (document["apiVersion"], document["lab"]) == ("pykubeproxy/v1", name)
    assert (places["web-2"]["kind"], places["web-2"]["node"], places["web-2"]["state"]) == (
        "pod",
        "node2",
        "ready",
    )
    assert places["node1"]["agent"] and places["client"]["addresses"][0] == "203.0.113.10"
    assert document["services"][0]["ports"][0]["nodePort"]
    ask = (
        "import urllib.request as u; print(u.urlopen('http://10.0.0.1:6443/api/v1/services').read().decode())"
    )
    services = json.loads(lab_command("exec", "--name", name, "client", "--", sys.executable, "-c", ask))
    node_port = services["items"][0]["spec"]["ports"][0]["nodePort"]
    ask = f"import urllib.request as u; print(u.urlopen('http://10.0.0.12:{node_port}/').read().decode())"
    answer = lab_command("exec", "--name", name, "client", sys.executable, "-c", ask)
    assert json.loads(answer)["pod"] in ("web-1", "web-2")
    down = json.loads(lab_command("down", "--name", name, "-o", "json"))
    assert down == {"apiVersion": "pykubeproxy/v1", "lab": name, "removed": True}
    assert nothing_left(name, inside)
    assert "there is no lab" in lab_command("down", "--name", name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_driver_dies(name: str, driver: subprocess.Popen[str], number: signal.Signals) -> None:
    """Whatever ends the driver, its processes, namespaces and directory go within seconds."""
    assert first_line(driver) == "standing\n"
    inside = processes(name)
    assert len(inside) >= 4, "an API server, two agents and a pod are running"
    driver.send_signal(number)
    driver.wait(20)
    assert until(lambda: nothing_left(name, inside))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("made", [1, 3, 5])
def test_dies_while_building(
    name: str, driver: subprocess.Popen[str], number: signal.Signals, made: int
) -> None:
    """The same when it is hit in the middle of building."""
    assert until(lambda: len(namespaces.names(name)) >= made)
    driver.send_signal(number)
    driver.wait(20)
    assert until(lambda: nothing_left(name, []))


def test_taken_up_after_a_crash(name: str, driver: subprocess.Popen[str]) -> None:
    """A lab can be started at once after one of its name was killed."""
    assert first_line(driver) == "standing\n"
    driver.kill()
    driver.wait()
    with Lab(name, agents=False) as lab:
        (pod,) = lab.deploy("web", 1)
        for _ in range(20):
            assert lab.client.prober.tcp(pod.target()).pods == {"web-1": 1}


def test_name_is_taken(name: str) -> None:
    """A second lab of the same name is refused and does the first no harm."""
    with Lab(name, agents=False) as lab:
        with pytest.raises(AlreadyRunning, match="lab down"), Lab(name):
            pass
        (pod,) = lab.deploy("web", 1)
        assert lab.client.prober.tcp(pod.target()).pods == {"web-1": 1}


def test_side_by_side(name: str) -> None:
    """Two labs have the same addresses and do not see each other; the machine's own network sees neither."""
    before = links()
    with Lab(f"{name}a", agents=False) as first, Lab(f"{name}b", agents=False) as second:
        (one,) = first.deploy("one", 1)
        (two,) = second.deploy("two", 1)
        assert one.target() == two.target()
        assert first.client.prober.tcp(one.target(), 5).pods == {"one-1": 5}
        assert second.client.prober.tcp(two.target(), 5).pods == {"two-1": 5}
        assert links() == before
    assert links() == before


def test_down_after_everything_died(name: str, driver: subprocess.Popen[str]) -> None:
    """`lab down` clears up even when both the driver and the janitor were killed."""
    assert first_line(driver) == "standing\n"
    inside = processes(name)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    janitors = [
        pid for pid in children if b"pykubeproxy.lab.sweep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(janitors) == 1
    os.kill(int(janitors[0]), signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert namespaces.names(name), "nobody was left to clear up"
    assert "is gone" in lab_command("down", "--name", name)
    assert nothing_left(name, inside)


def test_demo_fails_with_its_scenario(name: str) -> None:
    """`lab demo` tells which scenario failed and why, and exits with 1: here the agents end at once."""
    broken = (
        "from pykubeproxy.lab import agents; agents.COMMAND = ['sh', '-c', 'echo cannot go on; exit 3'];"
        "from pykubeproxy.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken, "lab", "demo", "scale", "--name", name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "exit code 3: cannot go on" in " ".join(done.stdout.split())
    assert "1 of 1 scenarios failed: scale" in done.stdout
    assert nothing_left(name, [])


def test_demo_shows_what_it_saw(name: str) -> None:
    """`lab demo SCENARIO` prints numbers in 80 columns, exits with 0 and leaves nothing behind."""
    done = subprocess.run(
        [*PROGRAM, "demo", "scale", "--name", name], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "web-1 200" in done.stdout
    assert "As it should be" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert nothing_left(name, [])


def test_demo_as_a_document(name: str) -> None:
    """With -o json it prints what was seen as one document, and nothing besides."""
    document = json.loads(lab_command("demo", "scale", "--name", name, "-o", "json"))
    assert (document["ok"], document["lab"], document["backend"]) == (True, name, "auto")
    (scale,) = document["scenarios"]
    assert scale["name"] == "scale"
    assert any("web-1 200" in it["text"] for it in scale["seen"])
    assert nothing_left(name, [])
