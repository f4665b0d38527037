"""Output common to all commands: JSON on request, and colours for terminals only."""

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest

from pykubeproxy.cli import main
from tests.unit.cli.test_explain_command import OBJECTS
from tests.unit.cli.test_help import walk

# They run other programs, run for ever, write a script or a file, or only do something.
WITHOUT = {("bundle",), ("run",), ("completion",)} | {
    ("lab", verb) for verb in ("exec", "down", "stop", "start", "scale", "break", "mend")
}
EXPLAIN = ["explain", "web", "-f", OBJECTS, "--hostname-override", "node1"]


@pytest.mark.parametrize(
    ("path", "command"),
    [pytest.param(*it, id=" ".join(it[0])) for it in walk(main) if not isinstance(it[1], click.Group)],
)
def test_json_everywhere(path: tuple[str, ...], command: click.Command) -> None:
    """Each command that prints results has -o json."""
    choices = [
        it.type.choices for it in command.params if "-o" in it.opts and isinstance(it.type, click.Choice)
    ]
    assert bool(choices and "json" in choices[0]) is (path not in WITHOUT)


@pytest.mark.parametrize(
    ("shell", "status", "message"),
    [
        ("{} | true", 141, ""),
        (
            "{} > /dev/full",
            2,
            "Error: cannot write the output: No space left on device; free space, or write elsewhere\n",
        ),
        ("{} >&-", 0, ""),
    ],
)
def test_output_that_nobody_takes(shell: str, status: int, message: str) -> None:
    """No traceback, and no exit code that says something about the answer."""
    program = shlex.join([sys.executable, "-c", "from pykubeproxy.cli import main; main()", *EXPLAIN])
    command = ["bash", "-c", f"set -o pipefail; {shell.format(program)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, message)


def test_too_little_memory_is_an_error_of_one_line(tmp_path: Path) -> None:
    """And no traceback."""
    path = tmp_path / "rules.txt"
    path.write_text("*nat\n:A - [0:0]\n" + "-A A -j ACCEPT\n" * 1_900_000 + "COMMIT\n")
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (200 << 20,) * 2); from pykubeproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "dump-rules", "--rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: out of memory; raise the limit") and done.stderr.count("\n") == 1


def on_a_terminal(environment: dict[str, str]) -> str:
    """What explain prints on a terminal."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-c", "from pykubeproxy.cli import main; main()", *EXPLAIN]
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(program, stdout=theirs, env={**clean, **environment})
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # Linux says so when nobody has the other end any more
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    return said.decode()


@pytest.mark.parametrize(
    ("environment", "styled"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)]
)
def test_colours(environment: dict[str, str], styled: bool) -> None:
    """Use colours on a terminal unless NO_COLOR is set and not empty."""
    said = on_a_terminal({"TERM": "xterm", **environment})
    assert ("\x1b[" in said) is styled
    assert "default" in said or "web" in said


@pytest.mark.parametrize(
    ("arguments", "environment", "styled"),
    [
        ((), {}, False),
        ((), {"CLICOLOR_FORCE": "1"}, True),
        ((), {"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
        (("--color", "never"), {"CLICOLOR_FORCE": "1"}, False),
    ],
)
def test_colours_without_a_terminal(
    arguments: tuple[str, ...], environment: dict[str, str], styled: bool
) -> None:
    command = [sys.executable, "-m", "pykubeproxy", *EXPLAIN, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    assert ("\x1b[" in done.stdout) is styled


def test_errors_are_wrapped_on_a_terminal_only() -> None:
    """A line of a log or a pipe stays one line."""
    command = [sys.executable, "-m", "pykubeproxy", "trace", "deploy/web", "svc/web"]
    piped = subprocess.run(command, capture_output=True, text=True, check=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    assert subprocess.run(command, stderr=theirs, check=False).returncode == 2
    os.close(theirs)
    shown = os.read(ours, 65536).decode().replace("\r", "")
    os.close(ours)
    error = shown[shown.index("Error: ") :]
    assert max(map(len, error.splitlines())) <= 80 < len(piped.stderr.splitlines()[-1])
    assert error.split() == piped.stderr.splitlines()[-1].split()
