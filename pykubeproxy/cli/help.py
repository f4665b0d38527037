"""Help that people can read: options in groups, examples and exit codes.

Use `@command(…)` and `@option(…, group=SOURCE)` instead of click's. In the docstring of a command, the paragraph after
the last line with \\b holds the examples.
"""

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Topic(enum.StrEnum):
    """What a flag of `run` is about: its group."""

    CONFIGURATION = "Configuration file"
    API_SERVER = "API server"
    NODE = "Node and its pods"
    TRAFFIC = "Traffic"
    SYNC = "Sync"
    CONNTRACK = "Conntrack"
    HEALTH = "Health and metrics"
    LOGGING = "Logging"
    NO_EFFECT = "Without effect"


# What to ask, what to change on this machine, where rules and objects come from and how to get there, how rules are
# made, how to show them.
QUESTION = "Question"
ACTION = "Action"
SOURCE = "Source"
CONNECTION = "Connection to the API server"
RULES = "Rules"
OUTPUT = "Output"
HELP = "Help"
# In the order of --help.
GROUPS = (QUESTION, ACTION, SOURCE, CONNECTION, RULES, *Topic, OUTPUT, HELP)

# Exit codes. `run` and `cleanup` report a failure as kube-proxy does.
DIFFERENT, FAILED, NOT_ANSWERED, INTERRUPTED, UNREAD = 1, 1, 2, 130, 141

_USUAL_CODES = {
    NOT_ANSWERED: {0: "Success.", NOT_ANSWERED: "Wrong usage or a failure."},
    FAILED: {0: "Success.", FAILED: "A failure.", NOT_ANSWERED: "Wrong usage."},
}

_SHOW_FLAGS = "pykubeproxy.cli.help.show_flags"
# Above this width, the second column of options begins on the next line.
_COLUMN = 30
# No line is broken here.
_HYPHEN = "\N{NON-BREAKING HYPHEN}"

_Row = tuple[str, str]


class NotAnswered(click.ClickException):
    """A command failed, so its exit code must not look like an answer."""

    exit_code = NOT_ANSWERED


class Option(click.Option):
    """An option of a group, one of GROUPS."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        if group not in GROUPS:
            raise ValueError(f"{self.name}: there is no group {group}")
        self.group = group


class _Formatter(click.HelpFormatter):
    """Break lines between words, never at the hyphen of an option."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _HYPHEN))

    def write_dl(self, rows: Iterable[_Row], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(term, text.replace("-", _HYPHEN)) for term, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class _Context(click.Context):
    formatter_class = _Formatter


class _Documented(click.Command):
    """A command with examples, which its docstring has after a line with \\b."""

    context_class = _Context

    def __init__(
        self,
        name: str | None = None,
        *,
        help: str | None = None,  # noqa: A002  the name in click
        **attributes: Any,
    ) -> None:
        prose, *examples = inspect.cleandoc(help or "").rsplit("\n\n\b\n", 1)
        self.examples = "".join(examples)
        super().__init__(name, help=prose, **attributes)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description and the examples, each on its line."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Command(_Documented):
    """A command whose help has options in groups, examples and exit codes.

    exit_codes: their meanings, for --help; without them, 0 and those of wrong usage and failures.
    failure: the exit code of failures; that of wrong usage is 2 for all commands.
    shows_flags: whether --help lists the flags of `run`; else only --help-all does.
    """

    def __init__(
        self,
        name: str | None,
        *,
        exit_codes: Mapping[int, str] | None = None,
        failure: int = NOT_ANSWERED,
        shows_flags: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        self.exit_codes = exit_codes or _USUAL_CODES[failure]
        self.failure, self.shows_flags = failure, shows_flags
        if not shows_flags and any(map(_is_flag, self.params)):
            self.params.append(_help_all())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        with_flags = self.shows_flags or bool(ctx.meta.get(_SHOW_FLAGS))
        groups = option_rows(
            (param for param in self.get_params(ctx) if with_flags or not _is_flag(param)), ctx
        )
        if not self.shows_flags:
            groups = {
                f"{RULES} ({name})" if isinstance(name, Topic) else name: groups[name] for name in groups
            }
        _write_groups(groups, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in sorted(self.exit_codes.items())])
        super().format_epilog(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. The error about a missing argument shows an example."""
        # As in Go, a value of such an option follows "=", never in the next argument.
        optional = {
            name
            for param in self.params
            if getattr(param, "flag_value", None) == "true"
            for name in param.opts
        }
        given = [f"{arg}=true" if arg.replace("_", "-") in optional else arg for arg in args]
        try:
            return super().parse_args(ctx, given)
        except click.MissingParameter as error:
            example, _, _ = self.examples.partition("\n")
            problem = " ".join(error.format_message().split())
            raise click.UsageError(f"{problem} Example: {example}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises NotAnswered for its failures, but not for wrong usage."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if error.exit_code == FAILED != self.failure:
                raise NotAnswered(error.format_message()) from None
            raise


class Group(_Documented, click.Group):
    """A group of commands, with help like that of Command."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of their definition."""
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and the options."""
        self.format_commands(ctx, formatter)
        _write_groups(option_rows(self.get_params(ctx), ctx), formatter)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a Command, as click.command does."""
    return click.command(name, cls=Command, **attributes)


def option(*names: str, group: str, **attributes: Any) -> Callable[[_Function], _Function]:
    """Add an Option of a group, as click.option does."""
    return click.option(*names, cls=Option, group=group, **attributes)


def with_options(command: _Function, options: Iterable[Callable[[_Function], _Function]]) -> _Function:
    """Add options, which --help shows in this order."""
    for add in reversed([*options]):
        command = add(command)
    return command


def option_rows(params: Iterable[click.Parameter], ctx: click.Context) -> dict[str, list[_Row]]:
    """Return the names and the help of visible options, by group in the order of GROUPS."""
    rows: dict[str, list[_Row]] = {group: [] for group in GROUPS}
    for param in params:
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record:
            # Only click's own --help has no group.
            rows[param.group if isinstance(param, Option) else HELP].append(record)
    return {group: found for group, found in rows.items() if found}


def _write_groups(groups: Mapping[str, Sequence[_Row]], formatter: click.HelpFormatter) -> None:
    """Write groups of options; the second column begins at the same place in all of them."""
    width = min(_COLUMN, max(len(names) for rows in groups.values() for names, _ in rows))
    for group, ((names, text), *rest) in groups.items():
        with formatter.section(group):
            formatter.write_dl([(names.ljust(width), text), *rest], col_max=width)


def _is_flag(parameter: click.Parameter) -> bool:
    """Return whether this is a flag of `run` that says how rules are made."""
    return isinstance(parameter, Option) and isinstance(parameter.group, Topic)


def _help_all() -> Option:
    def show(ctx: click.Context, _: click.Parameter, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            ctx.meta[_SHOW_FLAGS] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        group=RULES,
        help="Show the flags of `pykubeproxy run` too, such as --config and --hostname-override, and exit. They"
        " say how the rules are made.",
    )
