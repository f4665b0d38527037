"""What commands print: documents for programs, and styled text for people."""

import os

import click
import msgspec


def echo_json(document: object) -> None:
    """Print a document as JSON, indented."""
    click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())


def echo_styled(text: str) -> None:
    """Print text that is styled; only terminals get to see that, and not with NO_COLOR (https://no-color.org)."""
    click.echo(text, nl=False, color=False if os.environ.get("NO_COLOR") else None)


output_option = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="The form."
)
