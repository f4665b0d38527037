"""The configuration's flags as click options, made from the table of settings, and the file of --config."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from pykubeproxy.config import ACTIONS, SETTINGS, ConfigError, Loaded, Setting, load
from pykubeproxy.config.kinds import BOOL

# kube-proxy takes --masquerade_all for --masquerade-all.
CONTEXT_SETTINGS = {"token_normalize_func": lambda token: token.replace("_", "-")}

_CONFIG = next(setting for setting in ACTIONS if setting.flag == "config")
_FLAGGED = (_CONFIG, *(setting for setting in SETTINGS if setting.flag))
_EXITING = tuple(setting for setting in ACTIONS if setting is not _CONFIG)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and the flag of every setting to a command.

    It gets one argument for them all, `flags`: those that were given, by name without dashes, with their text
    (a tuple of texts for the flags that may stand several times). `load_config(flags)` makes a Config of it.
    Flags without effect and deprecated ones are taken, but `--help` leaves them out.
    """
    return _collected(command, _FLAGGED)


def action_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --write-config-to, --init-only, --cleanup and --version; they come with the others in `flags`.

    `is_on(flags, "cleanup")` tells whether one of the last three was asked for.
    """
    return _collected(command, _EXITING)


def is_on(flags: Mapping[str, object], name: str) -> bool:
    """Whether the true-or-false flag `name` was given as true. Raises ClickException if it is neither."""
    setting = next(setting for setting in _EXITING if setting.flag == name)
    try:
        return bool(setting.kind.parse(str(flags.get(name, "false"))))
    except ValueError as error:
        raise click.ClickException(f'--{name}: "{flags[name]}" is not valid: {error}') from None


def load_config(flags: Mapping[str, object]) -> Loaded:
    """The Config of `flags` and the file that --config names, if any. Raises ClickException, in one line."""
    path = str(flags.get("config", ""))
    try:
        return load(Path(path).read_bytes() if path else None, flags)
    except OSError as error:
        raise click.ClickException(f'--config: "{path}" cannot be read: {error.strerror or error}') from None
    except ConfigError as error:
        raise click.ClickException(
            str(error) if not path or error.field.startswith("--") else f"{path}: {error}"
        ) from None


def _collected(command: Callable[..., Any], settings: tuple[Setting, ...]) -> Callable[..., Any]:
    names = {setting.flag: _argument(setting) for setting in settings}

    @functools.wraps(command)
    def collecting(*args: Any, flags: Mapping[str, object] | None = None, **others: Any) -> Any:
        values = {flag: others.pop(name) for flag, name in names.items()}
        given = {flag: value for flag, value in values.items() if value not in (None, ())}
        return command(*args, flags={**(flags or {}), **given}, **others)

    decorated: Callable[..., Any] = collecting
    for setting in reversed(settings):
        decorated = _option(setting)(decorated)
    return decorated


def _argument(setting: Setting) -> str:
    """The parameter's name; the prefix keeps it from meeting one of the command's own."""
    return "flag_" + setting.flag.replace("-", "_")


def _option(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = [f"--{setting.flag}", _argument(setting)]
    # Without a value, "--masquerade-all" means true, as in Go. Any flag_value, even None, makes a value optional.
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
