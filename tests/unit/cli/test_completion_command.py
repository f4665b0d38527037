"""`pykubeproxy completion`: scripts that the shells take, and that complete."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = (sys.executable, "-c", "from pykubeproxy.cli import main; main(prog_name='pykubeproxy')")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        (*PROGRAM, *arguments), env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_takes_it(shell: str) -> None:
    """The shell itself finds nothing wrong with the script, where it is installed."""
    script = run("completion", shell)
    assert "_PYKUBEPROXY_COMPLETE" in script
    if program := shutil.which(shell):
        subprocess.run((program, "-n"), input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("pykubeproxy dump", "dump-rules"),
        ("pykubeproxy dump-rules --wat", "--watch"),
        ("pykubeproxy completion z", "zsh"),
    ],
)
def test_what_is_completed(words: str, wanted: str) -> None:
    """Commands, options and choices."""
    at = str(len(words.split()) - 1)
    found = run(_PYKUBEPROXY_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=at)
    assert [line.partition(",")[2] for line in found.splitlines()] == [wanted]
