"""The texts that the status page and `pykubeproxy status` share."""

from collections.abc import Sequence
from statistics import median

from pykubeproxy.agent.observe.status import FamilyStatus, Status, Sync
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.wording import counted, listed

QUARANTINED = "They are not served. Each is tried again when it changes, and once an hour."


def health(status: Status) -> str:
    """Return the health of the agent in one sentence."""
    if status.waits_for:
        return f"Waiting: another pykubeproxy, {status.waits_for}, manages the rules; this one takes over when it ends."
    if not status.alive:
        return "Not healthy: the reconcile loop hangs; the kubelet restarts the agent."
    contested = listed([family.family for family in status.families if family.contested])
    if contested and not status.ready:
        return f"Not ready: another program keeps undoing the {contested} rules."
    if not status.ready and not status.healthy:
        return "Not ready: the rules are not in place or not up to date yet."
    if not status.node_eligible:
        return "Rules are up to date, but the node is leaving or unknown: load balancers should skip it."
    if status.unwatched:
        return "Cut off: rules are in place but do not follow changes."
    if contested:
        return f"Contested: rules are up to date, but another program keeps undoing the {contested} rules."
    if failed := _failing(status):
        return f"Behind: the last {listed(failed)} sync failed; rules stay in place but may miss changes."
    return "Healthy: rules are up to date."


def all_well(status: Status) -> bool:
    """Return whether the agent is healthy, follows changes, has applied them, and no other program undoes its rules."""
    contested = any(family.contested for family in status.families)
    return status.healthy and not status.unwatched and not _failing(status) and not contested


def _failing(status: Status) -> list[str]:
    """Return the families whose last sync failed."""
    last = {sync.family: sync for sync in status.syncs}  # oldest first
    return [it.family for it in status.families if it.family in last and last[it.family].failure]


def unwatched(status: Status) -> str:
    """Return which watches fail, since when and why; "" if none does."""
    if not status.unwatched:
        return ""
    objects = ", ".join(unwatched.objects for unwatched in status.unwatched)
    longest = min(status.unwatched, key=lambda unwatched: unwatched.since)
    since = duration(max(0.0, status.now - longest.since))
    return f"Watching {objects} has failed for {since}: {longest.reason}."


def waiting(status: Status) -> str:
    """Return which agents wait for the end of this one; "" if none does."""
    return (
        f"Waiting to take over when this agent ends: {'; '.join(status.waiting)}." if status.waiting else ""
    )


def pending(status: Status) -> str:
    """Return how many Services wait for the next sync; "" if none does."""
    counts = (
        (status.pending_services, "changed Service", ""),
        (status.pending_endpoints, "Service", " with changed endpoints"),
    )
    waiting = [f"{counted(number, noun)}{rest}" for number, noun, rest in counts if number]
    verb = "waits" if status.pending_services + status.pending_endpoints == 1 else "wait"
    return f"{listed(waiting)} {verb} for the next sync." if waiting else ""


def quarantine_reason(quarantined: Quarantined) -> str:
    """Return what happens to new connections to a quarantined service port, and why it is quarantined."""
    action = "connections are rejected" if quarantined.rejects_clients else "packets pass unchanged"
    return f"{action}: {quarantined.reason}"


def rejected_trees(status: Status) -> list[str]:
    """Return a sentence for each family whose dispatch tree iptables rejects."""
    return [
        f"{it.family} uses a flat chain. iptables rejects the dispatch tree, which is tried again once an hour: "
        f"{it.rejected_tree}"
        for it in status.families
        if it.rejected_tree
    ]


def family_state(status: Status, family: FamilyStatus) -> str:
    """Return the state of a family in a few words."""
    if family.overdue:
        return "overdue"
    if family.contested:
        return "contested"
    if family.family in _failing(status):
        return "last sync failed"
    return "up to date" if family.last_updated else "not synced yet"


def typical(syncs: Sequence[Sync]) -> tuple[float, float]:
    """Return the median and the longest duration of at least one sync, in seconds."""
    seconds = [sync.seconds for sync in syncs]
    return median(seconds), max(seconds)


def kind_of(sync: Sync) -> str:
    """Return "full" or "partial", with ", failed" after it if the sync failed."""
    return f"{'full' if sync.full else 'partial'}{', failed' if sync.failure else ''}"


def duration(seconds: float) -> str:
    """Format a duration: 4 ms, 1.25 s, 3 min 20 s, 2 h 5 min, 12 d 3 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    rest, parts = int(seconds), list[str]()
    for size, unit in units:
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])
