"""Commands: found, limited in time, and gone afterwards."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Failed, Missing, Runner
from pykubeproxy.kernel.errors import NotStarted, TimedOut
from pykubeproxy.kernel.restore import IptablesSession
from pykubeproxy.kernel.runner import Outcome
from pykubeproxy.kernel.tools import Tools
from pykubeproxy.objects import Family


def gone(pid: int, seconds: float = 5) -> bool:
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            # A child of a killed command is waited for by init, and may be a zombie until then.
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def in_pieces(command: Sequence[str], pieces: Iterable[str], seconds: float = 10) -> Outcome:
    """Write pieces to a command, each made when the one before has been written, and return its outcome."""
    with Runner().start(command, seconds) as running:
        for piece in pieces:
            running.write(piece)
        return running.finish()


def test_hung_command_is_killed_with_its_children(tmp_path: Path) -> None:
    """A command that does not end in time is killed, and what it started too."""
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; (echo $BASHPID >> {pids}; exec sleep 60) & wait"
    with pytest.raises(TimedOut, match=r"bash did not end within 0\.5 s"):
        Runner().run(("bash", "-c", script), seconds=0.5)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    assert all(map(gone, started))


def test_input_output_and_exit_code() -> None:
    """Standard input goes in; output, errors and exit code come out."""
    outcome = Runner().run(("sh", "-c", "cat; echo oops >&2; exit 3"), "in\n")
    assert outcome == (3, "in\n", "oops\n")


def test_large_input_that_nobody_reads() -> None:
    """A command that ends without reading its input is no error."""
    assert Runner().run(("true",), "x" * 1_000_000).exit_code == 0


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_restore_that_stops_reading_has_failed(tmp_path: Path, pieces: int) -> None:
    """Even if it ends without an error, and if only the end of its input was left unread."""
    command = tmp_path / "restore"
    command.write_text("#!/bin/sh\nexit 0\n")
    command.chmod(0o755)
    tools = Tools(Backend.NFT, Family.IPV4, "", "", str(command), (1, 8, 9))
    with pytest.raises(Failed, match="stopped reading"), IptablesSession(tools, Runner(), 10) as session:
        for _ in range(pieces):
            session.write("x" * 3_000_000)


def test_a_command_reads_pieces_while_they_are_made(tmp_path: Path) -> None:
    """The first has been dealt with before the second exists."""
    answer = tmp_path / "answer"
    os.mkfifo(answer)

    def pieces() -> Iterator[str]:
        yield "first\n"
        yield answer.read_text().upper()

    command = ("sh", "-c", f"read -r line; echo $line > {answer}; cat")
    assert in_pieces(command, pieces()).stdout == "FIRST\n"


def test_a_piece_waits_in_the_pipe_while_the_next_is_made(tmp_path: Path) -> None:
    """A command need not have read a large piece for the next to be made: then it always has something to read."""
    made = tmp_path / "made"

    def pieces() -> Iterator[str]:
        yield "x" * 500_000
        made.touch()
        yield "y"

    command = ("sh", "-c", f"until [ -e {made} ]; do sleep 0.01; done; wc -c")
    assert in_pieces(command, pieces()).stdout.strip() == "500001"


def test_a_command_that_talks_while_it_reads() -> None:
    """Neither side waits for the other for ever, however much both have to say."""
    outcome = in_pieces(("sh", "-c", "tee /dev/stderr"), ("x" * 1000 for _ in range(1000)), seconds=20)
    assert len(outcome.stdout) == len(outcome.stderr) == 1_000_000


def test_a_hung_command_that_reads_nothing() -> None:
    """The time limit holds while there is more to write than anyone reads."""
    endless = iter(lambda: "x" * 1000, "")
    with pytest.raises(TimedOut):
        in_pieces(("sleep", "60"), endless, seconds=0.3)


def test_bytes_pass_unchanged() -> None:
    """What is not UTF-8 comes through as it is."""
    outcome = Runner().run(("printf", r"\377\n"))
    assert Runner().run(("od", "-An", "-tx1"), outcome.stdout).stdout.split() == ["ff", "0a"]


def test_killed_by_a_signal() -> None:
    """A command that dies of a signal has its negative number as exit code."""
    assert Runner().run(("sh", "-c", "kill -SEGV $$")).exit_code == -11


def test_missing_command() -> None:
    """A command that does not exist is named."""
    with pytest.raises(Missing, match="no-such-command"):
        Runner().run(("no-such-command",))


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    """The reason is the system's."""
    command = tmp_path / "command"
    command.write_text("")
    with pytest.raises(NotStarted, match=r"cannot start .*command: Permission denied"):
        Runner().run((str(command),))


def test_environment() -> None:
    """Output is in plain C; settings of the caller's win over this process's; system folders are on PATH."""
    runner = Runner(environment={"PATH": "/bin", "COLOUR": "green"})
    lines = runner.run(("env",)).stdout.splitlines()
    assert "LC_ALL=C" in lines
    assert "COLOUR=green" in lines
    assert "PATH=/bin:/usr/local/sbin:/usr/sbin:/sbin" in lines


def test_prefix() -> None:
    """A prefix stands before every command, and before reading a file."""
    runner = Runner(prefix=("env", "WHERE=inside"))
    assert runner.run(("sh", "-c", "echo $WHERE")).stdout == "inside\n"
    assert runner.read("/proc/sys/kernel/ostype") == "Linux\n"
    assert runner.read("/proc/no/such/file") is None
    assert Runner().read("/proc/no/such/file") is None


def test_file_descriptors_stay_here(tmp_path: Path) -> None:
    """Nothing that is open here is open in a command, though it may be inherited."""
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        listed = Runner().run(("ls", "-l", "/proc/self/fd")).stdout
    assert "secret" not in listed
