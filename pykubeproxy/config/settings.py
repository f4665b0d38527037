"""What the table of settings says of each."""

import enum
from dataclasses import dataclass

from pykubeproxy.config.kinds import Kind


class Zero(enum.Enum):
    """What 0 and the empty text mean. kubeadm writes them into its ConfigMap for "take the default"."""

    COUNTS = "a value like any other"
    DEFAULT_IN_FILE = "the default when the file says it, a value when a flag does"
    DEFAULT = "the default"


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting.

    field: its path in the configuration file; empty if only a flag sets it.
    flag: its flag's name without dashes; empty if only the file sets it.
    default: the value, already of this kind, when neither says anything.
    attribute: its path in Config; empty if it is accepted and has no effect.
    beside_config: whether the flag still counts when a configuration file is given.
    omitted: whether /configz leaves it out while it has its default (Go's omitempty).
    instead: for a deprecated setting, what to use in its place.
    """

    field: str
    flag: str
    kind: Kind
    default: object
    help: str
    attribute: str = ""
    zero: Zero = Zero.COUNTS
    beside_config: bool = False
    omitted: bool = False
    instead: str = ""

    @property
    def ignored(self) -> bool:
        """Whether it is accepted without effect, as it belongs to another proxy mode, system, or time."""
        return not self.attribute and not self.instead
