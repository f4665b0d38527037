"""The value that describes a quarantined service port, or a whole Service."""

from typing import Self

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.services.ports import PortName


class Quarantined(msgspec.Struct, frozen=True, rename="camel"):
    """A service port that is not served for a `reason`; `since` is in seconds since 1970.

    `rejects_clients`: new connections are rejected; if false, iptables rejects even the reject rule, and packets pass
    unchanged. `port` and `protocol` are "" for a whole Service, which is too large; only its cluster IP rejects clients.
    `tried`: iptables rejects its rules; if false, it rejects rules that may be those of another port.
    """

    family: str
    namespace: str
    name: str
    port: str
    protocol: str
    reason: str
    since: float
    rejects_clients: bool
    tried: bool = True

    @classmethod
    def from_port(
        cls,
        family: Family,
        port: PortName,
        reason: str,
        since: float,
        rejects_clients: bool = True,
        tried: bool = True,
    ) -> Self:
        """Return the quarantine of a service port in one family."""
        return cls(
            family=family.value,
            namespace=port.namespace,
            name=port.service,
            port=port.port,
            protocol=port.protocol,
            reason=reason,
            since=since,
            rejects_clients=rejects_clients,
            tried=tried,
        )

    @property
    def port_name(self) -> PortName:
        """The service port; its str() is the name used in rules and logs."""
        return PortName(self.namespace, self.name, self.port, self.protocol)
