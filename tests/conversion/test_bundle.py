"""Code bundled with an export: flat, complete, and dependent only on torch and transformers."""

import ast
import re
from itertools import product
from pathlib import Path

import pytest

import megatron.position
from megatron.conversion import modeling_code
from megatron.conversion.modeling_code import BUNDLED_FOLDER, MODELING_FILE, bundle_modeling_code, flatten_imports
from megatron.position.catalog import METHODS_VARIABLE
from megatron.position.registry import list_encodings, list_processors, list_temperatures
from megatron.utils.errors import UserError

POSITION = Path(next(iter(megatron.position.__path__)))
ATTENTION = POSITION.with_name("attention")
PAIRS = [*product(list_encodings(), ["none", "cdape"]), *product(["rotary", "fire"], list_processors())]
TRANSFORMERS_IMPORT = re.compile(r"^\s*from\s+\.(\S+)\s+import", re.MULTILINE)
"""Pattern by which transformers finds the files of a model (`dynamic_module_utils.py`)."""


@pytest.mark.parametrize(("encoding", "processor"), PAIRS)
def test_a_bundle_is_flat_and_whole(encoding: str, processor: str) -> None:
    check_bundle(bundle_modeling_code([encoding], [processor]))


def check_bundle(files: dict[str, str]) -> None:
    names = {name.removesuffix(".py") for name in files}
    for name, text in files.items():
        found = set(TRANSFORMERS_IMPORT.findall(text))
        assert found <= names, f"{name} names files that are not there (a line of a docstring counts)"
        modules = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in modules:
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module in found, f"{name}: {node.module} is not seen by transformers"
            else:
                roots = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                outside = {str(root).split(".")[0] for root in roots} - {"torch", "transformers"}
                assert not outside & {"megatron", "kernels", "einops", "numpy"}, f"{name} imports {outside}"
    assert set(TRANSFORMERS_IMPORT.findall(files[MODELING_FILE.name])) == names - {MODELING_FILE.stem}


@pytest.mark.parametrize("temperature", list_temperatures())
def test_a_bundle_has_its_temperature(temperature: str) -> None:
    files = bundle_modeling_code(["rotary"], ["dape"], [temperature, "none"])
    check_bundle(files)
    assert f'TEMPERATURES = {{"{temperature}": ' in files["registry.py"]


def test_only_imports_differ_from_the_project() -> None:
    files = bundle_modeling_code(["kerple_log", "none"], ["none", "cdape"])
    for name in ("cdape.py", "reference.py", "inputs.py", "kerple_log.py"):
        original = next(path for folder in (POSITION, ATTENTION) for path in folder.rglob(name)).read_text(
            encoding="utf-8"
        )
        assert files[name] == flatten_imports(original)
        changed = [
            line for line, other in zip(files[name].split("\n"), original.split("\n"), strict=True) if line != other
        ]
        assert all(line.startswith("from .") for line in changed)


def test_unused_methods_are_not_bundled() -> None:
    assert {"cdape.py", "alibi.py", "ssmax.py"}.isdisjoint(bundle_modeling_code(["rotary"], ["none"]))
    assert "numerics.py" in bundle_modeling_code(["rotary"], ["none"])  # the scores' own module


@pytest.fixture
def user_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for kind in ("encodings", "processors"):
        (tmp_path / kind).mkdir()
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path))
    return tmp_path


OWN = """\
from megatron.position.encodings.kerple_log import KerpleLog


class Mine(KerpleLog):
    pass
"""


def test_user_methods_are_bundled(user_methods: Path) -> None:
    (user_methods / "encodings" / "mine.py").write_text(OWN)
    (user_methods / "processors" / "own_dape.py").write_text(
        "import math\nfrom megatron.position.processors.dape import Dape\n\n\nclass Own(Dape):\n    pass\n"
    )
    files = bundle_modeling_code(["mine", "rotary"], ["own_dape", "none"])
    check_bundle(files)
    assert files["mine.py"] == flatten_imports(OWN)
    assert 'ENCODINGS = {"mine": Mine, "rotary": Rotary}' in files["registry.py"]
    assert 'PROCESSORS = {"own_dape": Own}' in files["registry.py"]


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("mine", "import megatron.position.facts", "mine.py:1: import megatron.position.facts: an export can include"),
        ("mine", "from megatron.position import registry", "mine.py:1: from megatron.position import registry: an"),
        ("mine", "from megatron.utils.errors import UserError", "mine.py:1: from megatron.utils.errors import"),
        ("mine", "if True:\n    from megatron.position.facts import HOOKS", "mine.py:2: from megatron.position.facts"),
        (
            "mine",
            "from  megatron.position.facts import HOOKS",
            "mine.py:1: from megatron.position.facts",
        ),
        ("facts", "", r"facts.py: an export has all files in one folder, but megatron.position.facts.py has the same"),
    ],
)
def test_methods_that_cannot_be_exported_are_rejected(user_methods: Path, name: str, head: str, message: str) -> None:
    (user_methods / "encodings" / f"{name}.py").write_text(f"{head}\n{OWN}")
    with pytest.raises(UserError, match=message):
        bundle_modeling_code([name], ["none"])


def test_method_folders_may_be_in_the_project(user_methods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_code, "PACKAGES_FOLDER", user_methods.parent)
    (user_methods / "encodings" / "mine.py").write_text(f"import megatron.position.facts\n{OWN}")
    with pytest.raises(UserError, match=r"mine.py:1: import megatron.position.facts: an export"):
        bundle_modeling_code(["mine"], ["none"])


def test_names_of_files_are_unique() -> None:
    files = [path for path in (*POSITION.rglob("*.py"), *ATTENTION.glob("*.py")) if path.name != "__init__.py"]
    files += [path for path in BUNDLED_FOLDER.glob("*.py") if path.name != "__init__.py"]
    assert len({path.name for path in files}) == len(files)
