"""Names and option names of position encodings and score processors, found without importing torch.

The registry of `megatron.position` imports the methods and so needs torch; the command line must not. A method is a
file, so its name is the file's; its options are the keyword arguments of its constructor, so they can be read off the
syntax tree.
"""

import ast
import re
from functools import cache
from pathlib import Path

from megatron.errors import UserError
from megatron.suggest import did_you_mean

POSITION = Path(__file__).resolve().parent.parent / "position"
NOT_OPTIONS = ("self", "dims", "has_bias")
SCORE_HOOKS = {"table", "dense", "contextual"}
"""Of an encoding's hooks (`megatron/position/encoding.py`), those whose answers change the scores of attention."""

CALLED: dict[str, tuple[str, ...]] = {
    "none": ("nope", "no_positional_encoding"),
    "rotary": ("rope", "roformer", "rotary_embedding", "rotary_embeddings"),
    "learned": ("ape", "absolute", "learned_absolute", "wpe"),
    "sinusoidal": ("sine", "sincos", "sinusoid"),
    "t5": ("t5_rpe", "t5_bias", "t5_relative_bias", "relative_bias"),
    "alibi": ("linear_bias", "linear_biases"),
    "kerple_log": ("kerple_logarithmic",),
    "kerple_power": ("kerple_pow",),
    "transformer_xl": ("txl", "trxl", "xl"),
    "fire": ("functional_interpolation",),
    "cope": ("contextual_position_encoding",),
    "dape": ("cape", "dapev1"),
    "cdape": ("dapev2", "capev2"),
}
"""Other names that papers and people give our methods, in any case and with or without dashes. They are refused with
our name; those that GPT-NeoX, KERPLE and DAPE write in configurations are understood, see `neox.POSITIONS`."""


def encodings() -> list[str]:
    """Valid values of `pos_emb`."""
    return _names("encodings")


def processors() -> list[str]:
    """Valid values of `score_processor`; `none` is always among them."""
    return ["none", *_names("processors")]


def meant(text: str) -> tuple[str, str] | None:
    """Key and name of the method that somebody calls `text`: ("pos_emb", "rotary") for RoPE; None if there is none."""
    wanted = _plain(text)
    for key, methods in (("pos_emb", encodings()), ("score_processor", _names("processors"))):
        for method in methods:
            if wanted in map(_plain, (method, *CALLED.get(method, ()))):
                return key, method
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def encoding_options(name: str) -> tuple[str, ...] | None:
    """Names of `pos_emb_options` for an encoding; None if only the code itself can tell."""
    return _options("encodings", name)


def processor_options(name: str) -> tuple[str, ...] | None:
    """Names of `score_processor_options` for a processor; None if only the code itself can tell."""
    return () if name == "none" else _options("processors", name)


def adds_to_scores(encoding: str) -> bool:
    """May an encoding add to the scores of attention, or multiply them? Not if it answers none of those hooks."""
    if encoding not in encodings():
        return True
    classes = _classes("encodings", encoding)
    functions = {node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
    return bool(functions & SCORE_HOOKS) or _bases(classes) != {"Encoding"}


def _bases(classes: list[ast.ClassDef]) -> set[str]:
    """The names that classes inherit from, without those of other packages (`nn.Module`)."""
    return {base.id for cls in classes for base in cls.bases if isinstance(base, ast.Name)}


@cache
def _classes(folder: str, name: str) -> list[ast.ClassDef]:
    tree = ast.parse((POSITION / folder / f"{name}.py").read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (POSITION / folder).glob("*.py") if path.stem != "__init__")


@cache
def _options(folder: str, name: str) -> tuple[str, ...] | None:
    classes = _classes(folder, name)
    for function in (node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)):
        arguments = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        # A file may define helper modules too; the method's constructor is the one that takes the dims.
        if function.name == "__init__" and "dims" in arguments and not function.args.kwarg:
            return tuple(argument for argument in arguments if argument not in NOT_OPTIONS)
    return () if _bases(classes) == {"Encoding"} else None


def find_methods(text: str) -> list[str]:
    """Encodings and processors one of whose names contains a text, in any case: `rope` finds rotary.

    Raises:
        UserError: there is none, with the nearest.
    """
    wanted = text.replace("-", "_").lower()
    known = {method: (method, *CALLED.get(method, ())) for method in (*encodings(), *processors())}
    found = [method for method, called in known.items() if any(wanted in name for name in called)]
    if not found:
        near = did_you_mean(wanted, [name for called in known.values() for name in called], most=3)
        raise UserError(f"no method's name contains {text!r}; {near}".removesuffix("; "))
    return found
