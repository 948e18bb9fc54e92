"""Command line of an installed Farfield: `farfield`, or `python -m farfield`. A checkout uses `./deepy.py`."""

import sys

from farfield.namespace import describe_foreign_megatron


def start() -> None:
    """Exit if another project's `megatron` hides this one's; else handle signals until a command does so itself."""
    error = describe_foreign_megatron()
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from megatron.utils.signals import install_exit_handlers

    install_exit_handlers()


def main() -> int:
    """Run a command, and return its exit code."""
    start()
    from megatron.cli.app import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
