"""A server on a free port."""

from tests.unit.agent.conftest import serve

__all__ = ["serve"]
