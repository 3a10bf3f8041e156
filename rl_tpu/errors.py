"""The two ways a run ends badly: the user can fix the input, or something broke while running."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do. Entry points exit with 2."""


class RunError(Exception):
    """A part of a running job failed. The message says which part, what happened and where its log is. Exit code 1."""
