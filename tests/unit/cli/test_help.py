"""--help in a terminal of 80 columns."""

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli import main
from pykubeproxy.cli.flags import topic_of
from pykubeproxy.cli.help import (
    GROUPS,
    HELP,
    OUTPUT,
    QUESTION,
    Command,
    Group,
    Option,
    Topic,
    command,
    option,
)
from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.config import SETTINGS


def walk(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A group and all commands in it, with the words that run them."""
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found
        if isinstance(found, click.Group):
            yield from walk(found, (*path, name))
        else:
            yield (*path, name), found


ALL = [
    pytest.param(program, path, it, id=" ".join((program.name or "", *path)))
    for program in (main, plugin)
    for path, it in walk(program)
]
every_command = pytest.mark.parametrize(("program", "path", "command"), ALL)


def shown(*arguments: str, program: click.Command = main) -> str:
    result = CliRunner().invoke(program, arguments, terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.stdout


def headings(text: str) -> list[str]:
    return [line[:-1] for line in text.splitlines() if line[:1].isalpha() and line.endswith(":")]


@pytest.mark.parametrize(
    ("program", "path", "names"),
    [
        (main, (), ["Run a node", "Inspect rules", "Without a node"]),
        (main, ("lab",), ["Commands"]),
        (plugin, (), [heading for heading, names in plugin.headings.items() if names]),
    ],
)
def test_lists_of_commands(program: click.Group, path: tuple[str, ...], names: list[str]) -> None:
    """Each command has a whole sentence on one line, under one of the headings."""
    text = shown(*path, "--help", program=program)
    assert headings(text) == ["Examples", *names, "Help"]
    group = dict(walk(program))[path]
    assert isinstance(group, click.Group)
    lines = text.partition(f"{names[0]}:\n")[2].partition("\nHelp:\n")[0].splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert [line.split()[0] for line in rows] == group.list_commands(click.Context(group))
    for line in rows:
        assert line.endswith(".") and not line.endswith("...") and len(line) <= 80


@every_command
def test_help_fits(program: click.Command, path: tuple[str, ...], command: click.Command) -> None:
    """No help text is wider than the terminal."""
    options = {it for parameter in command.params for it in parameter.opts}
    for asked in {"--help", "--help-all"} & {"--help", *options}:
        assert [line for line in shown(*path, asked, program=program).splitlines() if len(line) > 80] == []


@every_command
def test_every_option_declares_its_group(
    program: click.Command, path: tuple[str, ...], command: click.Command
) -> None:
    """An option made by click itself would have no group."""
    assert isinstance(command, Command | Group)
    options = [it for it in command.params if isinstance(it, click.Option)]
    assert [it.name for it in options if not isinstance(it, Option)] == []


@every_command
def test_examples_have_a_heading(
    program: click.Command, path: tuple[str, ...], command: click.Command
) -> None:
    """Examples begin with the program and stand under their heading."""
    assert isinstance(command, Command | Group)
    assert command.examples
    text = shown(*path, "--help", program=program)
    assert "\nExamples:\n  " in text
    assert "\b" not in text


def test_unknown_group_is_an_error() -> None:
    """No option lands in a group that --help does not show."""
    with pytest.raises(ValueError, match="odd: there is no group Odd"):
        Option(["--odd"], group="Odd")


def test_options_are_in_groups() -> None:
    """Groups have one order, and none is empty."""

    @command(exit_codes={0: "Fine."})
    @option("--format", group=OUTPUT, help="How to show it.")
    @option("--what", group=QUESTION, help="What to show.")
    def program() -> None:
        """Show it."""

    text = shown("--help", program=program)
    assert headings(text) == [QUESTION, OUTPUT, HELP, "Exit codes"]
    assert text.index("--what") < text.index("--format") < text.index("--help ") < text.index("Fine.")


def test_flags_of_run_have_topics() -> None:
    """`run --help` shows all flags with an effect by topic, the others nowhere."""
    found = headings(shown("run", "--help"))
    assert [it for it in found if it in GROUPS] == [it for it in GROUPS if it in found]
    assert set(Topic) - set(found) == {Topic.NO_EFFECT}
    for setting in SETTINGS:
        assert (topic_of(setting) is Topic.NO_EFFECT) == (not setting.attribute)


@pytest.mark.parametrize("name", ["render", "diff", "explain", "trace", "check"])
def test_flags_of_run_are_in_help_all(name: str) -> None:
    """Other commands show the flags of `run` on request only."""
    brief, full = shown(name, "--help"), shown(name, "--help-all")
    assert "--help-all" in brief
    assert "--masquerade-all" not in brief
    assert "--masquerade-all" in full
    assert "Rules (Conntrack)" in headings(full)
    assert set(headings(brief)) < set(headings(full))


def test_failures_are_no_answers() -> None:
    """A failure has exit code 2, or that of kube-proxy for commands that keep it."""

    def fail() -> None:
        raise click.ClickException("no")

    run = CliRunner().invoke
    assert run(command("ask")(fail)).exit_code == 2
    assert run(command("start", failure=1)(fail)).exit_code == 1
    result = run(command("ask")(fail))
    assert (result.stdout, result.stderr) == ("", "Error: no\n")


def test_ctrl_c_is_130() -> None:
    """As in shells: 128 and the number of the signal."""
    script = "import pykubeproxy.cli.status as it; it.fetch = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)"
    program = f"{script}\nfrom pykubeproxy.cli import main; main(['status'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("dump-rule", "did you mean dump-rules?"),
        ("dumprules", "did you mean dump-rules?"),
        ("xyz", "pykubeproxy --help lists them"),
    ],
)
def test_unknown_command(word: str, advice: str) -> None:
    """The error names similar commands."""
    result = CliRunner().invoke(main, [word], prog_name="pykubeproxy")
    assert result.exit_code == 2
    assert f'Error: there is no command "{word}"; {advice}\n' in result.stderr


def test_missing_argument_shows_an_example() -> None:
    result = CliRunner().invoke(main, ["trace"], prog_name="pykubeproxy")
    assert result.exit_code == 2
    assert "Error: Missing argument 'SRC'. Example: pykubeproxy trace pod/" in result.stderr


@pytest.mark.parametrize("group", [main, plugin], ids=["node", "plugin"])
def test_each_command_names_its_exit_codes(group: click.Group) -> None:
    one_commands = [(path, one) for path, one in walk(group) if not isinstance(one, click.Group)]
    for path, one_command in one_commands:
        text = one_command.get_help(click.Context(one_command, info_name=" ".join(path)))
        assert "Exit codes:\n  0  " in text, path


@pytest.mark.parametrize("group", [main, plugin], ids=["node", "plugin"])
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_of_help_ends_within_a_word(group: click.Group, width: int) -> None:
    """A reader copies names such as --sync-period."""
    for path, one in walk(group):
        context = one.context_class(one, info_name=" ".join(path), terminal_width=width)
        assert not re.search(r"\w-$", one.get_help(context), re.MULTILINE), path
