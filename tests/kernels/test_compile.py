"""Kernels of every operator compile for GPUs that are not present, within their resource limits.

This is a sample; `python -m megatron.kernels.compile` compiles all kernels. Head dimensions that are no powers of two
are split.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron.kernels import compile as compiler
from megatron.kernels.bias.aot_configs import list_configurations
from megatron.kernels.cdape_attention.aot_configs import list_configurations as cdape_configurations
from megatron.kernels.compile import (
    BUDGETED_TRITON,
    SHARED_LIMIT,
    KernelConfig,
    KernelResources,
    list_ops,
    main,
    measure_resources,
)
from megatron.kernels.head_dim import MAX_HEAD_DIM, split_head_dim

ROOT = Path(__file__).parents[2]


def test_every_kernel_folder_lists_configurations() -> None:
    sources = (ROOT / "megatron" / "kernels").glob("*/*.py")
    with_kernels = {path.parent.name for path in sources if "triton.jit" in path.read_text(encoding="utf-8")}
    assert with_kernels == set(list_ops())


def _list_configurations(op: str) -> list[KernelConfig]:
    return list(import_module(f"megatron.kernels.{op}.aot_configs").list_configurations())


@pytest.mark.parametrize("op", list_ops())
def test_every_configuration_names_each_argument_once(op: str) -> None:
    configurations = _list_configurations(op)
    assert len(configurations) > 4
    for config in configurations:
        assert sorted([*config.signature, *config.constexprs]) == sorted(config.kernel.arg_names), config.name


def test_a_sample_compiles_within_its_limits() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "megatron.kernels.compile", "--sample"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    arches = {(line.split("/")[0], line.split(":")[0][-5:]) for line in found}
    assert arches == set(product(list_ops(), ("sm_80", "sm_90")))
    configurations = [(op, config) for op in list_ops() for config in _list_configurations(op)]
    names = {f"{op}/{config.name}": (op, config.kernel.__name__) for op, config in configurations}
    assert {names[line.split(" sm_")[0]] for line in found} == set(names.values()), "each kernel of each op"


def test_the_scores_of_the_shipped_models_may_not_spill() -> None:
    """Score kernels of shipped models must not spill registers at any tensor parallelism, because a processor reads all
    heads.

    One of them is compiled here.
    """
    configurations = {config.name: config for config in cdape_configurations()}
    for path in sorted((ROOT / "configs/model").glob("*.yml")):
        model = yaml.safe_load(path.read_text(encoding="utf-8"))
        heads, dim = model["num_attention_heads"], model["hidden_size"] // model["num_attention_heads"]
        for name in ("scores", "attend_bwd"):
            config = configurations[f"{name} H={heads} d={dim} bf16"]
            assert (config.arches, config.spill_budget) == ((80, 90), 0)
        for name in ("mix_fwd", "mix_bwd", "mix_bwd_dw"):
            assert configurations[f"{name} H={heads} D=32 k=3 bf16"].spill_budget == 0
    script = (
        "from megatron.kernels.compile import measure_resources\n"
        "from megatron.kernels.cdape_attention.aot_configs import list_configurations\n"
        "(config,) = (x for x in list_configurations() if x.name == 'scores H=32 d=80 bf16')\n"
        "print(measure_resources(config, 80).stack)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


@pytest.mark.parametrize(
    ("version", "spilled", "budget"), [(BUDGETED_TRITON, 17, 16), ("3.9.0", 80, None), ("3.9.0", 81, 80)]
)
def test_another_triton_may_spill_a_little_more(
    version: str, spilled: int, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.triton, "__version__", version)
    config = replace(next(iter(list_configurations())), spill_budget=16)
    complaint = config.describe_exceeded_limit(KernelResources(0, 255, 0, spilled, 0), 80)
    assert (complaint is None) == (budget is None)
    assert complaint is None or complaint.endswith(f"; the budget is {budget}")


@pytest.mark.parametrize(
    ("used", "complaint"),
    [
        (KernelResources(SHARED_LIMIT[80], 255, 0, 0, 0), None),
        (
            KernelResources(SHARED_LIMIT[80] + 1, 32, 0, 0, 0),
            "needs 166913 bytes of shared memory; the chip has 166912",
        ),
        (
            KernelResources(0, 255, 8, 4, 8),
            "spills registers: 4 bytes written and 8 read per thread; the budget is 0",
        ),
        (
            KernelResources(0, 255, 0, 0, 0, uninitialized_reads=2),
            "is miscompiled: 2 instructions read uninitialized uniform registers",
        ),
    ],
)
def test_exceeded_limits_are_named_and_fail(
    used: KernelResources, complaint: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler.triton, "__version__", BUDGETED_TRITON)
    monkeypatch.setattr(compiler, "measure_resources", lambda *args, **options: used)
    monkeypatch.setattr(compiler, "is_interpreted", lambda: False)
    assert main(["bias", "--arch", "80", "--sample"]) == int(complaint is not None)
    output = capsys.readouterr().err
    assert ("limit exceeded" in output) == (complaint is not None)
    assert (complaint or "") in output


def test_miscompiled_launched_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, arch: int, text: str) -> SimpleNamespace:
        metadata = SimpleNamespace(name=name, target=SimpleNamespace(arch=arch))
        return SimpleNamespace(metadata=metadata, asm={"cubin": text.encode()})

    right, wrong = "        /*0000*/ UMOV UR4, 0x1 ;\n", "        /*0000*/ UMOV UR4, UR5 ;\n"
    programs = [program("a", 90, wrong), program("b", 90, right), program("c", 80, wrong), program("a", 90, wrong)]
    monkeypatch.setattr(compiler, "list_compiled_kernels", lambda: programs)
    monkeypatch.setattr(compiler, "disassemble", bytes.decode)
    assert compiler.list_miscompiled_kernels() == ["a"]


def test_an_interpreted_kernel_is_not_compiled() -> None:
    config = next(iter(list_configurations()))
    if os.environ.get("TRITON_INTERPRET") == "1":
        with pytest.raises(RuntimeError, match="_toeplitz_fwd_kernel is interpreted"):
            measure_resources(config, 80)
    else:
        signature = {name: kind for name, kind in config.signature.items() if name != "table_ptr"}
        with pytest.raises(ValueError, match="missing, unknown or duplicated: table_ptr"):
            measure_resources(replace(config, signature=signature), 80)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nosuch"], "nosuch is not an op; choose from bias, biased_attention, cdape_attention"),
        (["bias", "--json", "nowhere/new.json"], "its folder does not exist"),
    ],
)
def test_invalid_options_are_rejected_at_once(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dim", "split"), [(8, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32))]
)
def test_head_dimension_in_two_powers_of_two(dim: int, split: tuple[int, int]) -> None:
    assert split_head_dim(dim) == split


def test_every_head_dimension_fits_its_split() -> None:
    for dim in range(1, MAX_HEAD_DIM + 1):
        first, second = split_head_dim(dim)
        assert dim <= first + second < 2 * max(dim, 16)
