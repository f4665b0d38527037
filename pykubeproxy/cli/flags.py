"""Click options that commands share: the flags of the configuration, and -f, -o, --family, --node-address."""

import functools
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from pykubeproxy.config import ACTIONS, SETTINGS, Config, ConfigError, Loaded, Setting, load
from pykubeproxy.config.kinds import BOOL
from pykubeproxy.objects import Family

# As in kube-proxy, --masquerade_all means --masquerade-all.
CONTEXT_SETTINGS = {"token_normalize_func": lambda token: token.replace("_", "-")}

_CONFIG = next(setting for setting in ACTIONS if setting.flag == "config")
_FLAGGED = (_CONFIG, *(setting for setting in SETTINGS if setting.flag))
_EXITING = tuple(setting for setting in ACTIONS if setting is not _CONFIG)


def _families(_: click.Context, __: click.Parameter, value: str | None) -> tuple[Family, ...]:
    return tuple(family for family in Family if value in (None, family.value.lower()))


def _plain_addresses(
    _: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Drop the prefix lengths of addresses."""
    try:
        return tuple(str(ipaddress.ip_interface(value).ip) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"{error}; use the form 192.168.1.10/24", param=parameter) from None


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
family_option = click.option(
    "--family",
    "families",
    type=click.Choice([family.value.lower() for family in Family]),
    callback=_families,
    help="Use this address family only.  [default: both]",
)
filename_option = click.option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-" instead of an API server.',
)
node_address_option = click.option(
    "--node-address",
    "addresses",
    multiple=True,
    callback=_plain_addresses,
    metavar="CIDR",
    help="An address of the node in PATH, for nodePortAddresses. Repeatable.  [default: those of the Node]",
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and the flags of all settings to a command.

    The command gets one argument `flags`: the given flags by name without dashes, with their text, or a tuple of texts
    for repeatable flags. Flags without effect and deprecated flags are accepted but hidden from `--help`.
    """
    return _with_options(command, _FLAGGED)


def action_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --write-config-to, --init-only, --cleanup and --version to `flags`; see `is_on` for the last three."""
    return _with_options(command, _EXITING)


def is_on(flags: Mapping[str, object], name: str) -> bool:
    """Return whether the boolean flag `name` is true. Raise ClickException if it is neither true nor false."""
    setting = next(setting for setting in _EXITING if setting.flag == name)
    try:
        return bool(setting.kind.parse(str(flags.get(name, "false"))))
    except ValueError as error:
        raise click.ClickException(f'--{name}: "{flags[name]}" is not valid: {error}') from None


def load_config(flags: Mapping[str, object]) -> Loaded:
    """Load the configuration from `flags` and the file of --config. Raise ClickException."""
    path = str(flags.get("config", ""))
    try:
        return load(Path(path).read_bytes() if path else None, flags)
    except OSError as error:
        raise click.ClickException(f"--config: cannot read {path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise click.ClickException(
            str(error) if not path or error.field.startswith("--") else f"{path}: {error}"
        ) from None


def read_config(flags: Mapping[str, object]) -> Config:
    """Load the configuration and print its warnings to standard error. Raise ClickException."""
    config, warnings = load_config(flags)
    for warning in warnings:
        click.echo(warning, err=True)
    return config


def _with_options(command: Callable[..., Any], settings: tuple[Setting, ...]) -> Callable[..., Any]:
    names = {setting.flag: _argument(setting) for setting in settings}

    @functools.wraps(command)
    def wrapper(*args: Any, flags: Mapping[str, object] | None = None, **others: Any) -> Any:
        values = {flag: others.pop(name) for flag, name in names.items()}
        given = {flag: value for flag, value in values.items() if value not in (None, ())}
        return command(*args, flags={**(flags or {}), **given}, **others)

    decorated: Callable[..., Any] = wrapper
    for setting in reversed(settings):
        decorated = _option(setting)(decorated)
    return decorated


def _argument(setting: Setting) -> str:
    """Return the parameter name; the prefix avoids clashes with parameters of the command."""
    return "flag_" + setting.flag.replace("-", "_")


def _option(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = [f"--{setting.flag}", _argument(setting)]
    # As in Go, "--masquerade-all" without a value means true. Any flag_value, even None, makes a value optional.
    bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.kind is BOOL else {}
    return click.option(
        *(names if len(setting.flag) > 1 else [f"-{setting.flag}", *names]),
        multiple=setting.kind.repeatable,
        default=None,
        callback=_without_equals if len(setting.flag) == 1 else None,
        metavar=setting.kind.name,
        help=_help(setting),
        hidden=setting not in ACTIONS and (setting.ignored or bool(setting.instead)),
        **bare,
    )


def _without_equals(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Go takes "-v=2"; click leaves the "=" of a short option in its value."""
    return value.removeprefix("=") if value else value


def _help(setting: Setting) -> str:
    default = setting.kind.text(setting.default)
    return setting.help if default in ("", "[]", "false") else f"{setting.help}  [default: {default}]"
