"""BAM's repository: its prior, and scalable softmax beside that, beside rotary positions and beside none."""

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
    load_module,
    share_weights,
)

REPOSITORY = "ArthurSBianchessi/BAM"
NOTES = """\
BAM's scales of scores start at 1, and can be kept there, as `ssmax` can.
It multiplies scores where we multiply queries, and it counts the keys of a row's own document, as we do.
Of a single token its code makes no scores' scale at all, where the factor log 1 = 0 changes nothing: softmax over one
key is 1. So lengths begin at 2.
With SSMax its prior is scaled too unless `ssmax_prior` is false. The processor `ssmax_prior` does that; the temperature
`ssmax` leaves a bias as it is, so its row is with false.
BAM's prior may have a location, which its authors keep at 0, and `bam` has none.
"""


def list_comparisons(clone: Path) -> Iterator[ModelComparison]:
    """Of its models with scalable softmax."""
    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCABULARY, "norm_eps": 1e-5}
    for encoding, stem, name in (("none", "nope_ssmax", "NoPESSMax"), ("rotary", "rotary_ssmax", "RotarySSMax")):
        module = load_module(clone / "models" / f"{stem}.py")
        theta = {"rope_theta": 10_000.0} if encoding == "rotary" else {}
        theirs = getattr(module, f"{name}Transformer")(getattr(module, f"{name}ModelArgs")(**sizes, **theta)).eval()
        for documents in (False, True) if encoding == "none" else (False,):
            mask = {"attention_mask": "document"} if documents else {}
            ours = build_gpt(pos_emb=encoding, attention_temperature="ssmax", **mask)
            share_weights(ours, theirs, "bam", adjacent_pairs=encoding == "rotary")
            title = f"ssmax, {encoding}{', documents' if documents else ''}: BAM's models/{stem}.py"
            yield ModelComparison(title, ours, theirs, documents)
    ssmax: dict[str, dict[str, str]] = {
        "": {},
        ", ssmax": {"attention_temperature": "ssmax"},
        ", ssmax_prior": {"score_processor": "ssmax_prior"},
    }
    for title, own_keys in ssmax.items():
        stem, name = ("bam_ssmax", "SSMaxBA") if title else ("bam", "BA")
        module = load_module(clone / "models" / f"{stem}.py")
        keys = {"ssmax_prior": "score_processor" in own_keys} if title else {}
        theirs = getattr(module, f"{name}Transformer")(getattr(module, f"{name}TModelArgs")(**sizes, **keys)).eval()
        ours = build_gpt(pos_emb="bam", **own_keys)
        share_weights(ours, theirs, "bam")
        with torch.no_grad():
            # Exponents of either sign, and scales that leave far tokens visible.
            theirs.prior.loc.zero_()
            theirs.prior.shape.copy_(torch.linspace(-0.5, 1.5, HEADS).view(1, HEADS, 1, 1))
            theirs.prior.scale.copy_(torch.linspace(-4.0, -1.0, HEADS).view(1, HEADS, 1, 1))
            ours.position.exponent.value.copy_(theirs.prior.shape.flatten())
            ours.position.log_scale.value.copy_(theirs.prior.scale.flatten())
        yield ModelComparison(f"bam{title}: BAM's models/{stem}.py", ours, theirs)
