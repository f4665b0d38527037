"""Numbers and addresses that make a dispatch tree as deep as they can."""

from ipaddress import ip_address


def nested(base: int, width: int, step: int, copies: int) -> set[int]:
    """Numbers that share more and more bits with `base`, `step` bits more each time; some for each prefix."""
    return {
        base ^ (1 << bit) ^ copy for bit in range(0, width, step) for copy in range(min(copies, 1 << bit))
    }


def nested_addresses(near: str, step: int = 4, copies: int = 8) -> tuple[str, ...]:
    """Addresses, usable as external IPs, that share more and more bits with `near`, which is not among them."""
    base = ip_address(near)
    made = (type(base)(number) for number in sorted(nested(int(base), base.max_prefixlen, step, copies)))
    return tuple(
        str(it)
        for it in made
        if not (it.is_multicast or it.is_loopback or it.is_link_local or it.is_unspecified)
    )
