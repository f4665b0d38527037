"""`pykubeproxy completion`: what makes a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete the commands and options of pykubeproxy.

    \b
    bash:  pykubeproxy completion bash > /etc/bash_completion.d/pykubeproxy
    zsh:   pykubeproxy completion zsh > /usr/local/share/zsh/site-functions/_pykubeproxy
    fish:  pykubeproxy completion fish > ~/.config/fish/completions/pykubeproxy.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows all of these"
    program = ctx.find_root().command
    click.echo(found(program, {}, "pykubeproxy", "_PYKUBEPROXY_COMPLETE").source())
