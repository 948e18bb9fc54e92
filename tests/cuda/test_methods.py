"""Every method trains on a CUDA device with the default backend and with kernels, in each type, shape and length."""

import os
import warnings
from functools import cache
from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from megatron.attention.backends import triton
from megatron.attention.backends.triton import KernelChoice, SelectedKernel
from megatron.model.gpt import GPT
from tools.gpu.null_device_cases import (
    FEATURES,
    OVERLAYS,
    REPRESENTATIVES,
    Case,
    find_faults,
    list_feature_cases,
    list_zero_cases,
    run_case,
)

LONG = ["length_32768", "length_131072"]
"""Lengths at which row blocks take minutes of a busy CPU; the complete matrix includes them."""
SAMPLE = [
    *list_feature_cases(OVERLAYS, ["bf16"]),
    *list_feature_cases(["kerple_log", "cdape_kerple_log"], [name for name in FEATURES if name not in LONG]),
    *[
        case
        for case in list_feature_cases(REPRESENTATIVES, LONG)
        if case.backend == "triton" and case.overlay != "dape"
    ],
    *list_feature_cases(REPRESENTATIVES, ["documents", "dropout", "gqa", "length_8192"]),
    *list_feature_cases(["rotary"], ["fp32", "head_dim_96", "windowed"]),
    *list_zero_cases(["kerple_log"]),
    Case("rotary-sdpa-documents", "rotary", {"attention_backend": "sdpa", "attention_mask": "document"}),
    *[Case(f"{name}-auto-capped", name, {"attn_logit_softcapping": 50.0}) for name in ("rotary", "kerple_log")],
]
CASES = list({case.name: case for case in SAMPLE}.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_trains(case: Case, corpus: Path, tmp_path: Path) -> None:
    """Each case finishes or raises the documented error, without warnings and without silent fallbacks."""
    outcome = run_case(case, corpus, tmp_path / "run")
    assert find_faults(case, outcome) == [], outcome.trace


def test_every_overlay_is_among_the_cases() -> None:
    assert {case.overlay for case in CASES} == set(OVERLAYS)
    assert len(OVERLAYS) >= 27


def test_a_case_that_goes_wrong_is_found(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of fault is detected: crash, warning of PyTorch or its C++ code, fallback, and silent fallback."""
    case = next(case for case in CASES if case.name == "kerple_log-triton-bf16")
    real = GPT.forward

    def disturb(disturbance):
        def forward(self, *args, **kwargs):
            disturbance()
            return real(self, *args, **kwargs)

        monkeypatch.setattr(GPT, "forward", forward)
        faults = find_faults(case, run_case(case, corpus, tmp_path / "run"))
        monkeypatch.setattr(GPT, "forward", real)
        return faults

    def crash():
        raise ZeroDivisionError("planted")

    assert disturb(crash) == ["ZeroDivisionError: planted"]
    assert "warned:" in disturb(lambda: warnings.warn("planted", UserWarning, stacklevel=1))[0]
    line = b"[W1125 01:02:03.000000000 Planted.cpp:1] planted\n"
    assert "Planted.cpp" in disturb(lambda: os.write(2, line))[0]
    monkeypatch.setattr(triton, "select_kernel", lambda *args: SelectedKernel(KernelChoice.PYTORCH, "planted"))
    faults = disturb(lambda: None)
    assert any("row blocks for planted" in fault for fault in faults)
    monkeypatch.setattr(triton, "warn_fallback", cache(lambda backend, reason: None))
    assert disturb(lambda: None) == ["launched 0 Triton kernels, and reported no fallback"]


def test_flex_attention_is_compiled_once_for_all_documents(corpus: Path, tmp_path: Path) -> None:
    """Every micro-batch has other documents, and none is compiled for; rows of single documents have another mask."""
    keys = {"attention_backend": "flex", "attention_mask": "document", "num_layers": 3, "train_iters": 6}
    before = counters["stats"]["unique_graphs"]
    outcome = run_case(Case("kerple_log-flex-documents", "kerple_log", keys), corpus, tmp_path / "run")
    assert (outcome.error, outcome.fallbacks) == ("", ())
    assert 1 <= counters["stats"]["unique_graphs"] - before <= 2
