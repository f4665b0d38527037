"""Names of pods, Services and nodes in place of addresses: parse them, and resolve them in a directory of objects.

    source = parse_source("pod/default/client")
    destination = parse_destination("svc/default/web:http")
    connection = resolve(source, destination, directory)

Pure: the caller reads the objects. Plain addresses need none.
"""

from pykubeproxy.inspect.targets.directory import Directory
from pykubeproxy.inspect.targets.names import Names, names_of
from pykubeproxy.inspect.targets.parse import (
    InvalidTarget,
    Target,
    TargetKind,
    parse_destination,
    parse_service,
    parse_source,
)
from pykubeproxy.inspect.targets.places import LocationKind, Place, Unresolved
from pykubeproxy.inspect.targets.resolve import ResolvedConnection, resolve
