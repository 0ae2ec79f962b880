"""The errors kvlab raises when something outside the code has to change: a file, the network, an argument."""


class KvlabError(Exception):
    """What went wrong, and what to do about it.

    Args:
        message: one sentence that says what is wrong and names the argument or file.
        remedy: one sentence that says what to do.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}"


class UsageError(KvlabError):
    """The command line asks for something there is not."""
