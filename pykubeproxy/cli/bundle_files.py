"""Read the rules of a node from a bundle, as --bundle names it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

from pykubeproxy.cli.help import SOURCE, option
from pykubeproxy.cli.terminal import click_errors

# Most commands read no bundle, so only the functions that need one import the modules for it.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.cli.rules_files import SavedRules
    from pykubeproxy.rules.saves import SavedFile

bundle_option = option(
    "--bundle",
    "bundle_file",
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help='Read the node from a file of `pykubeproxy bundle` or "-" instead of this node; this needs no root.',
    group=SOURCE,
)


def opened(path: str | None) -> "Bundle | None":
    """Read the bundle at a path, with "-" from standard input; None for no path. Raises ClickException."""
    if path is None:
        return None
    from pykubeproxy.bundle.read import InvalidBundle, read_bundle

    name = "standard input" if path == "-" else path
    try:
        with click.open_file(path, "rb") as file:
            return read_bundle(file, name)
    except OSError as error:
        raise click.ClickException(f"--bundle: cannot read {name}: {error.strerror or error}") from None
    except InvalidBundle as error:
        raise click.ClickException(f"--bundle: {error}") from None


def bundled_rules(
    bundle: "Bundle", backend: Literal["auto", "nft", "legacy"], addresses: tuple[str, ...] = ()
) -> "SavedRules":
    """Return the rules of a bundle, and the addresses and routes of its node. Raises ClickException.

    `addresses` replace those in the bundle.
    """
    from pykubeproxy.bundle.read import InvalidBundle
    from pykubeproxy.cli.rules_files import SavedRules, chosen_tables
    from pykubeproxy.inspect.trace.packet import Route
    from pykubeproxy.rules.saves import InvalidSave, read_saves

    saves = tuple(_saves(bundle))
    with click_errors(InvalidSave, InvalidBundle):
        tables = read_saves(saves) if saves else ()
        chosen = chosen_tables(tables, backend, "the bundle")
        known = addresses or bundle.addresses() or _node_addresses(bundle)
        routes = tuple(Route(it.network, it.interface) for it in bundle.routes() if it.interface)
    return SavedRules(
        bundle.name,
        {it.ruleset.family: it for it in chosen},
        known,
        routes,
        given=bool(addresses),
        advice=_why_no_tables(bundle),
    )


def _saves(bundle: "Bundle") -> "Iterator[SavedFile]":
    """Yield the files with tables; a backend without tables has an empty one, or one of comments."""
    from pykubeproxy.bundle.layout import TABLES
    from pykubeproxy.rules.saves import SavedFile

    for name in TABLES:
        text = bundle.files.get(name, b"").decode("utf-8", "surrogateescape")
        if text.startswith("*") or "\n*" in text:
            yield SavedFile(f"{bundle.name}, {name}", text)


def _node_addresses(bundle: "Bundle") -> tuple[str, ...]:
    from pykubeproxy.cli.bundle_agent import bundled_agent, has_objects

    return bundled_agent(bundle).objects.node.addresses if has_objects(bundle) else ()


def _why_no_tables(bundle: "Bundle") -> str:
    from pykubeproxy.bundle.layout import TABLES

    reasons = dict.fromkeys(it.error for it in bundle.manifest.files if it.name in TABLES and it.error)
    first = next(iter(reasons), "")
    return f"run `pykubeproxy bundle` again as root on the node{f' ({first})' if first else ''}"
