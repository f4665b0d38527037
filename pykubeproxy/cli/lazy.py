"""A group of commands that imports the module of a command on use."""

import errno
import importlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import click

from pykubeproxy.cli.help import INTERRUPTED, UNREAD, Group, NotAnswered
from pykubeproxy.cli.terminal import fitted_error
from pykubeproxy.wording import suggestion


class LazyGroup(Group):
    """Commands under headings, each imported on use, so that no command loads the libraries of others.

    headings: by heading and name, the module and function of each command, in the order of --help.
    unlisted: the same for commands that only programs use, by name.
    absences: by name, a function that returns why this installation lacks the command; "" if it has it.
    """

    def __init__(
        self,
        *args: Any,
        headings: Mapping[str, Mapping[str, str]],
        unlisted: Mapping[str, str] | None = None,
        absences: Mapping[str, Callable[[], str]] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.headings = headings
        self._absences = absences or {}
        self._listed = {name: target for names in headings.values() for name, target in names.items()}
        self._targets = {**self._listed, **(unlisted or {})}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands of this installation."""
        return [name for name in self._listed if not self._absence(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command. Raises NotAnswered if this installation lacks it."""
        if cmd_name not in self._targets:
            return None
        if reason := self._absence(cmd_name):
            raise NotAnswered(reason)
        _end_on_sigterm()
        module, _, name = self._targets[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line. Raises UsageError, which names similar commands."""
        if ctx.resilient_parsing and self._absence(args[0]):
            return args[0], click.Command(args[0]), args[1:]  # completion prints no error
        if args[0][:1].isalnum() and args[0] not in self._targets and not ctx.resilient_parsing:
            advice = suggestion(args[0], self.list_commands(ctx)) or f"{ctx.command_path} --help lists them"
            raise click.UsageError(f'there is no command "{args[0]}"; {advice}', ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings."""
        present = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        width = max(map(len, present))
        for heading, names in self.headings.items():
            found = {name: command for name in names if (command := present.get(name))}
            rows = [
                (name.ljust(width), command.get_short_help_str(formatter.width))
                for name, command in found.items()
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; if it ends by Ctrl-C or because nobody reads its output, exit as a shell would say.

        Of an error, no part that others wrote can begin a line.
        """
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            before, found, _ = error.format_message().partition(
                error.message
            )  # such as "Invalid value for …: "
            error.message = fitted_error(error.message, f"Error: {before if found else ''}")  # type: ignore[misc]
            raise
        except MemoryError:
            raise NotAnswered(
                "out of memory; raise the limit (ulimit -v, or that of the container), or give less to read"
            ) from None
        except KeyboardInterrupt:
            click.echo(err=True)  # end the line of the terminal's ^C
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_output()
            raise click.exceptions.Exit(UNREAD) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _drop_output()
            raise NotAnswered(
                f"cannot write the output: {error.strerror}; free space, or write elsewhere"
            ) from None

    def _absence(self, name: str) -> str:
        return self._absences[name]() if name in self._absences else ""


def _drop_output() -> None:
    """Let the rest of standard output go nowhere, as Python writes it at exit and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _end_on_sigterm() -> None:
    """End on SIGTERM while modules are imported; the kernel gives process 1 of a container no default for it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
