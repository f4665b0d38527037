"""`pykubeproxy completion`: the scripts are valid and complete commands."""

import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from pykubeproxy.cli.lazy import LazyGroup

PROGRAM = (sys.executable, "-c", "from pykubeproxy.cli import main; main(prog_name='pykubeproxy')")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        (*PROGRAM, *arguments), env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid(shell: str) -> None:
    """The shell, if installed, accepts the script."""
    script = run("completion", shell)
    assert "_PYKUBEPROXY_COMPLETE" in script
    if program := shutil.which(shell):
        subprocess.run((program, "-n"), input=script, text=True, check=True)


def test_command_that_is_not_installed_completes_nothing() -> None:
    """An error would appear in the middle of the command line."""
    group = LazyGroup(
        "it", headings={"": {"lab": ":", "run": ":"}}, absences={"lab": lambda: "not installed"}
    )
    assert ShellComplete(group, {}, "it", "").get_completions(["lab"], "") == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("pykubeproxy dump", "dump-rules"),
        ("pykubeproxy dump-rules --wat", "--watch"),
        ("pykubeproxy completion z", "zsh"),
    ],
)
def test_commands_options_and_choices_are_completed(words: str, wanted: str) -> None:
    """Complete commands, options and choices."""
    at = str(len(words.split()) - 1)
    found = run(_PYKUBEPROXY_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=at)
    assert [line.partition(",")[2] for line in found.splitlines()] == [wanted]
