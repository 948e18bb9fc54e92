"""One rank of the parity table: `rank.py FOLDER RANK WORLD` trains the cases of FOLDER/job.json in turn.

For each case, FOLDER/RANK.json contains the losses and gradient norms of its steps, and the final validation loss.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from megatron.data.torch_data import Batch, build_dataloader  # noqa: E402
from megatron.distributed import rng  # noqa: E402
from megatron.distributed.launcher_environment import RankInfo  # noqa: E402
from megatron.distributed.process_groups import ProcessGroups, init_distributed  # noqa: E402
from megatron.model.build import build_model  # noqa: E402
from megatron.training.engine import Engine  # noqa: E402
from tools.launch_ranks import run_rank  # noqa: E402
from tools.parity.cases import BATCH, LENGTH, VOCABULARY, ParityCase  # noqa: E402


class CountingDataset(torch.utils.data.Dataset):
    """Dataset of noisy counting. Its mask omits a different fraction of each sequence.

    Documents start at different positions in every row, and every third row is a single document.
    """

    def __init__(self, steps: int, *, has_documents: bool) -> None:
        generator = torch.Generator().manual_seed(8)
        starts = torch.randint(VOCABULARY, (steps * BATCH, 1), generator=generator)
        noise = torch.randint(3, (steps * BATCH, LENGTH + 1), generator=generator)
        self.rows = (starts + torch.arange(LENGTH + 1) + noise) % VOCABULARY
        shares = torch.tensor([0.95, 0.1, 0.6, 0.4]).repeat(steps)[:, None]
        self.masks = (torch.rand(steps * BATCH, LENGTH, generator=generator) < shares).float()
        begins = torch.rand(steps * BATCH, LENGTH, generator=generator) < 0.15
        begins[::3] = False
        self.starts = torch.where(begins, torch.arange(LENGTH), 0).cummax(1).values if has_documents else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        row = {"tokens": self.rows[index, :-1], "labels": self.rows[index, 1:], "loss_mask": self.masks[index]}
        return row if self.starts is None else {**row, "document_starts": self.starts[index]}


def train_case(case: ParityCase, groups: ProcessGroups) -> dict[str, Any]:
    """Train one case. All ranks must call this function."""
    config = case.build_config()
    model = build_model(config.model, config.position, VOCABULARY, groups=groups, seed=3)
    parameters, flops = model.num_parameters(), model.count_flops_per_token(LENGTH)
    engine = Engine(config, model, groups)
    engine.model.train()
    data = CountingDataset(case.steps, has_documents=config.position.attention_mask == "document")
    order = build_dataloader(data, micro_batch_size=case.micro_batch, mesh=groups.mesh)
    steps = config.training.gradient_accumulation_steps

    def over_all(share: torch.Tensor) -> float:
        return groups.all_reduce_sum(groups.mesh.count_on_one_rank(float(share)))[0]

    losses, norms = [], []
    for step in range(case.steps):
        first = step * BATCH
        tokens = int(data.masks[first : first + BATCH].sum())
        micro = [next(order) for _ in range(steps)]
        losses.append(
            over_all(engine.forward_backward(micro, tokens, position_seed=rng.derive_position_seed(1, first)))
        )
        engine.step(1e-2)
        norms.append(float(engine.grad_norm))
    engine.model.eval()
    order = build_dataloader(data, micro_batch_size=case.micro_batch, mesh=groups.mesh)
    valid = over_all(engine.evaluate_loss([next(order) for _ in range(steps)])) / float(data.masks[:BATCH].sum())
    engine.close()
    return {"losses": losses, "norms": norms, "valid": valid, "parameters": parameters, "flops": flops}


def train_cases(job: list[dict[str, Any]], connect: Callable[[], RankInfo]) -> list[dict[str, Any]]:
    """Train the cases in turn and print the progress."""
    cases: list[ParityCase] = [ParityCase.from_json(values) for values in job]
    found: list[dict[str, Any]] = []
    processes = None
    for case in cases:
        if processes is None or processes.mesh.sizes != case.layout.sizes:
            processes = init_distributed(connect(), case.layout.sizes, device="cpu", backend="gloo")
        found.append(train_case(case, processes))
        print(f"{len(found)} of {len(cases)}: {case.method}, {case.layout}, {case.precision}", flush=True)
    return found


if __name__ == "__main__":
    run_rank(train_cases)
