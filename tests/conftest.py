"""Configuration of all tests: small shapes, quiet and deterministic torch, one thread because tests run in parallel."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS needs its own workspace for deterministic algorithms, and reads this variable when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import rank_turns
import torch
from hypothesis import settings

from megatron.distributed.hardware import count_cores
from megatron.utils.atomic_directory import temporary_folder

if not torch.cuda.is_available():
    # tests/kernels run in Triton's interpreter, which triton selects when any test first imports it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

# By default, GPUs round inputs of float32 convolutions to TF32's 10 bits. References must not be rounded.
torch.backends.cudnn.allow_tf32 = False
torch.backends.cuda.matmul.allow_tf32 = False

# pyproject.toml sets the seed of all examples: `derandomize` would parse the source of every test.
settings.register_profile("farfield", deadline=None, max_examples=15, database=None)
settings.load_profile("farfield")

# Background processes ignore SIGINT, and processes under nohup ignore SIGHUP. Tests that send these signals to their
# own processes need the defaults.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Tests of CUDA without a GPU run only if pytest itself runs on the null device (make test-cuda).
collect_ignore = [] if "FARFIELD_NULL_DEVICE" in os.environ else ["cuda"]


def pytest_configure(config: pytest.Config) -> None:
    """Keep transformers offline, and its code of exported models in a new folder."""
    # Until all tests are imported (`pytest_collection_finish`), nothing becomes garbage, and repeated collections would
    # take half of the time.
    gc.disable()
    folder = ExitStack()
    config.add_cleanup(folder.close)
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(folder.enter_context(temporary_folder("hf"))))
    if (imported := sys.modules.get("transformers.dynamic_module_utils")) is not None:  # in a forked worker
        imported.HF_MODULES_CACHE = os.path.join(os.environ["HF_HOME"], "modules")


TESTS = Path(__file__).parent
SLOW = tuple(
    """
    checkpoint cluster conversion golden kernels launch tools
    test_cli.py test_cli_errors.py test_documented_commands.py test_run_command.py test_tutorial.py
    attention/test_check.py attention/test_documents.py attention/test_flex.py attention/test_segments.py
    config/test_keys_are_used.py
    data/test_corpus.py data/test_corpus_metadata.py data/test_datasets.py data/test_sources.py
    distributed/test_process_groups.py
    evaluation/analysis/test_run.py evaluation/test_run.py
    evaluation/generation/test_incremental_text.py evaluation/generation/test_text_generator.py
    farfield/test_commands.py
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
"""Folders and files that `make test-fast` skips: training processes, killed runs, interpreted kernels."""
assert [path for path in SLOW if not (TESTS / path).exists()] == [], "SLOW names files that do not exist"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these files in `make test-fast`, without importing them."""
    if config.option.markexpr != "not slow" or not collection_path.is_relative_to(TESTS):
        return None
    return True if rank_turns.is_in(collection_path.relative_to(TESTS).as_posix(), SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        if rank_turns.is_in(path, SLOW):
            item.add_marker("slow")
        if path in rank_turns.STARTED_BY:
            item.add_marker("ranks")
    items[:] = rank_turns.ordered(items)


def pytest_collection_finish() -> None:
    if torch.distributed.is_initialized():
        raise pytest.UsageError("a test file builds a model on import; workers lack its process groups: use a fixture")
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the workers of `-n auto`: one per processor, and one for waiting tests, which `make test-fast` skips."""
    if config.option.dist != "worksteal" or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist's default
    return count_cores() + (config.option.markexpr != "not slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Use forked workers, unless there is a GPU, which a fork cannot use."""
    gc.enable()  # this process collects no tests
    if not torch.cuda.is_available():
        from forked_workers import start_servers

        command = start_servers(TESTS, config.invocation_params.args)
        for spec in specs:
            spec.python = command


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Use `--dist worksteal` with a separate worker for waiting tests."""
    from scheduling import WaitingTestsScheduling  # requires xdist

    return WaitingTestsScheduling(config, log) if config.option.dist == "worksteal" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Make tests that start ranks wait for their turn before their fixtures run."""
    together = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # of all workers
    with rank_turns.turn(together) if item.get_closest_marker("ranks") else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # torch.manual_seed saves a copy of the stack for each missing kind of device, three per test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


_frozen = 0  # number of imported modules when garbage collection last froze all objects


@pytest.fixture(autouse=True)
def _imports_are_not_searched() -> None:
    """Freeze imported modules.

    DeepSpeed runs the garbage collector for every engine, which otherwise takes a third of a second.
    """
    if len(sys.modules) > _frozen + 100:
        _leave_out_what_is_there()


@pytest.fixture(autouse=True, scope="module")
def _earlier_files_are_not_searched() -> None:
    """Freeze objects left by the tests of earlier files."""
    _leave_out_what_is_there()


def _leave_out_what_is_there() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny corpus of `tiny_runs`, which no test changes."""
    from tiny_runs import write_corpora  # slow to import

    return write_corpora(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Skip drawing, which takes longer than small evaluations."""
    from megatron.reports import plots  # slow to import

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "render_plots_png", lambda found, **_: b"\x89PNG")
        yield


@pytest.fixture(scope="session")
def fox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a prepared corpus and a configuration that trains on it. Tests that change it use a copy."""
    from command_line import prepare_fox

    return prepare_fox(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def inside(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Function that runs the command line in this process, where everything is imported already."""
    import deepy as program

    def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["./deepy.py", *arguments])
            for name, value in {"COLUMNS": "120", **environment}.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with ExitStack() as stack:
                # rich stores sys.stdout, which is another object in every test
                stack.callback(lambda: (sys.stdout.flush(), sys.stderr.flush()))
                code = program.main()
            out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call
