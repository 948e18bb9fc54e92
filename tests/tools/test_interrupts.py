"""Ctrl-C in a tool prints one line and ends it with that signal, from its first import on."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

SLOW = {
    "bench/attention": "torch",
    "bench/train_step": "torch",
    "bench/train_loop": "torch",
    "docs/make_docs": "matplotlib",
}
"""Slow import of each tool."""


@pytest.mark.parametrize("tool", SLOW)
def test_ctrl_c_during_the_first_slow_import(tool: str, run_tool: Callable[..., Any]) -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {SLOW[tool]!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        f"sys.argv = [{tool!r}]\n"
        f"runpy.run_path('tools/{tool}.py', run_name='__main__')\n"
    )
    done = run_tool("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")
