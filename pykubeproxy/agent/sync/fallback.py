"""Use a flat chain where iptables rejects a dispatch tree."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.kernel import KernelError, Rejected
from pykubeproxy.rules.applied import Update
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.options import RuleOptions

# From the messages of EMLINK (too many links) and ELOOP (too many levels of symbolic links), in lower case.
_TOO_DEEP = ("too many links", "too many levels")


class RejectedTree(msgspec.Struct, frozen=True):
    """A dispatch tree that iptables rejects: iptables' message, and the configured options of its rules."""

    reason: str
    options: RuleOptions | None


class Fallback:
    """Dispatch flat in one family after iptables has rejected its tree, until `retry` or until the options change.

    The reconcile loop owns it.
    """

    def __init__(self) -> None:
        self._tree: RejectedTree | None = None
        self._options: RuleOptions | None = None
        self._unexplained = False

    @property
    def reason(self) -> str:
        """Return why the tree is rejected; "" if it is not."""
        return self._tree.reason if self._tree else ""

    def retry(self) -> None:
        """Try the tree again."""
        self._tree = None

    @contextmanager
    def attempts(self) -> Iterator[None]:
        """Enclose the attempts of a sync. If all fail, a flat chain did not help: keep the choice from before."""
        before, self._unexplained = self._tree, False
        try:
            yield
        except BaseException:
            self._tree = before
            raise

    def context(self, context: RuleContext) -> RuleContext:
        """Return the context for the next attempt."""
        self._options = context.options
        if self._tree and self._tree.options != context.options:
            self._tree = None
        if self._tree is None:
            return context
        options = msgspec.structs.replace(context.options, dispatch=Dispatch.FLAT)
        return msgspec.structs.replace(context, options=options)

    def too_deep(self, error: KernelError, update: Update) -> bool:
        """Reject the tree if iptables found too many jumps or a loop. Return whether to make another attempt."""
        return any(words in str(error).lower() for words in _TOO_DEEP) and self._reject(error, update)

    def no_culprit(self, error: KernelError, update: Update) -> bool:
        """Reject the tree because no service is to blame. Return whether to make another attempt.

        A concurrent writer causes single rejections, so try the tree once more. If a chain cannot be deleted, another proxy
        refers to it, and the tree is not the cause.
        """
        if isinstance(error, Rejected) and error.line.startswith("-X "):
            return False
        if isinstance(error, Rejected) and not self._unexplained:
            self._unexplained = True
            return _has_tree(update)
        return self._reject(error, update)

    def _reject(self, error: KernelError, update: Update) -> bool:
        if not isinstance(error, Rejected) or error.is_shortage or not _has_tree(update):
            return False
        self._tree = RejectedTree(error.message, self._options)
        return True


def _has_tree(update: Update) -> bool:
    return any(tree.chains for tree in update.trees.values())
