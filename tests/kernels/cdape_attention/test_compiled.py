"""The kernels compile for GPUs that are not here and use what `resources.json` records.

Made by `python -m kernels.compile cdape_attention --json tests/kernels/cdape_attention/resources.json`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels.cdape_attention.compiled import configurations
from kernels.compile import SHARED_LIMIT

RECORD = Path(__file__).with_name("resources.json")
ROOT = Path(__file__).parents[3]


def test_every_shipped_configuration_is_recorded_and_fits_the_chip() -> None:
    recorded = json.loads(RECORD.read_text())
    names = {f"cdape_attention/{one.name} sm_{arch}" for one in configurations() for arch in one.arches}
    assert recorded.keys() == names
    for name, used in recorded.items():
        assert used["shared"] <= SHARED_LIMIT[int(name[-2:])], name


def test_a_sample_still_uses_what_is_recorded() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile", "cdape_attention", "--sample", "43", "--check", str(RECORD)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
