"""How text is written: the options of `./deepy.py generate`, under GPT-NeoX's names where it has one."""

from typing import Literal

from megatron.options.section import ConfigSection, config_field

MAX_NEW_TOKENS = 10**9
"""Tokens. Memory ends long before, but is taken as it is needed."""


class GenerationOptions(ConfigSection):
    """How a trained model goes on with a text."""

    maximum_tokens: int = config_field(
        64, "tokens that are written after a prompt, unless the text ends before", ge=1, le=MAX_NEW_TOKENS
    )
    temperature: float = config_field(
        1.0, "logits are divided by it; 0 takes the likeliest token always (greedy)", ge=0
    )
    top_k: int = config_field(0, "draw from the k likeliest tokens alone; 0 from all", ge=0)
    top_p: float = config_field(
        1.0, "draw from the fewest likeliest tokens whose probabilities reach this sum; 1 from all", gt=0, le=1
    )
    seed: int = config_field(1234, "of the draws: the same seed, prompt and options give the same text", ge=0)
    stop: list[str] = config_field(
        list, "a text that ends what is written where it occurs, and is left out; as many as you like"
    )
    batch_size: int = config_field(8, "prompts that are read together, at most", ge=1)
    window: int | None = config_field(None, "attend to the last this many keys only, the own included", ge=1)
    device: str = config_field("auto", "where the model computes: auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
    backend: str | None = config_field(None, "attention backend; the run's own if absent")
