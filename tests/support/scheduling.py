"""How `make test` deals out tests to the workers of xdist."""

import worlds
from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING
from xdist.workermanage import WorkerController


class WaitingApart(WorkStealingScheduling):
    """xdist's `--dist worksteal`, where one worker begins with all tests that wait (`worlds.py`).

    That worker ends after them if there are more workers than processors: a third that computes on two makes all
    slower. As of any worker, others that have nothing left to do take some of its tests.
    """

    _apart: WorkerController | None = None

    def check_schedule(self) -> None:
        if self._apart is None and self.collection is not None and len(self.nodes) > 1:
            self._apart = self.nodes[-1]
            files = [name.split("::")[0].removeprefix("tests/") for name in self.collection]
            waiting = [index for index in self.pending if worlds.is_in(files[index], worlds.WAITING)]
            self.pending[:] = [*waiting, *sorted({*self.pending} - {*waiting})]
            self._send_tests(self._apart, len(waiting))
        if self.numnodes > worlds.count_processors():
            for node, pending in self.node2pending.items():
                if node is self._apart and len(pending) < MIN_PENDING and not node.shutting_down:
                    node.shutdown()
        super().check_schedule()
