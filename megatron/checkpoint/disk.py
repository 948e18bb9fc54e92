"""Why a write failed, in the words of the operating system."""


def reason(error: BaseException) -> str:
    """One line. torch and safetensors report a full disk as an error of their own; the disk's stands behind it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
