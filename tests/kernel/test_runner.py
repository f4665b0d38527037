"""Run commands: input, output, time limits and cleanup."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from pykubeproxy.kernel import Failed, Missing, Runner, restore
from pykubeproxy.kernel.errors import NotStarted, TimedOut
from pykubeproxy.kernel.restore import IptablesSession
from pykubeproxy.kernel.runner import CommandResult
from tests.fakes.process import is_running
from tests.fakes.waiting import eventually


def run_with_pieces(command: Sequence[str], pieces: Iterable[str], seconds: float = 10) -> CommandResult:
    """Write pieces to a command, each created after the previous one is written; return its outcome."""
    with Runner().start(command, seconds) as running:
        for piece in pieces:
            running.write(piece)
        return running.finish()


def test_hung_command_is_killed_with_its_children(tmp_path: Path) -> None:
    """After the timeout."""
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; (echo $BASHPID >> {pids}; exec sleep 600) & wait"
    with pytest.raises(TimedOut, match=r"bash made no progress for 0\.5 s"):
        Runner().run(("bash", "-c", script), seconds=0.5)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    eventually(lambda: not any(map(is_running, started)))


def test_a_command_that_reads_slowly_is_not_killed() -> None:
    """Each read is progress, however long all of them take together."""
    script = "for _ in 1 2 3 4; do sleep 0.2; head -c 1000000 > /dev/null; done; cat > /dev/null"
    assert run_with_pieces(("bash", "-c", script), ["x" * 1_000_000] * 4, seconds=0.5).exit_code == 0


def test_a_slow_caller_is_not_the_fault_of_the_command() -> None:
    """The time between two texts does not count."""

    def pieces() -> Iterator[str]:
        for _ in range(2):
            time.sleep(0.4)
            yield "x"

    assert run_with_pieces(("cat",), pieces(), seconds=0.2).stdout == "xx"


def test_a_command_that_prints_for_ever_is_killed() -> None:
    """It makes progress, but ten times the limit is too long."""
    with pytest.raises(TimedOut):
        Runner().run(("sh", "-c", "while echo more; do sleep 0.02; done"), seconds=0.1)


def test_input_output_and_exit_code_are_passed() -> None:
    outcome = Runner().run(("sh", "-c", "cat; echo oops >&2; exit 3"), "in\n")
    assert outcome == (3, "in\n", "oops\n")


def test_unread_input_is_no_error() -> None:
    assert Runner().run(("true",), "x" * 1_000_000).exit_code == 0


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_restore_that_stops_reading_fails(tmp_path: Path, pieces: int) -> None:
    """Even if it ends without an error, and if only the end of its input was left unread."""
    command = tmp_path / "restore"
    command.write_text("#!/bin/sh\nexit 0\n")
    command.chmod(0o755)
    session = IptablesSession(str(command), (), Runner(), 10)
    with pytest.raises(Failed, match="stopped reading"), session:
        for _ in range(pieces):
            session.write("x" * 3_000_000)


def test_a_restore_of_much_text_takes_several_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets whole blocks, for a block takes effect completely or not at all."""
    monkeypatch.setattr(restore, "_TEXT_PER_COMMAND", 20)
    command = tmp_path / "restore"
    command.write_text(f"#!/bin/sh\n(echo start; cat) >> {tmp_path}/read\n")
    command.chmod(0o755)
    with IptablesSession(str(command), (), Runner(), 10) as session:
        for text in (
            "*nat\nlong long\n",
            "COMMIT\n",
            "*nat\nCOMMIT\n",
            "*nat\nlong long\n",
            "long\n",
            "COMMIT\n",
        ):
            session.write(text)
    commands = (tmp_path / "read").read_text().split("start\n")[1:]
    assert commands == ["*nat\nlong long\nCOMMIT\n", "*nat\nCOMMIT\n*nat\nlong long\nlong\nCOMMIT\n"]


def test_a_command_reads_pieces_as_they_are_created(tmp_path: Path) -> None:
    """It handles the first before the second exists."""
    answer = tmp_path / "answer"
    os.mkfifo(answer)

    def pieces() -> Iterator[str]:
        yield "first\n"
        yield answer.read_text().upper()

    command = ("sh", "-c", f"read -r line; echo $line > {answer}; cat")
    assert run_with_pieces(command, pieces()).stdout == "FIRST\n"


def test_the_next_piece_is_created_before_the_last_is_read(tmp_path: Path) -> None:
    """So the command always has input."""
    made = tmp_path / "made"

    def pieces() -> Iterator[str]:
        yield "x" * 500_000
        made.touch()
        yield "y"

    command = ("sh", "-c", f"until [ -e {made} ]; do sleep 0.01; done; wc -c")
    assert run_with_pieces(command, pieces()).stdout.strip() == "500001"


def test_reading_and_writing_do_not_deadlock() -> None:
    """With large input and output."""
    outcome = run_with_pieces(("sh", "-c", "tee /dev/stderr"), ("x" * 1000 for _ in range(1000)), seconds=20)
    assert len(outcome.stdout) == len(outcome.stderr) == 1_000_000


def test_the_timeout_covers_unread_input() -> None:
    endless = iter(lambda: "x" * 1000, "")
    with pytest.raises(TimedOut):
        run_with_pieces(("sleep", "60"), endless, seconds=0.3)


def test_invalid_utf8_is_kept() -> None:
    outcome = Runner().run(("printf", r"\377\n"))
    assert Runner().run(("od", "-An", "-tx1"), outcome.stdout).stdout.split() == ["ff", "0a"]


def test_a_signal_gives_a_negative_exit_code() -> None:
    assert Runner().run(("sh", "-c", "kill -SEGV $$")).exit_code == -11


def test_a_missing_command_is_named() -> None:
    with pytest.raises(Missing, match="no-such-command"):
        Runner().run(("no-such-command",))


def test_a_failed_start_has_the_systems_reason(tmp_path: Path) -> None:
    command = tmp_path / "command"
    command.write_text("")
    with pytest.raises(NotStarted, match=r"cannot start .*command: Permission denied"):
        Runner().run((str(command),))


def test_environment_of_commands() -> None:
    """The locale is C, PATH has the system folders, and given values win."""
    runner = Runner(environment={"PATH": "/bin", "COLOUR": "green"})
    lines = runner.run(("env",)).stdout.splitlines()
    assert "LC_ALL=C" in lines
    assert "COLOUR=green" in lines
    assert "PATH=/bin:/usr/local/sbin:/usr/sbin:/sbin" in lines


def test_prefix_precedes_commands_and_file_reads() -> None:
    runner = Runner(prefix=("env", "WHERE=inside"))
    assert runner.run(("sh", "-c", "echo $WHERE")).stdout == "inside\n"
    assert runner.read("/proc/sys/kernel/ostype") == "Linux\n"
    assert runner.read("/proc/no/such/file") is None
    assert Runner().read("/proc/no/such/file") is None


def test_file_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """Even if they are inheritable."""
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        listed = Runner().run(("ls", "-l", "/proc/self/fd")).stdout
    assert "secret" not in listed
