"""Python imports this before anything else where it is first in PYTHONPATH, which `environment.py` alone sees to."""

import os
import sys

if "FARFIELD_NULL_DEVICE" in os.environ:
    try:
        from megatron.rehearsal.null_device.activate import activate

        activate()
    except Exception as error:  # the interpreter would print this and go on
        print(f"error: the null device cannot be switched on: {error}", file=sys.stderr, flush=True)
        os._exit(1)
