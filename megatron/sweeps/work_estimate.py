"""What a sweep has still to do, in FLOPs, which are known before the first training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.data.lengths import list_sequence_lengths
from megatron.sweeps import receipts
from megatron.sweeps.spec import Sweep, SweepMember
from megatron.utils.errors import UserError
from megatron.utils.progress import WorkItem

if TYPE_CHECKING:
    from megatron.evaluation.targets import EvalEstimate

# What needs torch is imported where it is used: a mistake in the file is told at once.


@dataclass(frozen=True)
class MemberWork:
    """What is to be done for one member."""

    done: int  # steps that its training has behind it
    training: WorkItem
    evaluation: WorkItem

    @property
    def has_work(self) -> bool:
        return bool(self.training.work or self.evaluation.work)


def estimate_work(
    sweep: Sweep, finished: dict[SweepMember, int], say: Callable[[str], None]
) -> dict[SweepMember, MemberWork]:
    """The work for each member.

    Refuses what cannot be evaluated later, and says what can be evaluated at some lengths only.

    Args:
        sweep: what is asked for.
        finished: steps that each training has behind it.
        say: takes a line.

    Raises:
        UserError: a member cannot be trained on this machine, or not scored as the sweep says.
    """
    found: dict[SweepMember, MemberWork] = {}
    scoring: dict[str, EvalEstimate] = {}  # the members of a variant differ in their seed, which changes no shape
    for number, member in enumerate(sweep.members, start=1):
        if member.variant not in scoring:
            scoring[member.variant] = _build_scoring(member)
            if (note := scoring[member.variant].note) is not None:
                say(f"{member.variant}: {note}")
        place = f"{number}/{len(sweep.members)}"
        found[member] = _estimate_member(member, place, finished[member], scoring[member.variant])
    return found


def _build_scoring(member: SweepMember) -> EvalEstimate:
    from megatron.evaluation.targets import estimate_untrained
    from megatron.model.build import check_position_options

    config = member.config
    try:
        check_position_options(config.model, config.position)
    except UserError as error:
        raise UserError(f"sweep.variants.{member.variant}: {error}") from None
    return estimate_untrained(member.name, config, member.evaluation)


def _estimate_member(member: SweepMember, place: str, done: int, scoring: EvalEstimate) -> MemberWork:
    config = member.resolved_config
    training, lengths = config.training, list_sequence_lengths(config.data, config.model.seq_length)
    assert training.train_batch_size is not None
    sequences = training.train_batch_size * training.train_iters
    flops = sum(scoring.model.flops_per_token(length) * length for length in lengths) / len(lengths)
    left = max(0.0, 1 - done / training.train_iters)
    scored = left == 0 and receipts.read_evaluated_records(member) is not None
    return MemberWork(
        done=done,
        training=WorkItem(f"{place} train {member.name}", "train", flops * sequences * left),
        evaluation=WorkItem(f"{place} evaluate {member.name}", "evaluate", 0.0 if scored else scoring.flops),
    )
