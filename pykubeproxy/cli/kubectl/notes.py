"""Notes about nodes, on standard error."""

from collections.abc import Mapping, Sequence

from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.wording import listed

_MOST_NODES = 8


def echo_notes(notes: Mapping[str, Sequence[str]]) -> None:
    """Print notes by name of a node; one that many nodes have, only once."""
    nodes: dict[str, list[str]] = {}
    for name in sorted(notes):
        for note in notes[name]:
            nodes.setdefault(note, []).append(name)
    for note, names in nodes.items():
        echo_line(f"{listed(names, _MOST_NODES)}: {note}", err=True)
