"""How packages are imported: garbage collection waits, and goes on as before."""

import gc
import subprocess
import sys
from pathlib import Path

from megatron.utils.imports import pause_garbage_collection

ROOT = Path(__file__).resolve().parents[2]


def test_garbage_collection_goes_on_as_before() -> None:
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    with pause_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen > 0  # by conftest.py
    gc.disable()
    try:
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_became_garbage_meanwhile_is_found() -> None:
    code = (
        "import gc, weakref\n"
        "from megatron.utils.imports import pause_garbage_collection\n"
        "class Loop: pass\n"
        "with pause_garbage_collection():\n"
        "    loop = Loop(); loop.itself = loop; seen = weakref.ref(loop); del loop\n"
        "assert seen() is not None and gc.get_freeze_count() == 0\n"
        "gc.collect()\n"
        "assert seen() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
