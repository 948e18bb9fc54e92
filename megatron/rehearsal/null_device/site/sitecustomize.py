"""Hook that Python imports at startup if this folder is first in PYTHONPATH. Only `environment.py` puts it there."""

import os
import sys

if "FARFIELD_NULL_DEVICE" in os.environ:
    try:
        from megatron.rehearsal.null_device.activate import activate

        activate()
    except Exception as error:  # the interpreter would only print the error and continue
        print(f"error: the null device cannot be activated: {error}", file=sys.stderr, flush=True)
        os._exit(1)
