"""The status of an agent in words, for the page and for the terminal."""

from collections.abc import Iterable, Sequence
from statistics import median

from pykubeproxy.agent.observe.status import FamilyStatus, QuarantinedStatus, Status, Sync

# What it means that services are set aside.
SET_ASIDE = (
    "Not served, for iptables refuses their rules. Each is tried again when it changes, and once an hour."
)


def health(status: Status) -> str:
    """The health of the agent in a sentence."""
    if not status.alive:
        return "Not healthy: changes are waiting for too long to be written."
    if contested := [family.family for family in status.families if family.contested]:
        return f"Not ready: somebody undoes the {' and '.join(contested)} rules again and again."
    if not status.ready:
        return "Not ready: the rules are not in place yet."
    if not status.node_eligible:
        return "Rules are up to date, but the node is going or not known: balancers are to pass it by."
    if status.unwatched:
        return "Cut off: rules are in place, but they follow no changes."
    return "Healthy: rules are up to date."


def unwatched(status: Status) -> str:
    """What the API server is not heard about, since when and why, in sentences; "" if it is heard."""
    if not status.unwatched:
        return ""
    what = ", ".join(it.objects for it in status.unwatched)
    longest = min(status.unwatched, key=lambda it: it.since)
    since = duration(max(0.0, status.now - longest.since))
    return f"For {since} the API server could not be asked about {what}: {longest.why}."


def pending(status: Status) -> str:
    """What waits for the next sync, in a sentence; "" if nothing does."""
    counts = (
        (status.pending_services, "changed Service", "changed Services"),
        (status.pending_endpoints, "Service with changed endpoints", "Services with changed endpoints"),
    )
    waiting = [f"{number} {one if number == 1 else many}" for number, one, many in counts if number]
    verb = "waits" if status.pending_services + status.pending_endpoints == 1 else "wait"
    return f"{' and '.join(waiting)} {verb} for the next sync." if waiting else ""


def aside_in_words(aside: QuarantinedStatus) -> str:
    """Why a service port is set aside, and what becomes of its packets."""
    return f"{'refused' if aside.refuses else 'its packets are not touched'}: {aside.why}"


def family_state(family: FamilyStatus) -> str:
    """The state of a family in a few words."""
    if family.overdue:
        return "overdue"
    if family.contested:
        return "contested"
    return "up to date" if family.last_updated else "not written yet"


def typical(syncs: Sequence[Sync]) -> tuple[float, float]:
    """The median and the longest time of syncs, in seconds; there has to be one."""
    seconds = [sync.seconds for sync in syncs]
    return median(seconds), max(seconds)


def kind_of(sync: Sync) -> str:
    """Such as "full" or "partial, failed"."""
    return f"{'full' if sync.full else 'partial'}{', failed' if sync.failure else ''}"


def duration(seconds: float) -> str:
    """A time for people: 4 ms, 1.25 s, 3 min 20 s, 2 h 5 min, 12 d 3 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    units: Iterable[tuple[int, str]] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    left, parts = int(seconds), list[str]()
    for size, unit in units:
        number, left = divmod(left, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])
