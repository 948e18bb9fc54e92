"""The two ways Farfield ends early. Each becomes one line on the console and an exit code, never a traceback."""


class FarfieldError(Exception):
    """Something a person should read as one clear line. `exit_code` is the process's."""

    exit_code = 1


class UserError(FarfieldError):
    """What the user wrote cannot be done: name the file, key and value, and the valid choices.

    `key`, dotted, is the configuration's to blame, for whoever still knows which file set it.
    """

    exit_code = 2

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class RunError(FarfieldError):
    """Something failed while running (a full disk, a NaN loss, a truncated file): say what is kept and where."""

    exit_code = 1
