"""What the user can mend."""


class SandboxError(Exception):
    """A message for people, and the exit status that goes with it."""

    def __init__(self, message: str, status: int = 1) -> None:
        """Keep the message and the exit status (2 for a wrong call or a missing prerequisite)."""
        super().__init__(message)
        self.status = status
