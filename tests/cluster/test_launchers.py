"""One run over two nodes with each launcher except SLURM, started as a user would on the first node."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import losses, records, tiny_config, write_corpora, write_pausing_method

from megatron.distributed.hardware import LocalHardware
from megatron.launch.local_launcher import train_on_this_machine
from megatron.position.catalog import METHODS_VARIABLE
from megatron.training.resolve_run import resolve_run
from tools.tolerances import compute_tolerance, count_gpt_sums

from .conftest import ROOT, until
from .two_nodes import NAMES, TwoNodes, missing

SECONDS = 240  # usually about ten seconds: two processes import torch at once, beside other tests
ROUNDING = compute_tolerance(*count_gpt_sums(32, layers=2))
DEEPY = str(ROOT / "deepy.py")
MPIRUN = ("mpirun", "--allow-run-as-root", "--host", f"{NAMES[0]}:1,{NAMES[1]}:1", "-x", f"MASTER_ADDR={NAMES[0]}")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static")
WAYS = {
    "ssh": [(sys.executable, DEEPY, "train", "hostfile=hosts")],
    "mpirun": [(*MPIRUN, "-x", "OMP_NUM_THREADS", "-x", METHODS_VARIABLE, sys.executable, DEEPY, "train")],
    "torchrun": [
        (*TORCHRUN, f"--node-rank={rank}", f"--master-addr={NAMES[0]}", "--master-port=29517", DEEPY, "train")
        for rank in range(2)
    ],
}
"""Commands on the first and the second node, by launcher."""
DEATHS = {
    "ssh": r"error: the process of rank 1 was killed by SIGKILL \(out of memory\?\); see .*log\.txt",
    "mpirun": rf"process rank 1 with PID \d+ on node {NAMES[1]} exited on signal 9|error: .*Connection",
    "torchrun": r"error: .*Connection",
}
"""Messages on the first node when the rank of the second is killed, by launcher."""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    """The nodes; skipped if they cannot be created."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp") as folder:
        nodes = TwoNodes(Path(folder))
        try:
            nodes.start()
            yield nodes
        finally:
            nodes.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[float]]]:
    """Folder with a corpus, run.yml and a hostfile, and the losses of an undisturbed single process."""
    folder = tmp_path_factory.mktemp("launchers")
    corpus, method = write_corpora(folder / "data"), write_pausing_method(folder / "methods")
    keys = {"pos_emb": method, "train_iters": 60, "train_batch_size": 4, "checkpoint_factor": 2, "num_workers": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(METHODS_VARIABLE, str(folder / "methods"))
        config = tiny_config(corpus, folder / "whole", **keys | {"checkpoint_factor": None})
        assert train_on_this_machine(resolve_run(config, LocalHardware(0, 1))) == 0
        config = tiny_config(corpus, **keys, train_micro_batch_size_per_gpu=1, num_gpus=None, nodes=None)
        config.save(folder / "run.yml")
        (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in NAMES))
        yield folder, losses(folder / "whole")


@pytest.mark.parametrize("way", WAYS)
def test_a_run_loses_a_rank_resumes_and_stops(
    two_nodes: TwoNodes, whole: tuple[Path, list[float]], way: str, tmp_path: Path
) -> None:
    folder, expected = whole
    run = folder / way

    def start(*keys: str) -> list[subprocess.Popen]:
        """Start the commands; outputs of the nodes are 0.log and 1.log in tmp_path."""
        commands = enumerate(WAYS[way])
        words = ("run.yml", f"save={way}", *keys)
        return [two_nodes.on(n, *each, *words, cwd=folder, output=tmp_path / f"{n}.log") for n, each in commands]

    def printed() -> str:
        return "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))

    def end(commands: list[subprocess.Popen]) -> list[int]:
        """Return the exit codes once no process of the run is left on either node."""
        until(lambda: None not in [each.poll() for each in commands], two_nodes, f"end of {way}", SECONDS)
        marks = [(n, mark) for n in range(2) for mark in ("deepy.py", "megatron.launch")]
        until(lambda: not any(two_nodes.processes(*each) for each in marks), two_nodes, "end of the ranks", 20)
        return [each.returncode for each in commands]

    def reach(step: int, commands: list[subprocess.Popen]) -> None:
        def there() -> bool:
            assert None in [each.poll() for each in commands], printed()
            return (run / "metrics.jsonl").is_file() and max(records(run), default=0) >= step

        until(there, two_nodes, f"step {step}", SECONDS)

    commands = start()
    reach(3, commands)
    two_nodes.kill_rank(1, 1)
    assert all(end(commands))
    assert re.search(DEATHS[way], (tmp_path / "0.log").read_text()), printed()

    commands = start(f"load={way}")
    reach(6, commands)
    two_nodes.ask_to_end(commands[0])
    assert all(end(commands))
    first = (tmp_path / "0.log").read_text()
    assert first.count("2 ranks: tensor 1 × pipeline 1 × context 1 × data 2") == 1
    stopped = re.search(r"stopped by SIGTERM at step (\d+) of 60; saved", first)
    assert stopped is not None, printed()
    assert losses(run) == pytest.approx(expected[: int(stopped[1])], rel=ROUNDING)
