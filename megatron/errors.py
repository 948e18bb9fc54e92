"""The two ways Farfield ends early. Each becomes one line on the console and an exit code, never a traceback."""


class FarfieldError(Exception):
    """Something a person should read as one clear line. `exit_code` is the process's."""

    exit_code = 1


class UserError(FarfieldError):
    """What the user wrote cannot be done: name the file, key and value, and the valid choices."""

    exit_code = 2


class RunError(FarfieldError):
    """Something failed while running (a full disk, a NaN loss, a truncated file): say what is kept and where."""

    exit_code = 1
