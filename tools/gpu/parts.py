"""What `make gpu-check` runs, in the order of what we most need to know, and the same parts tiny, for rehearsals.

A part is a process of its own. Its seconds are its share: where it would outrun it, it is cut with what it has.
Compilers cost tens of seconds, so what needs one stands in a part of its own, after the part that does without.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

MODEL = ("megatron.core", "pydantic")
"""What building a model needs."""
PACKAGES = {"megatron.core": "megatron-core"}
"""What pip calls a module that has another name."""
PATIENT = 900
"""Seconds for a part of a rehearsal: an interpreter on a busy CPU takes minutes for what a GPU does at once."""


@dataclass(frozen=True)
class Part:
    """A process of its own."""

    name: str
    seconds: int
    """Its share."""
    command: tuple[str, ...]
    """What Python gets; {output} is where its records (JSON) or its test results (JUnit) go."""
    needs: tuple[str, ...] = ()
    """Modules beside torch and triton."""


def missing(modules: tuple[str, ...]) -> list[str]:
    """Names, for pip, of modules that are not here."""
    found = []
    for module in modules:
        try:
            here = find_spec(module) is not None
        except ModuleNotFoundError:
            here = False
        if not here:
            found.append(PACKAGES.get(module, module))
    return found


def kernels(name: str, seconds: int, *options: str) -> Part:
    """A part of the kernels' benchmark."""
    return Part(name, seconds, ("tools/bench/attention.py", *options, "--json", "{output}"))


def steps(name: str, seconds: int, *options: str) -> Part:
    """A part of the benchmark of whole models."""
    return Part(name, seconds, ("tools/bench/train_step.py", *options, "--json", "{output}"), MODEL)


def tests(seconds: int, *options: str) -> Part:
    """The kernels' tests, those of the backend in whole models only where these can be built."""
    if missing(MODEL):
        options = (*options, "--ignore", "tests/kernels/test_triton_backend.py")
    if not missing(("xdist",)):  # kernels are compiled by each test that is the first to need them
        options = (*options, "-n", str(min(12, os.cpu_count() or 1)))
    command = ("-m", "pytest", "tests/kernels", "-q", "-p", "no:cacheprovider", *options)
    return Part("tests", seconds, (*command, "--junitxml", "{output}"), ("pytest", "hypothesis"))


def parts() -> list[Part]:
    """On a GPU."""
    bias, cdape = ("--op", "biased_attention"), ("--op", "cdape")
    gate = ("--gate-only", "--dtype", "bf16", "fp32", "--heads", "16", "--lengths", "512", "500", "--batch", "2")
    return [
        kernels("correct_bias", 45, *bias, *gate, "--peers", "triton"),
        kernels("correct_cdape", 80, *cdape, *gate, "--peers", "triton"),
        steps("step_350m", 70, "--shapes", "350M:512:1", "350M:512:32", "--methods", "kerple_log", "cdape"),
        kernels("cdape", 45, *cdape, "--lengths", "2048", "--peers", "triton", "appendix", "flash"),
        kernels("cdape_compiled", 60, *cdape, "--lengths", "2048", "--peers", "triton", "appendix compiled"),
        kernels("bias", 45, *bias, "--lengths", "2048", "8192", "--peers", "triton", "flash", "flash cudnn",
                "sdpa mask"),
        kernels("flex", 60, *bias, "--lengths", "2048", "--peers", "triton", "flex learned", "flex frozen"),
        kernels("memory", 35, "--op", "cdape", "biased_attention", "--lengths", "4096", "8192", "--batch", "1",
                "--peers", "triton", "--rounds", "2"),
        kernels("long", 50, *cdape, "--lengths", "131072", "--batch", "1", "--peers", "triton", "--rounds", "2"),
        steps("long_layer", 50, "--layer", "--shapes", "125M:131072:1", "--methods", "cdape", "--rounds", "2"),
        tests(110),
        steps("step_125m", 50, "--shapes", "125M:512", "125M:2048", "--methods", "rotary", "kerple_log", "cdape"),
        kernels("cdape_lengths", 40, *cdape, "--lengths", "512", "8192", "--peers", "triton", "appendix", "flash"),
        kernels("cdape_k1", 25, *cdape, "--kernel-size", "1", "--lengths", "2048", "--peers", "triton", "appendix"),
        steps("step_plain", 60, "--shapes", "350M:512", "--methods", "rotary", "plain"),
    ]  # fmt: skip


def rehearsal() -> list[Part]:
    """On a CPU in Triton's interpreter: every part, small enough for that."""
    bias, cdape = ("--op", "biased_attention"), ("--op", "cdape", "--width", "4")
    tiny = ("--device", "cpu", "--batch", "1", "--heads", "2", "--dim", "16")
    few = ("--rounds", "2")
    step = ("--device", "cpu", "--dtype", "fp32", *few)
    gate = ("--gate-only", "--dtype", "fp32", "fp16", "--lengths", "8", "7", "--peers", "triton")
    one = ("--lengths", "8", *few)
    return [
        kernels("correct_bias", PATIENT, *bias, *tiny, *gate),
        kernels("correct_cdape", PATIENT, *cdape, *tiny, *gate),
        steps("step_350m", PATIENT, "--shapes", "tiny:8:1", "tiny:8:2", "--methods", "kerple_log", "cdape", *step),
        kernels("cdape", PATIENT, *cdape, *tiny, *one, "--peers", "triton", "appendix", "flash"),
        kernels("cdape_compiled", PATIENT, *cdape, *tiny, *one, "--peers", "triton", "appendix"),
        kernels("bias", PATIENT, *bias, *tiny, "--lengths", "8", "16", *few, "--peers", "triton", "flash", "sdpa mask"),
        kernels("flex", PATIENT, *bias, *tiny, *one, "--peers", "triton", "sdpa mask"),
        kernels("memory", PATIENT, "--op", "cdape", "biased_attention", "--width", "4", *tiny, "--lengths", "8", "16",
                *few, "--peers", "triton"),
        kernels("long", PATIENT, *cdape, *tiny, "--lengths", "16", *few, "--peers", "triton"),
        steps("long_layer", PATIENT, "--layer", "--shapes", "tiny:16:1", "--methods", "cdape", *step),
        tests(PATIENT, "-k", "opcheck or refused"),
        steps("step_125m", PATIENT, "--shapes", "tiny:16", "--tokens", "16", "--methods", "rotary", "cdape", *step),
        kernels("cdape_lengths", PATIENT, *cdape, *tiny, *one, "--peers", "triton", "appendix", "flash"),
        kernels("cdape_k1", PATIENT, *cdape, *tiny, "--kernel-size", "1", *one, "--peers", "triton", "appendix"),
        steps("step_plain", PATIENT, "--shapes", "tiny:16", "--tokens", "16", "--methods", "rotary", "plain", *step),
    ]  # fmt: skip
