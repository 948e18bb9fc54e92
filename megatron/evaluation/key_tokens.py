"""Key tokens: tokens that a model predicts well with a long context and badly with a short one (LongPPL).

Fang et al. (2025, What is Wrong with Perplexity for Long-context Language Modeling?, 2410.23771), section 3:

    LSD    log p(token | long context) − log p(token | short context)      long-short difference
    LCL    log p(token | long context)                                     long-context likelihood
    key    LSD > α and LCL > β                                             α = 2, β = −2 there, in nats

LongPPL is the perplexity of a model over the key tokens, with its long context. The key tokens are those of *one*
reference model, so that all models are scored on the same tokens. They are saved to a file that later evaluations read.

The paper's reference is Llama 3.1 8B. Its short context is the 4,096 to 5,119 tokens before a target (`trunc_len=4096`,
`sliding_window=1024` in the published code, PKU-ML/LongPPL@1decd2a and longppl 0.3.0, which skips targets with fewer).
Its long context is all of the text before the target. Here the two contexts are the shortest and the longest length of
the evaluation, with the same targets. To choose the tokens of the published code, use protocol `overlapping` with
`min_context` 4096, a short length of 5,119, and a long length of one token less than the text. In `last` and `strided`
nearly the whole long length precedes every target.

Files contain no text. They contain positions in the stream, and digests that identify the text, the tokenizer, and the
windows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from megatron.evaluation.protocols import ScoringPlan, TargetSet
from megatron.evaluation.texts import EvalText
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import get_default
from megatron.utils.atomic_io import check_new_file, parse_json, write_text_atomically
from megatron.utils.errors import RunError, UserError
from megatron.utils.field_errors import describe_field_error

DEFAULT_ALPHA, DEFAULT_BETA = 2.0, -2.0
"""Default thresholds in nats, as in the paper."""

FORMAT = 1


class KeyTokens(BaseModel):
    """Key tokens of one text, in the format of their file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    format: int = Field(description="version of the file format")
    alpha: float
    beta: float
    short_length: int = Field(description="tokens of the windows with the short context")
    long_length: int = Field(description="tokens of the windows with the long context")
    protocol: str
    num_targets: int = Field(ge=1, description="number of targets that the key tokens were chosen from")
    positions_digest: str = Field(description="digest of the positions of these targets")
    text_digest: str
    tokenizer: str
    reference: dict[str, Any] = Field(description="model that determined the key tokens")
    positions: list[NonNegativeInt] = Field(min_length=1, description="positions in the token stream, ascending")

    @field_validator("reference")
    @classmethod
    def _check_reference(cls, reference: dict[str, Any]) -> dict[str, Any]:
        if missing := [name for name in ("method", "run", "step") if name not in reference]:
            raise ValueError(f"{missing[0]} is missing")
        return reference

    @property
    def digest(self) -> str:
        """Hash of the key tokens, equal for equal key tokens."""
        return _hash_array(np.array(self.positions), self.text_digest, self.tokenizer)

    @property
    def remark(self) -> str:
        """Description for the notes of tables."""
        share = len(self.positions) / self.num_targets
        return (
            f"LongPPL (2410.23771): {len(self.positions):,} key tokens, {share:.1%} of the targets. "
            f"{self.reference['method']} ({self.reference['run']}, step {self.reference['step']}) predicts them with "
            f"log p > {self.beta:g} from {self.long_length:,} tokens, more than {self.alpha:g} nats better than "
            f"from {self.short_length:,}."
        )


def find_key_tokens(short_losses: np.ndarray, long_losses: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Find the key tokens among targets.

    Args:
        short_losses, long_losses: losses with the short and the long context, in nats.

    Returns:
        True for key tokens, bool.
    """
    return (short_losses - long_losses > alpha) & (-long_losses > beta)


@dataclass
class KeyTokenFile:
    """Source of the key tokens of an evaluation.

    It is an existing file, or a file to be written after the first run is scored.
    """

    path: Path
    alpha: float
    beta: float
    tokens: KeyTokens | None = None
    """Key tokens, or None until the reference is scored."""

    def select(self, plan: ScoringPlan, target_set: TargetSet) -> np.ndarray:
        """Return a mask of the key tokens among the targets, bool [blocks, targets]."""
        assert self.tokens is not None
        positions = plan.locate_targets(target_set, target_set.lengths[0])
        return np.isin(positions, np.array(self.tokens.positions))

    def find(
        self,
        plan: ScoringPlan,
        target_set: TargetSet,
        losses: Mapping[int, np.ndarray],
        loss_mask: np.ndarray,
        record_fields: Mapping[str, Any],
    ) -> None:
        """Choose the key tokens from the losses of the reference model, and write the file.

        Args:
            plan, target_set: scored windows and targets.
            losses: losses by length, float64 [blocks, targets].
            loss_mask: True for targets that count, bool [blocks, targets].
            record_fields: fields that identify the model and the text.

        Raises:
            RunError: there are no key tokens, or the model does not support the longest length.
        """
        short_length, long_length = target_set.lengths[0], target_set.lengths[-1]
        if long_length not in losses:
            raise RunError(
                f"{record_fields['method']}: the reference of key tokens does not support length "
                f"{long_length:,}; list another run first, or use shorter lengths"
            )
        is_key = find_key_tokens(losses[short_length], losses[long_length], self.alpha, self.beta) & loss_mask
        if not is_key.any():
            raise RunError(
                f"{record_fields['method']}: no key tokens: no target gains more than {self.alpha:g} nats from "
                f"{long_length:,} tokens over {short_length:,} with log p > {self.beta:g}; use more windows, another "
                "reference, or a smaller key_alpha"
            )
        positions = plan.locate_targets(target_set, short_length)
        self.tokens = KeyTokens(
            format=FORMAT,
            alpha=self.alpha,
            beta=self.beta,
            short_length=short_length,
            long_length=long_length,
            protocol=plan.protocol,
            num_targets=int(loss_mask.sum()),
            positions_digest=_hash_array(positions),
            text_digest=record_fields["text_digest"],
            tokenizer=record_fields["tokenizer"],
            reference={name: record_fields.get(name) for name in ("method", "run", "step", "seed", "software")},
            positions=sorted(positions[is_key].tolist()),
        )
        fields = self.tokens.model_dump()
        lines = [f'  "{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in fields.items()]
        write_text_atomically(self.path, "{\n" + ",\n".join(lines) + "\n}\n", must_be_new=True)


def open_key_tokens(options: EvaluationOptions, text: EvalText, plan: ScoringPlan) -> KeyTokenFile | None:
    """Open the key tokens that the options request, or return None if no measure needs them.

    Raises:
        UserError: the file is missing, belongs to another text, tokenizer, or choice of windows, or would be
            overwritten.
    """
    if "long_perplexity" not in (options.measures or ()):
        for name in ("key_tokens", "find_key_tokens", "key_alpha", "key_beta"):
            if getattr(options, name) != get_default(EvaluationOptions, name):
                raise UserError(f"{name}: only for the measure long_perplexity; add it to measures")
        return None
    if options.key_tokens is None:
        raise UserError(
            "measures: long_perplexity needs key_tokens, a file of a reference run; set find_key_tokens to create it"
        )
    if plan.protocol == "nonoverlapping" or len(plan.target_sets) > 1:
        raise UserError(
            "measures: long_perplexity needs one set of targets with long contexts: protocol overlapping, "
            "strided, or last with a single number of targets"
        )
    path = Path(options.key_tokens)
    if not options.find_key_tokens:
        if options.key_alpha is not None or options.key_beta is not None:
            raise UserError("key_alpha, key_beta: only for finding key tokens; add find_key_tokens")
        tokens = _read_key_tokens(path)
        _check_key_tokens(path, tokens, text, plan)
        return KeyTokenFile(path, tokens.alpha, tokens.beta, tokens)
    if path.exists():
        raise UserError(f"key_tokens {path}: file exists, and other evaluations may depend on it; choose another file")
    check_new_file("--key-tokens", path)
    if len(plan.lengths) < 2:
        raise UserError("find_key_tokens: give two lengths, of the short and of the long context")
    alpha = DEFAULT_ALPHA if options.key_alpha is None else options.key_alpha
    beta = DEFAULT_BETA if options.key_beta is None else options.key_beta
    return KeyTokenFile(path, alpha, beta)


def _read_key_tokens(path: Path) -> KeyTokens:
    try:
        return KeyTokens.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = "no such file; set find_key_tokens to create it" if not path.exists() else error.strerror or str(error)
    except ValidationError as error:
        reason = f"not a file of key tokens: {describe_field_error(error)}"
    except ValueError as error:
        reason = f"not JSON ({error})"
    raise UserError(f"key_tokens {path}: {reason}")


def _check_key_tokens(path: Path, tokens: KeyTokens, text: EvalText, plan: ScoringPlan) -> None:
    """Check that key tokens belong to the targets of a plan.

    Raises:
        UserError: they belong to other targets.
    """
    (target_set,) = plan.target_sets
    positions = plan.locate_targets(target_set, target_set.lengths[0])
    for what, theirs, ours in (
        ("tokenizer", tokens.tokenizer, text.vocabulary.name),
        ("text (digest)", tokens.text_digest, text.digest),
        ("protocol", tokens.protocol, plan.protocol),
        ("largest length", tokens.long_length, plan.lengths[-1]),
        ("choice of windows and targets (digest)", tokens.positions_digest, _hash_array(positions)),
        ("format", tokens.format, FORMAT),
    ):
        if theirs != ours:
            raise UserError(f"key_tokens {path}: different {what}: {theirs} in the file, {ours} here")


def _hash_array(positions: np.ndarray, *texts: str) -> str:
    content = np.ascontiguousarray(positions, dtype="<i8").tobytes() + " ".join(texts).encode()
    return hashlib.sha256(content).hexdigest()[:16]
