"""Show a report in the format that -o names: one convention for all commands."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from pykubeproxy.cli.help import OUTPUT, option
from pykubeproxy.cli.terminal import columns, echo_line, echo_styled, set_color
from pykubeproxy.report.document import Report, document, json_text, yaml_text
from pykubeproxy.report.text import text

# The formats that every report has; commands add others, such as svg and rules.
FORMATS = ("text", "wide", "json", "yaml", "name")
# Those that hold a whole report as one document.
DOCUMENTS = ("json", "yaml")


_color_option = option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    expose_value=False,
    callback=set_color,
    help="Color the text: auto on a terminal, unless NO_COLOR is set.",
    group=OUTPUT,
)


def report_option(*more: str, about: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the options -o and --color for a command with a report; `about` explains the formats `more`."""
    output = option(
        "-o",
        "--output",
        type=click.Choice((*FORMATS, *more)),
        default=FORMATS[0],
        show_default=True,
        help=f"Output format; wide adds details, name prints only names{f'; {about}' if about else ''}.",
        group=OUTPUT,
    )
    return lambda command: output(_color_option(command))


def emit(report: Report, output: str) -> None:
    """Print a report in one of FORMATS."""
    match output:
        case "json":
            echo_json(document(report))
        case "yaml":
            click.echo(yaml_text(document(report)), nl=False)
        case "name":
            for name in report.names():
                echo_line(name)
        case _:
            echo_styled(text(report.blocks(wide=output == "wide"), columns(sys.stdout)))


def echo_json(found: object) -> None:
    """Print a document as indented JSON, with the escapes of JSON for anything that could control a terminal."""
    click.echo(json_text(found), nl=False)


def emit_rules(rulesets: Iterable[tuple[str, str]]) -> None:
    """Print rules with a title for each part, such as its family, as `-o rules` does."""
    click.echo("\n".join(f"# {title}\n{rules}" for title, rules in rulesets if rules), nl=False)
