"""`pykubeproxy completion`: what makes a shell complete commands and options."""

import click
from click.shell_completion import BashComplete, get_completion_class

# What bash takes for a word ends at a colon, and "ns/name:port" is one to us: it is given what follows the last colon.
_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value last
    # The letter keeps a space at the end from getting lost.
    local -a words=(${line}x)
    last=${words[-1]%%x}
    local ahead=""
    if [[ $COMP_WORDBREAKS == *:* && $last == *:* ]]; then
        ahead=${last%%"${last##*:}"}
    fi
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$ahead"}") ;;
        esac
    done < <(COMP_WORDS=$line COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print a script that makes the shell complete commands.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete the commands and options of pykubeproxy, and names of Services.

    The names are asked of the agent that runs on this node, else read from its rules, which takes root.

    \b
    pykubeproxy completion bash > /etc/bash_completion.d/pykubeproxy
    pykubeproxy completion zsh > /usr/local/share/zsh/site-functions/_pykubeproxy
    pykubeproxy completion fish > ~/.config/fish/completions/pykubeproxy.fish
    """
    found = _Bash if shell == "bash" else get_completion_class(shell)
    assert found is not None, "click knows all of these"
    program = ctx.find_root().command
    click.echo(found(program, {}, "pykubeproxy", "_PYKUBEPROXY_COMPLETE").source())


class _Bash(BashComplete):
    source_template = _BASH

    @classmethod
    def _check_version(cls) -> None:
        """Nothing is asked of the bash that happens to be here: the script may be for another machine."""
