"""Parts of `make gpu-check`, the most important results first, and smaller versions of them for rehearsals.

Each part is a separate process with a time limit in seconds, after which it is interrupted and keeps its results.
Compilation takes tens of seconds, so work that needs it has its own part after the part that does not.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

MODEL_MODULES = ("megatron.core", "pydantic")
"""Modules required to build a model."""
PIP_NAMES = {"megatron.core": "megatron-core"}
"""Names of modules on PyPI, if different."""
HOST_TESTS = (
    *("test_annotations.py", "test_carveout.py", "test_compile.py", "test_instructions.py"),
    "test_interpreted_bfloat16.py",
    *("test_interpreter.py", "test_jit_build.py", "test_memory_accesses.py", "test_rehearsal.py"),
    "test_uniform_registers.py",
    *(
        f"cdape_attention/{name}"
        for name in (
            *("test_attention_kernel.py", "test_bias_term.py", "test_cpu.py", "test_driver.py"),
            *(
                "test_mixer.py",
                "test_mixer_forward.py",
                "test_mixer_op.py",
                "test_logit_gradient.py",
                "test_reference.py",
            ),
        )
    ),
)
"""Tests of `tests/kernels` that compute nothing on a device and would use up its time."""
VISIT_SECONDS = 780
"""Time limit of a visit's parts in seconds: fifteen minutes minus startup, installation and copying."""
ARCHIVE = "gpu_evidence.tar"
"""Archive, next to a visit's record, with the records of all evidence runs. Unpack it into docs/results."""
REHEARSAL_SECONDS = 900
"""Time limit of a rehearsal's part in seconds. Triton's interpreter on a busy CPU is minutes slower than a GPU."""


@dataclass(frozen=True)
class CheckPart:
    """Part of a check: one process."""

    name: str
    seconds: int
    """Time limit in seconds."""
    command: tuple[str, ...]
    """Arguments of Python.

    {output} is replaced by the path of its records (JSON) or test results (JUnit), {results} by the folder of the whole
    check's record, and {seconds} by the part's time limit.
    """
    needs: tuple[str, ...] = ()
    """Required modules besides torch and triton."""


def list_missing(modules: tuple[str, ...]) -> list[str]:
    """List the PyPI names of missing modules."""
    found = []
    for module in modules:
        try:
            here = find_spec(module) is not None
        except ModuleNotFoundError:
            here = False
        if not here:
            found.append(PIP_NAMES.get(module, module))
    return found


def build_attention_part(name: str, seconds: int, *options: str) -> CheckPart:
    """Build a part of the kernel benchmark."""
    return CheckPart(name, seconds, ("tools/bench/attention.py", *options, "--json", "{output}"))


def build_self_check_part(seconds: int, *options: str, name: str = "self_check") -> CheckPart:
    """Build the part that runs the self-check of `auto`."""
    return CheckPart(name, seconds, ("tools/gpu/self_check.py", *options, "--json", "{output}"))


def build_step_part(name: str, seconds: int, *options: str) -> CheckPart:
    """Build a part of the benchmark of whole models."""
    return CheckPart(name, seconds, ("tools/bench/train_step.py", *options, "--json", "{output}"), MODEL_MODULES)


def build_test_part(seconds: int, *options: str) -> CheckPart:
    """Build the part that runs the kernel tests, including tests of whole models if they can be built."""
    left = HOST_TESTS if not list_missing(MODEL_MODULES) else (*HOST_TESTS, "test_triton_backend.py")
    options = (*options, *(word for name in left for word in ("--ignore", f"tests/kernels/{name}")))
    if not list_missing(("xdist",)):  # each worker compiles the kernels of its own tests
        options = (*options, "-n", str(min(12, os.cpu_count() or 1)))
    command = ("-m", "pytest", "tests/kernels", "-q", "-p", "no:cacheprovider", *options)
    return CheckPart("tests", seconds, (*command, "--junitxml", "{output}"), ("pytest", "hypothesis"))


def list_parts() -> list[CheckPart]:
    """List the parts on a GPU."""
    bias, cdape = ("--op", "biased_attention"), ("--op", "cdape")
    gate = ("--gate-only", "--dtype", "bf16", "fp32", "--heads", "16", "--lengths", "512", "500", "--batch", "2")
    return [
        build_self_check_part(60),
        build_attention_part("correct_bias", 45, *bias, *gate, "--peers", "triton"),
        build_attention_part("correct_cdape", 80, *cdape, *gate, "--peers", "triton"),
        build_attention_part("mixer", 45, *cdape, "--heads", "16", "--dtype", "bf16", "--lengths", "512", "2048",
            "--peers", "triton", "triton alone", "flash"),
        build_step_part("step_350m", 70, "--shapes", "350M:512:1", "350M:512:32", "--methods", "kerple_log", "cdape"),
        build_attention_part("cdape", 45, *cdape, "--lengths", "2048", "--peers", "triton", "appendix", "flash"),
        build_attention_part("cdape_compiled", 60, *cdape, "--lengths", "2048", "--peers", "triton",
            "appendix compiled"),
        build_attention_part("bias", 45, *bias, "--lengths", "2048", "8192", "--peers", "triton", "flash",
            "flash cudnn",
                "sdpa mask"),
        build_attention_part("flex", 60, *bias, "--lengths", "2048", "--peers", "triton", "flex learned",
            "flex frozen"),
        build_attention_part("memory", 35, "--op", "cdape", "biased_attention", "--lengths", "4096", "8192", "--batch",
            "1",
                "--peers", "triton", "--rounds", "2"),
        build_attention_part("long", 50, *cdape, "--lengths", "131072", "--batch", "1", "--peers", "triton",
            "--rounds", "2"),
        build_step_part("long_layer", 50, "--layer", "--shapes", "125M:131072:1", "--methods", "cdape", "--rounds",
            "2"),
        build_test_part(110),
        build_step_part("step_125m", 50, "--shapes", "125M:512", "125M:2048", "--methods", "rotary", "kerple_log",
            "cdape"),
        build_attention_part("cdape_lengths", 40, *cdape, "--lengths", "512", "8192", "--peers", "triton", "appendix",
            "flash"),
        build_attention_part("cdape_k1", 25, *cdape, "--kernel-size", "1", "--lengths", "2048", "--peers", "triton",
            "appendix"),
        build_step_part("step_plain", 60, "--shapes", "350M:512", "--methods", "rotary", "plain"),
    ]  # fmt: skip


def build_profile_part(name: str, seconds: int, *options: str) -> CheckPart:
    """Build a part of the profile of whole models."""
    command = ("tools/bench/profile_step.py", "--seconds", str(seconds - 30), *options, "--json", "{output}")
    return CheckPart(name, seconds, command, MODEL_MODULES)


def build_evidence_part(seconds: int, *options: str) -> CheckPart:
    """Build the part that trains the methods of configs/evidence.yml in the remaining time."""
    command = ("tools/gpu/evidence.py", *options, "--seconds", "{seconds}", "--json", "{output}")
    return CheckPart(
        "evidence", seconds, (*command, "--archive", f"{{results}}/{ARCHIVE}"), (*MODEL_MODULES, "deepspeed")
    )


def list_visit_parts() -> list[CheckPart]:
    """List the parts for fifteen minutes on a GPU, most important first.

    Those before the evidence runs fit in `VISIT_SECONDS` even if each of them needs its whole time limit.
    """
    cdape, bias = ("--op", "cdape", "--heads", "16"), ("--op", "biased_attention", "--heads", "16")
    ours, half = ("--peers", "triton", "triton alone"), ("--dtype", "bf16")
    methods, rounds = ("--methods", "kerple_log", "cdape", "plain"), ("--rounds", "8")
    gate = ("--gate-only", "--lengths")
    return [
        # what this machine costs, and what a step is made of
        build_profile_part("profile", 120, "--shapes", "350M:512:32", "350M:512:1"),
        CheckPart("rates", 15, ("tools/bench/instruction_rates.py", "--json", "{output}")),
        # are the kernels right, and what do they count
        build_attention_part("correct_bias", 35, *bias, "--dtype", "bf16", "fp16", *gate, "512", "500", "--batch", "2",
            "--peers", "triton"),
        build_attention_part("correct_bias_wide", 35, *bias, *half, "--dim", "128", *gate, "512", "500", "--batch", "2",
            "--peers", "triton"),
        build_attention_part("correct_mixer", 55, *cdape, *half, *gate, "512", "200", "--batch", "32",
            *ours),  # the CUDA kernels compute batches that occupy all multiprocessors
        build_attention_part("correct_wide", 70, *cdape, *half, "--dim", "128", *gate, "512", "200", "--batch", "32",
            *ours),
        build_self_check_part(35, "--methods", "cdape_fox", "--batch", "16", name="correct_gates"),
        CheckPart("counters", 60, ("tools/bench/kernel_counters.py", "--seconds", "29", "--json", "{output}")),
        # ratios of whole steps; each method compiles anew at each shape
        build_step_part("step_512", 70, "--shapes", "350M:512:32", *methods, "rotary", "cdape_triton", *rounds),
        build_step_part("graphs", 45, "--shapes", "350M:512:1", "350M:512:4", "--methods", "kerple_log",
            "kerple_log_graph", "cdape", "cdape_graph"),
        build_step_part("step_long", 85, "--shapes", "350M:2048:8", "125M:512:32", *methods, *rounds),
        build_step_part("step_8192", 70, "--shapes", "350M:8192:2", *methods, "--rounds", "5"),
        # whole trainings: compiled regions and graphs, bit for bit; memory against the plan
        CheckPart("training", 85, ("tools/bench/graph_training.py", "--cases",
            "kerple_log,cdape,zero_1,zero_2_accumulation,fp16", "--json", "{output}"),
            (*MODEL_MODULES, "deepspeed")),
        build_evidence_part(VISIT_SECONDS),
        # in the time in which no evidence run fits
        build_attention_part("correct_wide_fp16", 70, *cdape, "--dtype", "fp16", "--dim", "128", *gate, "512", "200",
            "--batch", "32", *ours),
        build_attention_part("mixer", 45, *cdape, *half, "--lengths", "512", "2048", *ours, "flash", "flash cudnn"),
        build_attention_part("paper", 60, *cdape, *half, "--lengths", "2048", "--peers", "triton", "triton alone",
            "appendix"),
        build_attention_part("bias", 45, *bias, *half, "--lengths", "512", "2048", "8192", "--peers", "triton", "flash",
            "flash cudnn"),
        CheckPart("tiles", 120, ("tools/bench/tiles.py", "--lengths", "512", "2048", "--json", "{output}")),
        build_profile_part("profile_triton", 90, "--shapes", "350M:512:32", "--methods", "cdape_triton", "rotary"),
        build_attention_part("compiled", 75, *bias, *half, "--lengths", "2048", "--peers", "triton", "flex learned",
            "flex frozen"),  # PyTorch 2.11 cannot compile either for an H200
    ]  # fmt: skip


def list_visit_rehearsal_parts() -> list[CheckPart]:
    """List smaller versions of these parts for a CPU with Triton's interpreter."""
    cdape, bias = ("--op", "cdape", "--width", "4"), ("--op", "biased_attention")
    tiny = ("--device", "cpu", "--batch", "1", "--heads", "2", "--dim", "16", "--lengths", "8", "--rounds", "2")
    step = ("--device", "cpu", "--dtype", "fp32", "--rounds", "2", "--methods", "kerple_log", "cdape", "cdape_triton")
    all_peers = (*step, "rotary", "plain")
    profile = ("--device", "cpu", "--dtype", "fp32", "--shapes", "tiny:8:1")
    ours, limit = ("--peers", "triton"), REHEARSAL_SECONDS
    return [
        build_profile_part("profile", limit, *profile, "--methods", "kerple_log", "plain"),
        CheckPart("rates", limit, ("tools/bench/instruction_rates.py", "--device", "cpu", "--json", "{output}")),
        build_attention_part("correct_bias", limit, *bias, *tiny, "--dtype", "bf16", "--gate-only", *ours),
        build_attention_part("correct_bias_wide", limit, *bias, *tiny, "--dtype", "bf16", "--gate-only", *ours),
        build_attention_part("correct_mixer", limit, *cdape, *tiny, "--dtype", "bf16", "--gate-only", *ours),
        build_attention_part("correct_wide", limit, *cdape, *tiny, "--dtype", "bf16", "--gate-only", *ours),
        build_self_check_part(limit, "--methods", "cdape_fox", "--device", "cpu", "--batch", "1", "--heads", "2",
            "--dim", "16", "--width", "4", "--dtype", "fp32", "--lengths", "8", name="correct_gates"),
        CheckPart("counters", limit, ("tools/bench/kernel_counters.py", "--device", "cpu", "--dtype", "float32",
            "--batch", "1", "--heads", "2", "--dim", "16", "--length", "8", "--width", "4", "--json", "{output}")),
        build_step_part("step_512", limit, "--shapes", "tiny:8:1", *all_peers),
        build_step_part("graphs", limit, "--shapes", "tiny:8:1", *step),  # graphs need a GPU
        build_step_part("step_long", limit, "--shapes", "tiny:8:2", *all_peers),
        build_step_part("step_8192", limit, "--shapes", "tiny:16:1", *all_peers),
        CheckPart("training", limit, ("tools/bench/train_loop.py", "--shapes", "quickstart", "--methods", "cdape",
            "--blocks", "2", "--json", "{output}"), (*MODEL_MODULES, "deepspeed")),
        build_evidence_part(limit, "--rehearse"),
        build_attention_part("correct_wide_fp16", limit, *cdape, *tiny, "--dtype", "fp16", "--gate-only", *ours),
        build_attention_part("mixer", limit, *cdape, *tiny, *ours),
        build_attention_part("paper", limit, *cdape, *tiny, *ours, "appendix"),
        build_attention_part("bias", limit, *bias, *tiny, *ours, "flash"),
        CheckPart("tiles", limit, ("tools/bench/tiles.py", "--device", "cpu", "--tokens", "16", "--heads", "2", "--dim",
            "16", "--width", "4", "--lengths", "16", "--json", "{output}")),
        build_profile_part("profile_triton", limit, *profile, "--methods", "cdape_triton"),
        build_attention_part("compiled", limit, *bias, *tiny, *ours, "sdpa mask"),
    ]  # fmt: skip


def list_rehearsal_parts() -> list[CheckPart]:
    """List smaller versions of every part for a CPU with Triton's interpreter."""
    bias, cdape = ("--op", "biased_attention"), ("--op", "cdape", "--width", "4")
    tiny = ("--device", "cpu", "--batch", "1", "--heads", "2", "--dim", "16")
    few = ("--rounds", "2")
    step = ("--device", "cpu", "--dtype", "fp32", *few)
    gate = ("--gate-only", "--dtype", "fp32", "fp16", "--lengths", "8", "7", "--peers", "triton")
    one = ("--lengths", "8", *few)
    limit = REHEARSAL_SECONDS
    return [
        build_self_check_part(limit, *tiny, "--width", "4", "--dtype", "fp32", "--lengths", "8"),
        build_attention_part("correct_bias", limit, *bias, *tiny, *gate),
        build_attention_part("correct_cdape", limit, *cdape, *tiny, *gate),
        build_attention_part("mixer", limit, *cdape, *tiny, *one, "--peers", "triton", "flash"),
        build_step_part("step_350m", limit, "--shapes", "tiny:8:1", "tiny:8:2", "--methods", "kerple_log", "cdape",
            *step),
        build_attention_part("cdape", limit, *cdape, *tiny, *one, "--peers", "triton", "appendix", "flash"),
        build_attention_part("cdape_compiled", limit, *cdape, *tiny, *one, "--peers", "triton", "appendix"),
        build_attention_part("bias", limit, *bias, *tiny, "--lengths", "8", "16", *few, "--peers", "triton", "flash",
            "sdpa mask"),
        build_attention_part("flex", limit, *bias, *tiny, *one, "--peers", "triton", "sdpa mask"),
        build_attention_part("memory", limit, "--op", "cdape", "biased_attention", "--width", "4", *tiny, "--lengths",
            "8", "16",
                *few, "--peers", "triton"),
        build_attention_part("long", limit, *cdape, *tiny, "--lengths", "16", *few, "--peers", "triton"),
        build_step_part("long_layer", limit, "--layer", "--shapes", "tiny:16:1", "--methods", "cdape", *step),
        build_test_part(limit, "-k", "opcheck or rejected"),
        build_step_part("step_125m", limit, "--shapes", "tiny:16", "--tokens", "16", "--methods", "rotary", "cdape",
            *step),
        build_attention_part("cdape_lengths", limit, *cdape, *tiny, *one, "--peers", "triton", "appendix", "flash"),
        build_attention_part("cdape_k1", limit, *cdape, *tiny, "--kernel-size", "1", *one, "--peers", "triton",
            "appendix"),
        build_step_part("step_plain", limit, "--shapes", "tiny:16", "--tokens", "16", "--methods", "rotary", "plain",
            *step),
    ]  # fmt: skip
