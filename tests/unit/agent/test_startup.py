"""Which address families an agent serves."""

from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

from pykubeproxy import kernel
from pykubeproxy.agent import startup
from pykubeproxy.agent.assembly import report_start
from pykubeproxy.agent.startup import Families, open_families
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Features
from pykubeproxy.objects import Family
from tests.fakes.iptables import FakeIptables
from tests.fakes.recorder import FakeRecorder

LACKS = "this node lacks kernel module {}; load them with modprobe, or use a kernel and an iptables that have them"


def opened(monkeypatch: pytest.MonkeyPatch, absent: Mapping[Family, str]) -> Families:
    """Open the families of a node that lacks these kernel modules."""

    def probe(tables: FakeIptables) -> Features:
        lacking = (f"kernel module {absent[tables.family]}",) if tables.family in absent else ()
        return Features(True, True, True, lacking)

    monkeypatch.setattr(startup, "prepare_backend", lambda _: Backend.NFT)
    monkeypatch.setattr(startup.nfacct, "ensure", lambda _: "")
    monkeypatch.setattr(kernel, "unsupported_reason", lambda *_: "")
    monkeypatch.setattr(kernel, "open_iptables", lambda backend, family, _: FakeIptables(backend, family))
    monkeypatch.setattr(kernel, "probe_features", probe)
    return open_families(load(None, {}).config)


@pytest.mark.parametrize(
    ("lacking", "module", "served"),
    [(Family.IPV6, "ip6t_REJECT", Family.IPV4), (Family.IPV4, "ipt_REJECT", Family.IPV6)],
)
def test_a_family_that_lacks_a_feature_is_left_out(
    monkeypatch: pytest.MonkeyPatch, lacking: Family, module: str, served: Family
) -> None:
    """The other one is served."""
    families = opened(monkeypatch, {lacking: module})
    assert [family.tables.family for family in families.opened] == [served]
    assert families.unsupported == {lacking: LACKS.format(module)}


def test_without_any_family_the_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one reason, if it is that of both."""
    with pytest.raises(kernel.KernelError, match=r"^this node lacks kernel module xt_recent; [^;]*$"):
        opened(monkeypatch, dict.fromkeys(Family, "xt_recent"))


def test_a_family_that_is_left_out_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log, and as an event on the Node that is no warning: many clusters have one family."""
    families, recorder = opened(monkeypatch, {Family.IPV6: "ip6t_REJECT"}), FakeRecorder()
    with capture_logs() as lines:
        report_start(families, recorder)
    reason = LACKS.format("ip6t_REJECT")
    assert lines[-1]["event"] == "address family not supported"
    assert (lines[-1]["family"], lines[-1]["reason"]) == ("IPv6", reason)
    (event,) = recorder.events
    assert (event.kind, event.type, event.reason) == ("Node", "Normal", "AddressFamilyNotSupported")
    assert event.note.endswith(f"does not serve IPv6: {reason}")
