"""Shared by all tests: small shapes, quiet and deterministic torch, one thread (tests run side by side)."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS refuses deterministic algorithms without a workspace of its own, and reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import worlds
from hypothesis import settings

from megatron.distributed.hardware import count_cores
from megatron.utils.temporary_folder import temporary_folder

if not torch.cuda.is_available():
    # tests/kernels run in Triton's interpreter, which triton chooses when any test first imports it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

# A GPU would round the factors of float32 convolutions (PyTorch's default) to TF32's 10 bits: no judge may.
torch.backends.cudnn.allow_tf32 = False
torch.backends.cuda.matmul.allow_tf32 = False

# The seed of all examples is an option in pyproject.toml: `derandomize` would parse every test's source for its own.
settings.register_profile("farfield", deadline=None, max_examples=15, database=None)
settings.load_profile("farfield")

# What is started in the background ignores SIGINT and what is started by nohup ignores SIGHUP, and so would every
# process that a test starts to interrupt it.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# What needs CUDA without a GPU runs on the null device, which pytest itself is started on (make test-cuda).
collect_ignore = [] if "FARFIELD_NULL_DEVICE" in os.environ else ["cuda"]


def pytest_configure(config: pytest.Config) -> None:
    """transformers asks no network, and keeps the code of exported models in a folder that no other run has seen."""
    # Until all tests are imported (`pytest_collection_finish`): nothing of that becomes garbage, and to search it again
    # and again takes half of the time.
    gc.disable()
    folder = ExitStack()
    config.add_cleanup(folder.close)
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(folder.enter_context(temporary_folder("hf"))))
    if (imported := sys.modules.get("transformers.dynamic_module_utils")) is not None:  # in a worker that is a fork
        imported.HF_MODULES_CACHE = os.path.join(os.environ["HF_HOME"], "modules")


TESTS = Path(__file__).parent
SLOW = tuple(
    """
    checkpoint cluster conversion golden kernels launch tools
    test_cli.py test_documented_commands.py test_run_command.py test_tutorial.py
    analysis/test_run.py
    attention/test_check.py attention/test_documents.py attention/test_flex.py attention/test_segments.py
    config/test_keys_are_used.py
    data/test_corpus.py data/test_corpus_metadata.py data/test_datasets.py data/test_sources.py
    distributed/test_process_groups.py
    evaluation/test_run.py
    farfield/test_commands.py
    generation/test_incremental_text.py generation/test_text_generator.py
    model/test_decoding.py model/test_mup.py model/test_tensor_parallel.py
    planning/test_activations.py planning/test_attention_memory.py planning/test_layouts.py
    planning/test_memory.py planning/test_parameters.py planning/test_step_time.py
    sweeps/test_benchmarks.py sweeps/test_branches.py sweeps/test_run.py
    training/test_documents.py training/test_engine.py training/test_kills.py training/test_layouts.py
    training/test_loss_guard.py training/test_methods.py training/test_muon.py
    training/test_parameter_norms.py training/test_processes.py training/test_profiler.py
    training/test_rank_times.py training/test_stages.py training/test_tasks.py training/test_trainer.py
    training/test_watchdog.py
    utils/test_output.py
    """.split()  # noqa: SIM905
)
"""Folders and files that `make test-fast` leaves out: training processes, killed runs, interpreted kernels."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-fast` does not import what it leaves out."""
    if config.option.markexpr != "not slow" or not collection_path.is_relative_to(TESTS):
        return None
    return True if worlds.is_in(collection_path.relative_to(TESTS).as_posix(), SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        if worlds.is_in(path, SLOW):
            item.add_marker("slow")
        if path in worlds.STARTED_BY:
            item.add_marker("ranks")
    items[:] = worlds.ordered(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: a worker for each processor, and one for the tests that wait, which `make test-fast` leaves out."""
    if config.option.dist != "worksteal" or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist's own answer
    return count_cores() + (config.option.markexpr != "not slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forks, unless there is a GPU, which no fork can use."""
    gc.enable()  # this process collects no tests
    if not torch.cuda.is_available():
        from forked_workers import start_servers

        command = start_servers(TESTS, config.invocation_params.args)
        for spec in specs:
            spec.python = command


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist worksteal`, with the tests that wait apart."""
    from scheduling import WaitingTestsScheduling  # where xdist is

    return WaitingTestsScheduling(config, log) if config.option.dist == "worksteal" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests that start ranks wait for their turn, before their fixtures do anything."""
    together = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # of all workers
    with worlds.turn(together) if item.get_closest_marker("ranks") else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # torch.manual_seed keeps a copy of the stack for each kind of device that is not there, 3 a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


_frozen = 0  # how many modules were imported when garbage collection last left out all there was


@pytest.fixture(autouse=True)
def _imports_are_not_searched() -> None:
    """DeepSpeed collects garbage with every engine, which takes as long as there are objects: a third of a second for
    all that is imported here, unless that is left out."""
    if len(sys.modules) > _frozen + 100:
        _leave_out_what_is_there()


@pytest.fixture(autouse=True, scope="module")
def _earlier_files_are_not_searched() -> None:
    """Nor what the tests of other files have left."""
    _leave_out_what_is_there()


def _leave_out_what_is_there() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)
