"""How text is written: the options of `./deepy.py generate`, under GPT-NeoX's names where it has one."""

from typing import Literal

from megatron.options.section import Section, key

LONGEST = 10**9
"""Tokens. Memory ends long before, but is taken as it is needed."""


class GenerationOptions(Section):
    """How a trained model goes on with a text."""

    maximum_tokens: int = key(
        64, "tokens that are written after a prompt, unless the text ends before", ge=1, le=LONGEST
    )
    temperature: float = key(1.0, "logits are divided by it; 0 takes the likeliest token always (greedy)", ge=0)
    top_k: int = key(0, "draw from the k likeliest tokens alone; 0 from all", ge=0)
    top_p: float = key(
        1.0, "draw from the fewest likeliest tokens whose probabilities reach this sum; 1 from all", gt=0, le=1
    )
    seed: int = key(1234, "of the draws: the same seed, prompt and options give the same text", ge=0)
    stop: list[str] = key(
        list, "a text that ends what is written where it occurs, and is left out; as many as you like"
    )
    batch_size: int = key(8, "prompts that are read together, at most", ge=1)
    window: int | None = key(None, "attend to the last this many keys only, the own included", ge=1)
    device: str = key("auto", "where the model computes: auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
    backend: str | None = key(None, "attention backend; the run's own if absent")
