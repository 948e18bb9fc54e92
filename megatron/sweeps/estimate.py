"""What a sweep has still to do, in FLOPs, which are known before the first training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.data.lengths import sequence_lengths
from megatron.errors import UserError
from megatron.meter import Job
from megatron.sweeps import receipts
from megatron.sweeps.spec import Member, Sweep

if TYPE_CHECKING:
    from megatron.evaluation.sketch import Sketch

# What needs torch is imported where it is used: a mistake in the file is told at once.


@dataclass(frozen=True)
class Work:
    """What is to be done for one member."""

    done: int  # steps that its training has behind it
    training: Job
    evaluation: Job

    @property
    def any(self) -> bool:
        return bool(self.training.work or self.evaluation.work)


def work(sweep: Sweep, finished: dict[Member, int], say: Callable[[str], None]) -> dict[Member, Work]:
    """The work for each member.

    Refuses what cannot be evaluated later, and says what can be evaluated at some lengths only.

    Args:
        sweep: what is asked for.
        finished: steps that each training has behind it.
        say: takes a line.

    Raises:
        UserError: a member cannot be trained on this machine, or not scored as the sweep says.
    """
    found: dict[Member, Work] = {}
    scoring: dict[str, Sketch] = {}  # the members of a variant differ in their seed, which changes no shape
    for number, member in enumerate(sweep.members, start=1):
        if member.variant not in scoring:
            scoring[member.variant] = _scoring(member)
            if (note := scoring[member.variant].note) is not None:
                say(f"{member.variant}: {note}")
        place = f"{number}/{len(sweep.members)}"
        found[member] = _work(member, place, finished[member], scoring[member.variant])
    return found


def _scoring(member: Member) -> Sketch:
    from megatron.evaluation.sketch import foresee
    from megatron.model.build import check_position_options

    config = member.config
    try:
        check_position_options(config.model, config.position)
    except UserError as error:
        raise UserError(f"sweep.variants.{member.variant}: {error}") from None
    return foresee(member.name, config, member.evaluation)


def _work(member: Member, place: str, done: int, scoring: Sketch) -> Work:
    config = member.settled
    training, lengths = config.training, sequence_lengths(config.data, config.model.seq_length)
    assert training.train_batch_size is not None
    sequences = training.train_batch_size * training.train_iters
    flops = sum(scoring.model.flops_per_token(length) * length for length in lengths) / len(lengths)
    left = max(0.0, 1 - done / training.train_iters)
    scored = left == 0 and receipts.evaluated(member) is not None
    return Work(
        done=done,
        training=Job(f"{place} train {member.name}", "train", flops * sequences * left),
        evaluation=Job(f"{place} evaluate {member.name}", "evaluate", 0.0 if scored else scoring.flops),
    )
