"""The kernels of bias and biased_attention compile for GPUs that are not here and use what `resources.json` records.

Made by `python -m kernels.compile bias biased_attention --json tests/kernels/resources.json`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.bias import compiled as bias
from kernels.biased_attention import compiled as biased_attention
from kernels.compile import SHARED_LIMIT, resources

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "tests" / "kernels" / "resources.json"
OPS = {"bias": bias, "biased_attention": biased_attention}


def test_every_configuration_is_recorded_and_fits_the_chip() -> None:
    recorded = json.loads(RECORD.read_text())
    names = {
        f"{op}/{one.name} sm_{arch}"
        for op, module in OPS.items()
        for one in module.configurations()
        for arch in one.arches
    }
    assert recorded.keys() == names
    for name, used in recorded.items():
        assert used["shared"] <= SHARED_LIMIT[int(name[-2:])], name


def test_a_sample_still_uses_what_is_recorded() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile", *OPS, "--sample", "29", "--check", str(RECORD)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") >= 4


def test_an_interpreted_kernel_is_not_compiled() -> None:
    one = next(iter(bias.configurations()))
    if os.environ.get("TRITON_INTERPRET") == "1":
        with pytest.raises(RuntimeError, match="spread_kernel is interpreted"):
            resources(one.kernel, one.signature, one.constexprs, arch=80)
    else:
        with pytest.raises(ValueError, match="named in neither or wrongly: TABLE"):
            resources(one.kernel, {k: v for k, v in one.signature.items() if k != "TABLE"}, one.constexprs, arch=80)
