"""The status of an agent as text: the blocks that its HTML page and `pykubeproxy status` share."""

from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median

from pykubeproxy.pages.servicez import Quarantined
from pykubeproxy.pages.statusz import AgentStatus, FamilyStatus, SyncRecord
from pykubeproxy.report.text import GAP, Block, Cell, Row, Section, Sentence, Table, Tone
from pykubeproxy.wording import counted, duration, listed

QUARANTINED = "They are not served. Each is tried again when it changes, and once an hour."


def blocks(status: AgentStatus, syncs: int = 5, quarantined: int = 10, repairs: int = 3) -> Iterator[Block]:
    """Return what a status says: health, families, quarantine, repairs and syncs, with at most so many of each."""
    yield Sentence(health(status), "good" if all_well(status) else "bad")
    if text := _unwatched(status):
        yield Sentence(text, "bad")
    if text := _waiting(status):
        yield Sentence(text)
    yield Sentence(_pending(status) or "No changes are pending.")
    yield GAP
    header = ("FAMILY", "STATE", "SERVICES", "ENDPOINTS", "RULES", "LAST UPDATED")
    yield Table([_family(status, family) for family in status.families], header, frozenset([2, 3, 4]))
    for text in _rejected_trees(status):
        yield Sentence(text, "bad")
    for name, reason in status.unavailable_families.items():
        yield Sentence(f"{name} is unavailable: {reason}", "aside")
    yield GAP
    yield from _quarantined(status, quarantined)
    yield from _repairs(status, repairs)
    yield from _syncs(status, syncs)


def wide_blocks(status: AgentStatus) -> Iterator[Block]:
    """Return what a status says, with its probes, times, rules by table, and all records."""
    probes = (status.healthy, status.ready, status.alive, status.node_eligible)
    cells = (*("yes" if probe else "no" for probe in probes), moment(status.started), moment(status.now))
    yield Table([Row(cells)], ("HEALTHY", "READY", "ALIVE", "NODE ELIGIBLE", "STARTED", "ANSWERED"))
    yield GAP
    quarantined = sum(len(family.quarantined) for family in status.families)
    yield from blocks(status, len(status.syncs), quarantined, len(status.repairs))
    yield GAP
    tables = [
        Row((family.family, table, str(rules)))
        for family in status.families
        for table, rules in family.rules.items()
    ]
    if tables:
        yield Table(tables, ("FAMILY", "TABLE", "RULES"), frozenset([2]))


def moment(seconds: float) -> str:
    """Format a time in seconds since 1970."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _family(status: AgentStatus, family: FamilyStatus) -> Row:
    state = _family_state(status, family)
    updated = _ago(status, family.last_updated) if family.last_updated else "never"
    numbers = (family.services, family.endpoints, sum(family.rules.values()))
    shade: Tone = "good" if state == "up to date" else "bad"
    return Row((family.family, Cell(state, shade), *map(str, numbers), updated))


def _quarantined(status: AgentStatus, most: int) -> Iterator[Block]:
    ports = [port for family in status.families for port in family.quarantined]
    rows = [
        Row(
            (str(port.port_name), port.protocol, port.family, _ago(status, port.since)),
            below=[Sentence(_quarantine_reason(port))],
        )
        for port in ports[:most]
    ]
    if ports:
        heading = Sentence(f"Quarantined: {len(ports)}. {QUARANTINED}", "bad")
        yield Section(heading, [Table(rows), *more(len(ports) - most)])
        yield GAP


def _repairs(status: AgentStatus, most: int) -> Iterator[Block]:
    rows = []
    for repair in reversed(status.repairs[-most:]):
        by = f" (by {', '.join(repair.writers)})" if repair.writers else ""
        cells = (_ago(status, repair.time), repair.family, f"in {duration(repair.seconds)}")
        rows.append(Row(cells, below=[Sentence(f"{repair.what}{by}")]))
    if rows:
        yield Section(Sentence("Drift repaired:"), [Table(rows)])
        yield GAP


def _syncs(status: AgentStatus, most: int) -> Iterator[Block]:
    if not status.syncs:
        yield Sentence("No sync yet.")
        return
    rows = []
    for sync in reversed(status.syncs[-most:]):
        written = "" if sync.failure else str(sync.rules)
        cells = (_ago(status, sync.time), sync.family, kind_of(sync), duration(sync.seconds), written)
        rows.append(Row(cells, below=[Sentence(sync.failure, "bad")] if sync.failure else ()))
    seconds = [sync.seconds for sync in status.syncs]
    times = f"median {duration(median(seconds))}, longest {duration(max(seconds))}"
    failed = sum(bool(sync.failure) for sync in status.syncs)
    heading = f"Last {counted(len(status.syncs), 'sync')}: {times}{f', {failed} failed' * bool(failed)}"
    header = ("ENDED", "FAMILY", "SYNC", "DURATION", "RULES WRITTEN")
    yield Section(Sentence(heading), [Table(rows, header, frozenset([3, 4]))])


def more(number: int) -> Iterator[Block]:
    """Yield a sentence about entries that are left out, if there are any."""
    if number > 0:
        yield Sentence(f"and {number} more; the JSON form lists all", "aside")


def _ago(status: AgentStatus, then: float) -> Cell:
    return Cell(f"{duration(max(0.0, status.now - then))} ago", hint=moment(then))


def health(status: AgentStatus) -> str:
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


def all_well(status: AgentStatus) -> bool:
    """Return whether the agent is healthy, follows changes, has applied them, and no other program undoes its rules."""
    contested = any(family.contested for family in status.families)
    return status.healthy and not status.unwatched and not _failing(status) and not contested


def _failing(status: AgentStatus) -> list[str]:
    last = {sync.family: sync for sync in status.syncs}  # oldest first
    return [
        family.family for family in status.families if family.family in last and last[family.family].failure
    ]


def _unwatched(status: AgentStatus) -> str:
    if not status.unwatched:
        return ""
    objects = ", ".join(unwatched.objects for unwatched in status.unwatched)
    longest = min(status.unwatched, key=lambda unwatched: unwatched.since)
    since = duration(max(0.0, status.now - longest.since))
    return f"Watching {objects} has failed for {since}: {longest.reason}."


def _waiting(status: AgentStatus) -> str:
    return (
        f"Waiting to take over when this agent ends: {'; '.join(status.waiting)}." if status.waiting else ""
    )


def _pending(status: AgentStatus) -> str:
    counts = (
        (status.pending_services, "changed Service", ""),
        (status.pending_endpoints, "Service", " with changed endpoints"),
    )
    waiting = [f"{counted(number, noun)}{rest}" for number, noun, rest in counts if number]
    verb = "waits" if status.pending_services + status.pending_endpoints == 1 else "wait"
    return f"{listed(waiting)} {verb} for the next sync." if waiting else ""


def _quarantine_reason(quarantined: Quarantined) -> str:
    action = "connections are rejected" if quarantined.rejects_clients else "packets pass unchanged"
    return f"{action}: {quarantined.reason}"


def _rejected_trees(status: AgentStatus) -> list[str]:
    return [
        f"{family.family} uses a flat chain. iptables rejects the dispatch tree, which is tried again once an hour: "
        f"{family.rejected_tree}"
        for family in status.families
        if family.rejected_tree
    ]


def _family_state(status: AgentStatus, family: FamilyStatus) -> str:
    if family.overdue:
        return "overdue"
    if family.contested:
        return "contested"
    if family.family in _failing(status):
        return "last sync failed"
    return "up to date" if family.last_updated else "not synced yet"


def kind_of(sync: SyncRecord) -> str:
    """Return "full" or "partial", with ", failed" after it if the sync failed."""
    return f"{'full' if sync.full else 'partial'}{', failed' if sync.failure else ''}"
