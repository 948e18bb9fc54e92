"""Imports of packages: garbage collection pauses, and resumes as before."""

import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_runs import tiny_config, write_corpora

from megatron.distributed.hardware import LocalHardware
from megatron.launch import worker
from megatron.launch.local_launcher import train_on_this_machine
from megatron.training.resolve_run import resolve_run
from megatron.utils.imports import MAX_FROZEN_BY_PYTHON, pause_garbage_collection

ROOT = Path(__file__).resolve().parents[2]


def test_garbage_collection_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects frozen before stay frozen, and no others.

    The count may only decrease, because frozen objects are also freed with their last reference, possibly in another
    thread.
    """
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    with pause_garbage_collection():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "imported_meanwhile", ModuleType("imported_meanwhile"))
    assert gc.isenabled()
    assert MAX_FROZEN_BY_PYTHON < gc.get_freeze_count() <= frozen  # from conftest.py
    gc.disable()
    try:
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_new_garbage_is_collected() -> None:
    code = (
        "import gc, weakref\n"
        "from megatron.utils.imports import pause_garbage_collection\n"
        "class Loop: pass\n"
        "with pause_garbage_collection():\n"
        "    loop = Loop(); loop.itself = loop; seen = weakref.ref(loop); del loop\n"
        "assert seen() is not None\n"
        "gc.collect()\n"
        "assert seen() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_objects_of_a_training_are_collected_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process freezes its imported modules, but not what it has trained."""
    frozen: list[None] = []
    corpus = write_corpora(tmp_path / "data")
    worker._freeze_imports.cache_clear()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    for name in ("first", "second"):
        config = tiny_config(corpus, tmp_path / name, train_iters=1)
        assert train_on_this_machine(resolve_run(config, LocalHardware(0, 1))) == 0
        assert len(frozen) == 1


@pytest.mark.parametrize(("binding", "left"), [("nanobind", "False"), ("pybind11_builtins", "True")])
def test_a_process_ends_without_frozen_objects_of_nanobind(binding: str, left: str) -> None:
    """nanobind prints objects that are never collected, among them Triton 3.9's."""
    code = (
        "import atexit, gc, sys, types; from megatron.launch import worker\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1_000))\n"
        f"metaclass = type('Meta', (type,), {{'__module__': {binding!r}}})\n"
        "library = types.SimpleNamespace(ir=types.SimpleNamespace(builder=metaclass('Builder', (), {})))\n"
        "sys.modules['triton._C.libtriton'] = library\n"
        "worker._freeze_imports()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == f"{left}\n"
