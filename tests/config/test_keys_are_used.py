"""No key is accepted and ignored: each is read by some code outside the configuration's own machinery."""

import ast
from pathlib import Path

from megatron.config.schema import keys

MEGATRON = Path(__file__).resolve().parents[2] / "megatron"
# They hold or print keys; they do nothing with them.
MACHINERY = {
    MEGATRON / "config" / name for name in ("schema.py", "settings.py", "neox.py", "reference.py", "problems.py")
}
# Handed to DeepSpeed as a whole.
WHOLE = {"zero_optimization", "fp16"}


def attributes_read() -> set[str]:
    """Every `.name` in the sources; options.py files declare keys and do not count."""
    found = set()
    for path in MEGATRON.rglob("*.py"):
        if path.name != "options.py" and path not in MACHINERY:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


def test_every_key_is_read_somewhere():
    used = attributes_read()
    silent = {"bf16", "enabled"}  # said by `precision` once a configuration is loaded
    unused = [
        key.name
        for key in keys().values()
        if key.path[-1] not in used | silent
        and not (len(key.path) > 1 and key.path[0] in WHOLE)
        and len(key.choices) != 1  # `data_impl`: one value only, so there is nothing to read
        and key.name not in ("pipe_parallel_size", "optimizer.type")  # all their values mean the same
    ]
    assert unused == []
    assert used >= WHOLE
