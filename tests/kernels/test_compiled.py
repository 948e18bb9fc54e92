"""The kernels of every op compile for GPUs that are not here and use what `resources.json` records.

Made by `python -m kernels.compile --json tests/kernels/resources.json`.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.bias.compiled import configurations
from kernels.compile import SHARED_LIMIT, all_ops, main, resources

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "kernels" / "resources.json"
SAMPLE = 31
"""Odd, so that both architectures are among every n-th of an op's configurations."""


def recorded(op: str) -> dict[str, dict[str, int]]:
    """The op's rows of the record."""
    return {name: used for name, used in json.loads(RECORD.read_text()).items() if name.startswith(f"{op}/")}


def test_every_folder_with_kernels_says_what_to_compile_and_is_recorded() -> None:
    sources = (ROOT / "kernels").glob("*/*.py")
    with_kernels = {path.parent.name for path in sources if "triton.jit" in path.read_text(encoding="utf-8")}
    assert with_kernels == set(all_ops())
    assert with_kernels == {name.split("/")[0] for name in json.loads(RECORD.read_text())}


@pytest.mark.parametrize("op", all_ops())
def test_every_configuration_is_recorded_and_fits_the_chip(op: str) -> None:
    module = importlib.import_module(f"kernels.{op}.compiled")
    names = {f"{op}/{one.name} sm_{arch}" for one in module.configurations() for arch in one.arches}
    assert recorded(op).keys() == names
    for name, used in recorded(op).items():
        assert used["shared"] <= SHARED_LIMIT[int(name[-2:])], name


@pytest.mark.parametrize("op", all_ops())
def test_a_sample_still_uses_what_is_recorded(op: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile", op, "--sample", str(SAMPLE), "--check", str(RECORD)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") == -(-len(recorded(op)) // SAMPLE)


def test_an_interpreted_kernel_is_not_compiled() -> None:
    one = next(iter(configurations()))
    if os.environ.get("TRITON_INTERPRET") == "1":
        with pytest.raises(RuntimeError, match="spread_kernel is interpreted"):
            resources(one.kernel, one.signature, one.constexprs, arch=80)
    else:
        with pytest.raises(ValueError, match="named in neither or wrongly: TABLE"):
            resources(one.kernel, {k: v for k, v in one.signature.items() if k != "TABLE"}, one.constexprs, arch=80)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nosuch"], "nosuch is no op; choose from bias, biased_attention, cdape_attention"),
        (["--sample", "0"], "--sample is 0; it must be at least 1"),
        (["bias", "--arch", "80", "--json", "new.json"], "--json records whole ops"),
        (["bias", "--json", "nowhere/new.json"], "its folder does not exist"),
        (["bias", "--check", "nowhere.json"], "no such file"),
    ],
)
def test_what_cannot_be_compiled_or_recorded_is_refused_at_once(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
