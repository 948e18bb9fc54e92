"""Farfield as a Python library: train, load a run and query its model from scripts and notebooks.

    import farfield

    run = farfield.train("125M", "kerple_log", "local_setup", save="runs/kerple")
    model = farfield.load("runs/kerple")
    model.score(text, length=2048).perplexity
    model.bias_table(512)  # [layers, heads, distances]
    model.attention_maps("for i in range(", layers=[0])[0].weights  # [heads, queries, keys]
    model.generate("def main(", temperature=0.8)

See docs/python.md for examples. User errors raise `UserError` and failures at run time raise `RunError`, each with a
one-line message. Importing this package takes a few milliseconds, because torch is imported with the first model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farfield.attention_maps import AttentionMaps
    from farfield.commands import analyze, evaluate, list_methods, prepare, read_results, sweep, train
    from farfield.models import Model, TokenLosses, load
    from megatron.utils.errors import FarfieldWarning, RunError, UserError

_MODULES = {
    "farfield.attention_maps": ("AttentionMaps",),
    "farfield.commands": ("analyze", "evaluate", "list_methods", "prepare", "read_results", "sweep", "train"),
    "farfield.models": ("Model", "TokenLosses", "load"),
    "megatron.utils.errors": ("FarfieldWarning", "RunError", "UserError"),
}
__all__ = [
    "AttentionMaps", "FarfieldWarning", "Model", "RunError", "TokenLosses", "UserError", "analyze", "evaluate",
    "list_methods", "load", "prepare", "read_results", "sweep", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import an attribute on first access (PEP 562).

    Raises ImportError if another project's `megatron` hides this one's.
    """
    for module, names in _MODULES.items():
        if name in names:
            from importlib import import_module

            from farfield.namespace import describe_foreign_megatron

            if (hidden := describe_foreign_megatron()) is not None:
                raise ImportError(hidden)
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'farfield' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__]
