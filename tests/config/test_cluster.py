"""Cluster overlays: each model fits on the number of GPUs stated in docs/parallel.md."""

import re

import pytest

from megatron.config.execution import resolve_mesh_shape
from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import plan_model
from megatron.training.resolve_run import resolve_run
from megatron.utils.project import SHIPPED_CONFIGS
from tools.docs.parallel_page import (
    GPT2_VOCABULARY,
    GPUS,
    METHOD,
    MODELS,
    OVERLAYS,
    PAGE,
    ROOT,
    list_estimates,
    render_page,
)

ROW = re.compile(r"\| (\S+) \| `(a100_\w+)` \| (\d+) \| ([\d.]+) GiB \| (\d+) \| ([\d.]+) GiB \|")
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
ROWS = ROW.findall(TEXT)
CASES = [
    (model, overlay, int(gpus), gib, float(estimate))
    for model, overlay, *found in ROWS
    for gib, gpus, estimate in zip(GPUS.values(), found[::2], found[1::2], strict=True)
]


def test_the_table_has_every_model_and_every_overlay() -> None:
    assert {path.stem for path in (SHIPPED_CONFIGS / "cluster").glob("a100_*.yml")} == set(OVERLAYS)
    assert [(model, overlay) for model, overlay, *_ in ROWS] == [(m, o) for o in OVERLAYS for m in MODELS]


@pytest.mark.parametrize(("model", "overlay", "gpus", "gib", "estimate"), CASES)
def test_configurations_in_the_table_fit(model: str, overlay: str, gpus: int, gib: float, estimate: float) -> None:
    for method in (METHOD, "rotary", "fire"):
        config = load_config([model, method, overlay, "local_setup"]).config
        on_site = resolve_run(config, LocalHardware(num_gpus=gpus, num_cores=gpus))
        assert on_site.config.training.compute_dtype == "bf16"
        assert on_site.config.launch.num_gpus == gpus
        from_afar = resolve_run(
            config.replace(num_gpus=gpus, device="cuda"), LocalHardware(num_gpus=0, num_cores=2), dry_run=True
        )
        assert from_afar.config.training == on_site.config.training
        found = estimate_memory(plan_model(on_site.config), resolve_mesh_shape(on_site.config, gpus), GPT2_VOCABULARY)
        assert found.fits(gib), found
        if method == METHOD:
            assert found.total / 2**30 == pytest.approx(estimate, abs=0.051)


def test_fewer_gpus_than_in_the_table_do_not_fit() -> None:
    for model, overlay, gpus, gib, _ in CASES:
        assert all(fewer >= gpus for fewer, found in list_estimates(model, overlay) if found.fits(gib))


def test_the_page_is_the_generated_one() -> None:
    assert render_page() == TEXT, "run: make docs"
