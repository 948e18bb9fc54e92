"""Rehearsed rank with a fault: the second tensor-parallel rank skips the second of its gradient sums.

`python tests/support/faulty_rank.py JOB`, like `megatron.rehearsal.rank_process`.
"""

import json
import sys
from pathlib import Path

from megatron.distributed import sharding
from megatron.rehearsal import rank_process

real, calls = sharding._all_reduce_grad, []


def skip_second(grad, groups):  # type: ignore[no-untyped-def]
    calls.append(grad)
    return grad if len(calls) == 2 else real(grad, groups)


if json.loads(Path(sys.argv[1]).read_text())["rank"] == 1:
    sharding._all_reduce_grad = skip_second
sys.exit(rank_process.main(sys.argv[1:]))
