"""Distribution of tests to xdist's workers in `make test`."""

import rank_turns
from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING
from xdist.workermanage import WorkerController

from megatron.distributed.hardware import count_cores


class WaitingTestsScheduling(WorkStealingScheduling):
    """xdist's `--dist worksteal`, except that one worker starts with all waiting tests (`rank_turns.py`).

    That worker ends after them if there are more workers than processors, because a third computing worker on two
    processors slows all down. Idle workers take some of its tests, as with any worker.
    """

    _waiting_worker: WorkerController | None = None

    def check_schedule(self) -> None:
        if self._waiting_worker is None and self.collection is not None and len(self.nodes) > 1:
            self._waiting_worker = self.nodes[-1]
            files = [name.split("::")[0].removeprefix("tests/") for name in self.collection]
            waiting = [index for index in self.pending if rank_turns.is_in(files[index], rank_turns.WAITING)]
            self.pending[:] = [*waiting, *sorted({*self.pending} - {*waiting})]
            self._send_tests(self._waiting_worker, len(waiting))
        if self.numnodes > count_cores():
            for node, pending in self.node2pending.items():
                if node is self._waiting_worker and len(pending) < MIN_PENDING and not node.shutting_down:
                    node.shutdown()
        super().check_schedule()
