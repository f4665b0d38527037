"""What commands have in common that look at the live tables."""

from typing import Literal

import click

from pykubeproxy import kernel
from pykubeproxy.rules.skeleton import NAT_SERVICES


def backend_to_read(wanted: Literal["auto", "nft", "legacy"]) -> kernel.Backend:
    """The backend to look at: nft, legacy or, for auto, the one whose rules serve this node. Raises KernelError.

    A note on standard error says so if the other one has rules of a service proxy as well.
    """
    backend = kernel.choose(wanted, holding=NAT_SERVICES)
    if other := kernel.also_holding(backend, NAT_SERVICES):
        click.echo(
            f"Note: this is about {backend.value}; the {other.value} tables have rules of a service proxy too, and"
            " packets meet both. `pykubeproxy check` says what to do.",
            err=True,
        )
    return backend
