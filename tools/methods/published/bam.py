"""BAM's repository: its prior and scalable softmax, with rotary positions and without positions."""

from collections.abc import Iterator
from pathlib import Path

import torch

from tools.methods.comparison import (
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    ModelComparison,
    build_gpt,
    copy_weights,
    load_module,
)

REPOSITORY = "ArthurSBianchessi/BAM"
NOTES = """\
BAM's score scales start at 1 and can stay there, like those of `ssmax`.
It multiplies scores instead of queries, and counts the keys of a row's own document, as we do.
For a single token its code omits the scale. There the factor log 1 = 0 changes nothing, because the softmax over one
key is 1. The lengths therefore start at 2.
With SSMax it also scales the prior unless `ssmax_prior` is false. Our processor `ssmax_prior` scales both; the
temperature `ssmax` does not change a bias, so its row uses false.
BAM's training script learns a location of the prior starting from 0, like `bam` with `location: true`.
"""


def list_comparisons(clone: Path) -> Iterator[ModelComparison]:
    """Yield comparisons of its models with scalable softmax."""
    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCABULARY, "norm_eps": 1e-5}
    for encoding, stem, name in (("none", "nope_ssmax", "NoPESSMax"), ("rotary", "rotary_ssmax", "RotarySSMax")):
        module = load_module(clone / "models" / f"{stem}.py")
        theta = {"rope_theta": 10_000.0} if encoding == "rotary" else {}
        theirs = getattr(module, f"{name}Transformer")(getattr(module, f"{name}ModelArgs")(**sizes, **theta)).eval()
        for documents in (False, True) if encoding == "none" else (False,):
            mask = {"attention_mask": "document"} if documents else {}
            ours = build_gpt(pos_emb=encoding, attention_temperature="ssmax", **mask)
            copy_weights(ours, theirs, "bam", adjacent_pairs=encoding == "rotary")
            title = f"ssmax, {encoding}{', documents' if documents else ''}: BAM's models/{stem}.py"
            yield ModelComparison(title, ours, theirs, documents)
    for scale, stem, name in (
        (None, "bam", "BA"),
        ("attention_temperature: ssmax", "bam_ssmax", "SSMaxBA"),
        ("score_processor: ssmax_prior", "bam_ssmax", "SSMaxBA"),
    ):
        module = load_module(clone / "models" / f"{stem}.py")
        keys = {} if scale is None else {"ssmax_prior": "ssmax_prior" in scale}
        theirs = getattr(module, f"{name}Transformer")(getattr(module, f"{name}TModelArgs")(**sizes, **keys)).eval()
        ours = build_gpt(
            pos_emb="bam", pos_emb_options={"location": True}, **dict([scale.split(": ")] if scale is not None else [])
        )
        copy_weights(ours, theirs, "bam")
        with torch.no_grad():
            # exponents of both signs, and scales that keep distant tokens visible
            theirs.prior.loc.copy_(torch.linspace(-1.0, 1.0, HEADS).view(1, HEADS, 1, 1))
            theirs.prior.shape.copy_(torch.linspace(-0.5, 1.5, HEADS).view(1, HEADS, 1, 1))
            theirs.prior.scale.copy_(torch.linspace(-4.0, -1.0, HEADS).view(1, HEADS, 1, 1))
            ours.position.exponent.value.copy_(theirs.prior.shape.flatten())
            ours.position.log_scale.value.copy_(theirs.prior.scale.flatten())
            ours.position.location.value.copy_(theirs.prior.loc.flatten())
        title = f"bam, location{'' if scale is None else ', ' + scale.split(': ')[1]}: BAM's models/{stem}.py"
        yield ModelComparison(title, ours, theirs)
