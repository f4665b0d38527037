"""Errors that end the agent."""


class BindFailed(Exception):
    """The address of `server` cannot be bound, and bindAddressHardFail is set; str() is a message for the operator."""

    def __init__(self, server: str, message: str) -> None:
        super().__init__(message)
        self.server = server
