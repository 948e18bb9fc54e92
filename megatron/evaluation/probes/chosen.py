"""All probes, and the one that is asked for."""

from collections.abc import Sequence

from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.probes.passkey import Passkey
from megatron.evaluation.probes.probe import Probe
from megatron.evaluation.probes.repeated import RepeatedTokens
from megatron.options.evaluation import EvaluationOptions, refuse_choices_of_text

PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (RepeatedTokens, Passkey)}
"""By the names of their protocols, which `megatron.options.evaluation` has for the command line."""

SEQUENCES = 64
"""For each place of each length, unless said otherwise."""


def build_probe(options: EvaluationOptions, lengths: Sequence[int], tokenizer: Tokenizer) -> Probe:
    """The probe that options ask for.

    Args:
        options: protocol, windows, and what the probe takes besides.
        lengths: of windows, in tokens, ascending.
        tokenizer: of the models.

    Raises:
        UserError: an option that says which text is scored, or lengths that are too short.
    """
    refuse_choices_of_text(options, ("data", "stride", "measures"), f"protocol {options.protocol} makes its own")
    probe = PROBES[options.protocol].from_options(options, lengths, options.windows or SEQUENCES, tokenizer)
    probe.check()
    return probe
