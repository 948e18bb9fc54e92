"""A new encoding is one file: its declarations are read without import, and its mistakes give one-line errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.position import catalog, registry
from megatron.position.catalog import METHODS_VARIABLE, MethodFileError
from megatron.position.encoding import Encoding
from megatron.position.facts import OVERRIDABLE, AttentionDims, EncodingCost, ProcessorCost

DIMS = AttentionDims(num_heads=2, head_dim=8, hidden_size=16, train_length=8, max_length=8)
HEAD = """
import torch
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost

class Mine(Encoding):
    formula = source = advice = "mine"
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Function that adds a file with an encoding `mine` in a user's folder."""
    (tmp_path / "encodings").mkdir()
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path))

    def write(body: str, head: str = HEAD) -> None:
        (tmp_path / "encodings" / "mine.py").write_text(head + body)

    return write


def test_declarations_match_the_class() -> None:
    for name in catalog.list_encodings():
        facts, encoding = catalog.read_encoding_facts(name), registry.load_encoding_class(name)
        assert facts.defaults == {option: p.default for option, p in encoding.options().items()}, name
        assert facts.hooks == {hook for hook in catalog.HOOKS if encoding.overrides_hook(hook)}, name
        for fact in ("adds_bias", "multiplies_scores", "takes_positions", "has_position_table", "other_names"):
            assert getattr(facts, fact) == getattr(encoding, fact), name
        assert isinstance(facts.cost, EncodingCost), name
    for name in catalog.list_processors():
        facts, processor = catalog.read_processor_facts(name), registry.load_processor_class(name)
        assert facts.defaults == {option: p.default for option, p in processor.options().items()}, name
        assert isinstance(facts.cost, ProcessorCost), name


def test_a_module_keeps_the_options_that_it_was_built_with() -> None:
    assert registry.build_encoding("cope", DIMS, {"positions": 9}).option_values == {"positions": 9, "scaled": False}
    assert registry.build_encoding("alibi", DIMS).option_values == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    adds_bias = True\n    def tabel(self, n):\n        return n", r"Mine\.tabel is not a .* mean table\?"),
        ("    def roatate(self, x, tokens):\n        return x", r"Mine\.roatate is not a .* mean rotate\?"),
        ("    pass", r"Mine implements none of the hooks embed, rotate, table, dense, contextual"),
        ("    adds_bias = True\n    def table(self, n):\n        return n", r"Mine\.table must return ScoreTerms"),
        (
            "    adds_bias = True\n    def table(self, n):\n        return ScoreTerms(bias=-n)",
            r"Mine\.table returns the shape \[3\] for 2 queries, 3 keys and 2 heads; it must be \[2, 3\]",
        ),
        (
            "    adds_bias = True\n    def table(self, n):\n        return ScoreTerms(bias=-n.new_ones(2, 1))",
            r"Mine\.table returns the shape \[2, 1\] for 2 queries, 3 keys and 2 heads; it must be \[2, 3\]",
        ),
        (
            "    adds_bias = True\n    def dense(self, query, key, q, heads):\n"
            "        return ScoreTerms(bias=q.new_zeros(2, key.length, query.length))",
            r"Mine\.dense returns the shape \[2, 3, 2\] for 2 queries, 3 keys and 2 heads; it must be \[2, 2, 3\]",
        ),
        (
            "    def table(self, n):\n        return ScoreTerms(bias=-n.expand(2, -1))",
            r"Mine\.table returns a bias, but Mine\.adds_bias is False",
        ),
        (
            "    adds_bias = True\n    def table(self, n):\n        return ScoreTerms(weight=n.expand(2, -1))",
            r"Mine\.table returns no bias, but Mine\.adds_bias is True",
        ),
        ("    adds_bias = True\n    def table(self, n):\n        return 1 / {}", r"Mine\.table raised TypeError: "),
        (
            "    def rotate(self, x, tokens):\n        pass",
            r"Mine\.rotate must return a tensor of the shape .*, not None",
        ),
        ("    def embed(self, tokens, like):\n        return like[..., :3]", r"Mine\.embed returns the shape"),
        (
            "    has_position_table = True\n    def embed(self, tokens, like):\n        return like",
            "Mine: its max_length is None, but has_position_table is True",
        ),
        (
            "    def contextual(self, q, k, scores, query, key, heads):\n        return 1",
            r"Mine\.contextual must return",
        ),
    ],
)
def test_a_mistake_in_a_hook_is_one_line(add, body: str, message: str) -> None:
    add(body)
    with pytest.raises(MethodFileError, match=r"mine\.py: " + message) as raised:
        registry.build_encoding("mine", DIMS)
    assert "\n" not in str(raised.value)


def test_hooks_are_checked_on_every_device(add) -> None:
    """Hooks work on every device; the meta device, which checks options, detects no index out of range."""
    add("    adds_bias = True\n    def table(self, n):\n        return ScoreTerms(n.expand(2, -1)[:, n.long() + 4])")
    with torch.device("meta"):
        registry.build_encoding("mine", DIMS)
    with pytest.raises(MethodFileError, match=r"mine\.py: Mine\.table raised IndexError: "):
        registry.build_encoding("mine", DIMS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    adds_bias = True\n    def tabel(self, n):\n        return n",
            r"mine\.py: Mine\.tabel .* did you mean table\?",
        ),
        ("    def bias_tail(self):\n        return []", r"mine\.py: Mine\.bias_tail .* did you mean bias_tails\?"),
        ("    pass", r"mine\.py: Mine implements none of the hooks embed, rotate, table, dense, contextual"),
        (
            "    def __init__(self, dims, *, base: int = 10**4):\n        pass",
            r"mine\.py:8: Mine: the default of base must be a literal: a number",
        ),
    ],
)
def test_a_mistake_is_found_without_importing_the_file(add, body: str, message: str) -> None:
    """Mistakes are found without importing the file, so that planning rejects it too."""
    add(body)
    with pytest.raises(MethodFileError, match=message) as raised:
        catalog.read_encoding_facts("mine")
    assert "\n" not in str(raised.value)
    assert catalog.read_encoding_facts("alibi").hooks == {"table"}


@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        ("pass", "encodings/mine.py:11: AttributeError: cannot assign module before Module.__init__() call"),
        ("super().__init__(dim)", "encodings/mine.py:10: NameError: name 'dim' is not defined"),
    ],
)
def test_a_mistake_in_a_constructor_is_one_line(add, constructor: str, message: str) -> None:
    add(
        f"""
    def __init__(self, dims):
        {constructor}
        self.layer = torch.nn.Linear(2, 2)

    def rotate(self, x, positions):
        return x
"""
    )
    with pytest.raises(MethodFileError) as caught:
        registry.build_encoding("mine", DIMS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overridable_methods_match_the_base_class() -> None:
    public = {name for name, value in vars(Encoding).items() if callable(value) or isinstance(value, classmethod)}
    asked_of_the_class = {"overrides_hook", "only_adds_embeddings", "takes_any_positions"}
    assert {name for name in public if not name.startswith("_")} - asked_of_the_class == set(OVERRIDABLE) - {
        "kernel_parameters"  # of PositionModule
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine(Encoding)\n    pass", r"mine\.py:1: expected ':'"),
        ("import torch\n1 / 0\n", r"mine\.py:2: ZeroDivisionError: division by zero"),
        ("import torch\n", r"mine\.py must define one Encoding, but defines 0"),
        ("\0", r"mine\.py: .*null bytes"),
    ],
)
def test_a_broken_file_disables_no_other(add, text: str, message: str) -> None:
    add(text, head="")
    with pytest.raises(MethodFileError, match=message):
        registry.load_encoding_class("mine")
    records, errors = registry.describe_methods(registry.list_encodings())
    assert len(records) == len(registry.list_encodings()) - 1
    assert len(errors) == 1
    assert registry.build_encoding("alibi", DIMS) is not None


def test_declarations_consist_of_builtin_types(add) -> None:
    add(
        "    cost = EncodingCost(num_saved_tables=torch.tensor(1))\n    def table(self, n):\n        return "
        "ScoreTerms()"
    )
    with pytest.raises(MethodFileError, match=r"mine\.py:8: Mine\.cost may only use Python's builtins"):
        catalog.read_encoding_facts("mine")


def test_the_catalog_needs_no_torch() -> None:
    code = "import sys; from megatron.position.catalog import *; [read_encoding_facts(n) for n in list_encodings()]; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=catalog.FOLDER.parent.parent).returncode == 0


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "raise SystemExit(3)"])
def test_a_file_that_exits_is_an_error_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path))
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "leaving.py").write_text(f"import sys\n\n{code}\n")
    with pytest.raises(MethodFileError, match=r"leaving.py:3: SystemExit"):
        registry.load_encoding_class("leaving")


PROCESSOR_HEAD = """
from megatron.position.processor import Processor

class Mine(Processor):
    formula = source = advice = "mine"
"""
LOGITS = """
    def forward(self, scores, bias, visible, heads=slice(None), bias_contribution=None, first_columns=None):
        return scores[:, heads]
"""
NO_FLOPS = "    def flops_per_score(self):\n        return 0.0\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (NO_FLOPS, r"Mine\.forward is not implemented"),
        (LOGITS, r"Mine\.flops_per_score is not implemented"),
        (LOGITS + NO_FLOPS.replace("0.0", "None"), r"Mine\.flops_per_score returns None; it must be a number"),
        (
            LOGITS.replace("heads]", "heads, 0]") + NO_FLOPS,
            r"Mine\.forward returns the shape \[1, 2, 3\] for 2 queries",
        ),
        (LOGITS.replace("scores[", "scoers[") + NO_FLOPS, r"Mine\.forward raised NameError: name 'scoers'"),
        (
            LOGITS.replace("[:, heads]", "") + NO_FLOPS,
            r"Mine\.forward returns .* for heads=slice\(\d\); it must be \[1, ",
        ),
        (
            LOGITS.replace(", bias_contribution=None, first_columns=None", "") + NO_FLOPS,
            r"Mine\.forward raised TypeError: .* positional arguments but 6 were given",
        ),
        (
            LOGITS
            + NO_FLOPS
            + "    def process_weight(self, weights, visible, heads=slice(None)):\n        return 0\n",
            r"Mine\.process_weight is not a function of a processor; did you mean process_weights\?",
        ),
        (
            LOGITS + NO_FLOPS + "    def row_terms(self, scores, bias, visible, query, key):\n        return scores\n",
            r"Mine\.row_terms returns the shape \[1, 2, 2, 3\]",
        ),
        (
            LOGITS + NO_FLOPS + "    def row_terms(self, scores, bias, visible, query, key):\n"
            "        return scores[:, 0]\n",
            r"Mine\.apply_row_sums is not implemented",
        ),
    ],
)
def test_a_mistake_in_a_processor_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path))
    (tmp_path / "processors").mkdir()
    (tmp_path / "processors" / "mine.py").write_text(PROCESSOR_HEAD + body)
    with pytest.raises(MethodFileError, match=r"mine\.py: " + message) as raised:
        registry.build_processor("mine", DIMS, has_bias=True)
    assert "\n" not in str(raised.value)


def test_a_temperature_without_factors_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path))
    (tmp_path / "temperatures").mkdir()
    (tmp_path / "temperatures" / "mine.py").write_text(
        PROCESSOR_HEAD.replace("processor", "temperature").replace("Processor", "Temperature")
    )
    with pytest.raises(MethodFileError, match=r"mine\.py: Mine\.forward is not implemented$"):
        registry.build_temperature("mine", DIMS)


def test_wrong_flops_of_an_encoding_are_one_line(add) -> None:
    add("    def embed(self, tokens, like):\n        pass\n    def product_flops(self, scores):\n        return None")
    with pytest.raises(MethodFileError, match=r"mine\.py: Mine\.product_flops returns None; it must be a number"):
        registry.build_encoding("mine", DIMS)


def test_a_method_without_a_description_is_one_line(add) -> None:
    add("    advice = None\n    def embed(self, tokens, like):\n        pass\n")
    _, errors = registry.describe_methods(["alibi", "mine"])
    assert [error.partition("mine.py: ")[2] for error in errors] == [
        "Mine.advice is missing; it describes the method in a string"
    ]
