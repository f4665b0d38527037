"""`flows`: print what this node's kernel remembers of connections, for commands that run it in a pod of ours."""

import click

from pykubeproxy.cli.help import command
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.nodes.live import live_flow_lines


@command(short_help="Print the tracked connections of this node.")
def flows() -> None:
    """Print the tracked connections, and the clients that session affinity remembers, a line each.

    `kubectl pykubeproxy trace --conntrack` reads them.
    """
    lines, unread, unread_lists = live_flow_lines()
    if unread:
        raise click.ClickException(unread)
    for line in lines:
        click.echo(line)
    if unread_lists:
        echo_line(unread_lists, err=True)
