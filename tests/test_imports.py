"""Allowed imports, as documented in docs/architecture.md, checked in the source files."""

import ast
import graphlib
import logging
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.utils.imports import trim_imports

ROOT = Path(__file__).parent.parent
STANDARD = set(sys.stdlib_module_names)
OURS = ("megatron.options", "megatron.utils")
NUMERIC = ("torch", "numpy")
DOORS = {f"megatron/{name}.py" for name in ("data/core_datasets", "distributed/process_groups", "model/core_modules")}

# Package → prefixes of modules it may import besides the standard library and itself
ALLOWED: dict[str, tuple[str, ...]] = {
    "megatron/options": ("pydantic", "pydantic_core", "megatron.utils.errors"),
    "megatron/utils": ("rich", "torch", "pydantic"),
    "megatron/position": ("torch",),
    "megatron/attention": ("torch", "megatron.position", "megatron.utils", "megatron.kernels"),
    "megatron/kernels": ("torch", "triton", "numpy"),
    "megatron/distributed": (*NUMERIC, "megatron.core", "safetensors", "megatron.utils"),
    "megatron/config": (
        "pydantic",
        "ruamel",
        "megatron.attention.backends.backend",
        "megatron.distributed.mesh",
        "megatron.position.catalog",
        "megatron.data.tasks",
        *OURS,
    ),
    "megatron/planning": (
        "megatron.config",
        "megatron.distributed.mesh",
        "megatron.distributed.hardware",
        "megatron.options",
        "megatron.attention.backends.backend",
        *OURS,
        "megatron.model.position_modules",
        "megatron.position.catalog",
        "megatron.position.facts",
        "rich",
    ),
    "megatron/conversion": (
        *NUMERIC,
        "safetensors",
        "huggingface_hub",
        "tokenizers",
        "pydantic",
        "sentencepiece",
        "transformers",  # only in bundled/, which nothing here imports
        "megatron.config",
        "megatron.data",
        "megatron.model",
        "megatron.position",
        "megatron.attention",
        "megatron.checkpoint",
        "megatron.reports",
        *OURS,
    ),
    "megatron/data": (
        *NUMERIC,
        "megatron.core",
        "tokenizers",
        "sentencepiece",
        "zstandard",
        "pyarrow",
        "datasets",
        "pydantic",
        "megatron.attention.documents",
        "megatron.distributed",
        *OURS,
    ),
    "megatron/model": (
        "torch",
        "megatron.core",
        "einops",
        "megatron.distributed",
        "megatron.position",
        "megatron.attention",
        *OURS,
    ),
    "megatron/checkpoint": (
        "torch",
        "safetensors",
        "deepspeed",
        "pydantic",
        "megatron.config",
        "megatron.model",
        "megatron.distributed",
        *OURS,
    ),
    "megatron/training": (
        "megatron.planning",
        *NUMERIC,
        "deepspeed",
        "rich",
        "trackio",
        "wandb",
        "megatron.config",
        "megatron.data",
        "megatron.model",
        "megatron.distributed",
        "megatron.checkpoint",
        "megatron.evaluation.harness",
        "megatron.evaluation.harness_names",
        "megatron.evaluation.harness_tasks",
        "lm_eval",
        *OURS,
    ),
    "megatron/reports": (
        "numpy",
        "scipy",
        "matplotlib",
        "jinja2",
        "markupsafe",
        "rich",
        "pydantic",
        "ruamel",
        "megatron.position.catalog",
        "megatron.utils",
    ),
    "megatron/evaluation": (
        *NUMERIC,
        "rich",
        "matplotlib",
        "pydantic",
        "megatron.reports",
        "megatron.config",
        "megatron.data",
        "megatron.model",
        "megatron.position",
        "megatron.attention",
        "megatron.checkpoint",
        "lm_eval",
        "datasets",
        "huggingface_hub",
        "readline",
        *OURS,
    ),
    "farfield": (
        "numpy",
        "torch",
        "megatron.attention",
        "megatron.checkpoint",
        "megatron.cli.app",
        "megatron.config",
        "megatron.data",
        "megatron.evaluation",
        "megatron.position",
        "megatron.reports",
        "megatron.sweeps",
        *OURS,
    ),
    "megatron/cli": ("typer", "rich", "pydantic", "megatron", *OURS),
    "megatron/launch": (
        "rich",
        "megatron.config",
        "megatron.distributed",
        "megatron.checkpoint",
        "megatron.training",
        "megatron.reports",
        *OURS,
    ),
    "megatron/rehearsal": (
        "torch",
        "numpy",
        "rich",
        "safetensors",
        "megatron.kernels.compile",
        "megatron.kernels.jit_build",
        "megatron.planning",
        "megatron.config",
        "megatron.data",
        "megatron.model",
        "megatron.distributed",
        "megatron.checkpoint",
        "megatron.training",
        "megatron.launch",
        *OURS,
    ),
    "megatron/sweeps": (
        "rich",
        "pydantic",
        "megatron.config",
        "megatron.data",
        "megatron.distributed",
        "megatron.checkpoint",
        "megatron.training",
        "megatron.evaluation",
        "megatron.reports",
        "megatron.launch",
        *OURS,
    ),
}
PARTS = list(ALLOWED)


def _files(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


@cache
def _import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements of a file at any level; cached because several tests read all files."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(path: Path) -> set[str]:
    """Return the absolute names of all modules that a file imports at any level."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            names.add(".".join(part for part in (base, node.module or "") if part))
    return names


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("part", PARTS)
def test_packages_import_only_allowed_packages(part: str) -> None:
    own = part.removesuffix(".py").replace("/", ".")
    for path in _files(part):
        allowed = (*ALLOWED[part], own)
        for name in _imports(path):
            fine = name.split(".")[0] in STANDARD or _within(name, allowed)
            assert fine, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("part", PARTS)
def test_every_allowed_package_is_imported(part: str) -> None:
    names = {name for path in _files(part) for name in _imports(path)}
    unused = [allowed for allowed in ALLOWED[part] if not any(_within(name, (allowed,)) for name in names)]
    assert unused == [], "remove them here and in docs/architecture.md"


def _modules() -> dict[str, Path]:
    """Return the project's modules by import name."""
    paths = [path for part in ("farfield", "megatron", "tools") for path in (ROOT / part).rglob("*.py")]
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in dotted.items()}


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the project's modules that a file imports at any level; `from package import module` counts as the
    module.
    """
    found = {name for name in _imports(path) if name in modules}
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in _import_statements(path):
        if isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*package[: len(package) - node.level + 1], node.module or "")) if node.level else node.module
            )
            found |= {f"{base}.{alias.name}".replace("..", ".") for alias in node.names} & set(modules)
    return found


def test_no_circle_of_imports() -> None:
    """There are no import cycles, even through imports inside functions.

    Files that need each other should be one or three.
    """
    modules = _modules()
    graph = {name: _imported(path, modules) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 300  # guards against an empty graph
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_every_part_has_a_rule() -> None:
    folders = {p.name for p in (ROOT / "megatron").iterdir() if any(p.rglob("*.py"))}  # others are left of old commits
    assert folders == {Path(part).name for part in PARTS if not part.endswith(".py")} - {"farfield"}


def test_megatron_core_is_imported_through_its_doors() -> None:
    """megatron-core is imported only through its wrapper modules, which avoid PyTorch's compiler.

    The first import decides for the whole process.
    """
    files = (ROOT / "megatron").rglob("*.py")
    users = {path for path in files if any(_within(name, ("megatron.core",)) for name in _imports(path))}
    assert {path.relative_to(ROOT).as_posix() for path in users} == DOORS


RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def _asks_who_it_is(path: Path) -> list[str]:
    """Return names with which a file queries torch.distributed, megatron-core's groups or the launcher's
    environment.
    """
    asked = {name for name in _imports(path) if _within(name, ("torch.distributed", "megatron.core.parallel_state"))}
    asked -= {name for name in asked if _within(name, ("torch.distributed.pipelining",))}  # its group is an argument
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "megatron.core"):
            asked |= {alias.name for alias in node.names} & {"distributed", "parallel_state", "mpu"}
        elif isinstance(node, ast.Attribute) and node.attr in ("distributed", "parallel_state"):
            asked.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value in RANK_VARIABLES:
            asked.add(node.value)
    return sorted(asked)


def test_only_one_package_queries_the_rank() -> None:
    """Only one package determines the rank of this process; others receive `ProcessGroups` or a `Mesh`."""
    files = [*(ROOT / "megatron").rglob("*.py"), ROOT / "deepy.py"]
    asking = {path for path in files if _asks_who_it_is(path)}
    # The null device replaces the code that answers.
    folders = {path.relative_to(ROOT).parent.as_posix() for path in asking}
    assert folders == {"megatron/distributed", "megatron/rehearsal/null_device"}
    assert ROOT / "megatron/distributed/process_groups.py" in asking
    assert _asks_who_it_is(Path(__file__).with_name("support") / "tensor_parallel_rank.py") == ["torch.distributed"]


@pytest.mark.slow
def test_no_command_trains_otherwise_than_a_run() -> None:
    """Only a rehearsal's process, which requires the null device, builds hooks of training and saving."""
    names = ("TrainingHooks", "SaveHooks")
    builders = set()
    for path in [*(ROOT / "megatron").rglob("*.py"), ROOT / "deepy.py"]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        changed = [node.func for node in calls if node.args or node.keywords]  # without hooks, behavior is unchanged
        if any(isinstance(function, ast.Name) and function.id in names for function in changed):
            builders.add(path.relative_to(ROOT).as_posix())
    assert builders == {"megatron/rehearsal/rank_process.py"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron.rehearsal.rank_process", "job"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: a rehearsed rank needs the null device: ")


def test_the_mesh_is_arithmetic_alone() -> None:
    """The mesh is pure arithmetic, so that a layout can be rejected before torch is imported."""
    code = "import sys; from megatron.distributed import hardware, launcher_environment, mesh; "
    assert subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], cwd=ROOT).returncode == 0


def test_functions_stay_as_they_are_without_the_compiler() -> None:
    usual = torch.compile
    with trim_imports():
        assert torch.compile(abs) is abs
        assert torch.compile(mode="reduce-overhead")(abs) is abs
    assert torch.compile is usual


@pytest.mark.slow
def test_processes_import_only_what_their_run_needs(tmp_path: Path) -> None:
    """No process imports optional packages that its run does not use.

    wandb would create temporary folders that a killed process leaves behind. Neither training nor kernels import the
    null device, and without its variable its `sitecustomize` does nothing.
    """
    code = (
        "import sys, megatron.training.train; names = ('wandb', 'deepspeed')\n"  # DeepSpeed prints on import
        "print([m for m in sys.modules if 'rehearsal' in m or m in names])"
    )
    path = f"{ROOT / 'megatron/rehearsal/null_device/site'}:{ROOT}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}
    environment.pop("FARFIELD_NULL_DEVICE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_torch_prints_no_warning_about_an_unused_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """Import of torch gives no warning about an unused compiler.

    If a CUDA build of torch finds a toolkit but no GPU, its cpp_extension warns when it is imported.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")
    with trim_imports():
        logger.warning("No CUDA runtime is found")
    logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_packages_import_nothing_by_themselves() -> None:
    for path in (ROOT / "megatron").rglob("__init__.py"):
        assert not _imports(path), f"{path.relative_to(ROOT)} should hold a docstring only"


def test_checking_a_configuration_and_planning_do_not_import_torch() -> None:
    code = "import sys, megatron.config.load, megatron.planning.print_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_position_works_with_torch_alone() -> None:
    """megatron/position depends only on torch, because it is shipped with exported models."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from megatron.attention import reference\n"
        "from megatron.position import registry\n"
        "[registry.load_encoding_class(n) for n in registry.list_encodings()]\n"
        "[registry.load_processor_class(n) for n in registry.list_processors()]\n"
        "[registry.load_temperature_class(n) for n in registry.list_temperatures()]\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "sys.exit(', '.join(sorted(new - {'megatron'} - set(sys.stdlib_module_names) - {'torch', 'numpy'})) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
