"""The configuration flags on a command line."""

from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.cli.flags import CONTEXT_SETTINGS, action_options, config_options, is_on, load_config
from pykubeproxy.config import ACTIONS, SETTINGS

FILE = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def run(*arguments: str) -> tuple[int, str, Mapping[str, object]]:
    """The exit code, the output and the flags of a command with all options that is given these arguments."""
    got: dict[str, object] = {}

    @click.command(context_settings=CONTEXT_SETTINGS)
    @config_options
    @action_options
    @click.option("--once", is_flag=True)
    def command(flags: Mapping[str, object], once: bool) -> None:
        """A command with an option of its own."""
        got.update(flags)
        config, warnings = load_config(flags)
        click.echo(f"{warnings} {config.logging.verbosity} {config.iptables.masquerade_all} {once}")

    result = CliRunner().invoke(command, arguments)
    return result.exit_code, result.output, got


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ((), {}),
        (("--v=2",), {"v": "2"}),
        (("--v", "2"), {"v": "2"}),
        (("-v", "2"), {"v": "2"}),
        (("-v=2",), {"v": "2"}),
        (("-v2",), {"v": "2"}),
        (("--masquerade-all",), {"masquerade-all": "true"}),
        (("--masquerade-all", "--v=2"), {"masquerade-all": "true", "v": "2"}),
        (("--masquerade-all", "-v", "2"), {"masquerade-all": "true", "v": "2"}),
        (("--masquerade-all=true",), {"masquerade-all": "true"}),
        (("--masquerade-all=false",), {"masquerade-all": "false"}),
        (("--masquerade_all=1",), {"masquerade-all": "1"}),
        (("--iptables-min-sync-period=0",), {"iptables-min-sync-period": "0"}),
        (("--oom-score-adj", "-500"), {"oom-score-adj": "-500"}),
        (("--oom-score-adj=-500",), {"oom-score-adj": "-500"}),
        (
            ("--nodeport-addresses", "10.0.0.0/8", "--nodeport-addresses=11.0.0.0/8,fd00::/64"),
            {"nodeport-addresses": ("10.0.0.0/8", "11.0.0.0/8,fd00::/64")},
        ),
        (("--cluster-cidr=10.0.0.0/8", "--cluster-cidr=11.0.0.0/8"), {"cluster-cidr": "11.0.0.0/8"}),
        (("--metrics-bind-address=",), {"metrics-bind-address": ""}),
        (("--cleanup", "--iptables-backend=nft"), {"cleanup": "true", "iptables-backend": "nft"}),
    ],
)
def test_go_flag_syntax(arguments: tuple[str, ...], flags: dict[str, object]) -> None:
    """Accept the syntax of Go's flags, and pass on only the given flags."""
    code, output, got = run(*arguments)
    assert (code, got) == (0, flags), output


def test_every_flag_of_the_table_is_an_option() -> None:
    """Accept each flag with its default, also those without effect, except --cluster-cidr, which must not be empty."""
    for setting in SETTINGS:
        if setting.flag and setting.flag != "cluster-cidr":
            text = setting.kind.text(setting.default).strip("[]")
            code, output, got = run(f"--{setting.flag}={text}")
            assert (code, list(got)) == (0, [setting.flag]), output


def test_invalid_value_is_one_line() -> None:
    """An invalid value ends the command with one line that names the flag."""
    code, output, _ = run("--iptables-masquerade-bit=40")
    expected = 'Error: --iptables-masquerade-bit: "40" is not valid: must be a whole number from 0 to 31\n'
    assert (code, output) == (1, expected)


def test_config_file(tmp_path: Path) -> None:
    """Read the file of --config; an error in it is one line with file and field."""
    path = tmp_path / "config.yaml"
    path.write_text(FILE + "iptables: {masqueradeAll: true}")
    assert run(f"--config={path}", "-v", "3")[:2] == (0, "() 3 True False\n")
    path.write_text(FILE + "mode: ipvs")
    code, output, _ = run("--config", str(path))
    assert (code, output) == (
        1,
        (
            f'Error: {path}: mode: "ipvs" is not valid: must be iptables or empty;'
            " pykubeproxy has no other mode\n"
        ),
    )
    assert run("--config", str(path), "--v=x")[1].startswith('Error: --v: "x" is not valid')


def test_unreadable_file_is_one_line(tmp_path: Path) -> None:
    """The error names the file and the cause."""
    code, output, _ = run("--config", str(tmp_path / "none"))
    assert (code, output) == (
        1,
        f"Error: --config: cannot read {tmp_path}/none: No such file or directory\n",
    )


def test_own_options_of_the_command() -> None:
    """Options of the command are separate from `flags`."""
    assert run("--once")[1] == "() 0 False True\n"


def test_help_lists_effective_flags() -> None:
    """--help lists flags with an effect, with their defaults, and hides the others."""
    code, output, _ = run("--help")
    words = set(output.replace(",", " ").split())
    shown = {f"--{setting.flag}" for setting in SETTINGS if setting.flag and setting.attribute}
    hidden = {f"--{setting.flag}" for setting in SETTINGS if setting.flag and not setting.attribute}
    assert code == 0
    assert shown | {f"--{setting.flag}" for setting in ACTIONS} <= words
    assert not hidden & words
    assert "[default: 1s]" in " ".join(output.split())


def test_action_flags() -> None:
    """An action runs if its flag is true; other values are one-line errors."""
    assert is_on({"cleanup": "true"}, "cleanup")
    assert not is_on({"cleanup": "false"}, "cleanup")
    assert not is_on({}, "init-only")
    with pytest.raises(
        click.ClickException, match=r'^--version: "maybe" is not valid: must be true or false$'
    ):
        is_on({"version": "maybe"}, "version")
