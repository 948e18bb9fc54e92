"""Forward and backward passes over pipeline stages: PyTorch's 1F1B schedule around this rank's stage of the GPT.

A stage works on one micro-batch while its neighbors work on others. With m micro-batches and P stages a step takes the
time of m + P − 1 micro-batches. The bubble, the fraction (P − 1) / (m + P − 1), is spent waiting. DeepSpeed's engine
does not drive the schedule. It would reduce gradients over the data-parallel ranks after each micro-batch, before the
stages have summed the gradients of shared parameters. It is therefore configured for one micro-batch, and reduces on
request.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import stage as pytorch_stage

from megatron.config.schema import Config
from megatron.data.torch_data import Batch
from megatron.distributed.mesh import Axis
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import all_reduce_sum_
from megatron.model.device_dtype import get_torch_dtype
from megatron.model.gpt import GPT

ALLOCATES_ON_RECEIPT = hasattr(pytorch_stage._RecvInfo, "allocate_buffer")
"""True if PyTorch allocates a buffer when it receives a tensor and frees it after use, as torch 2.15 does."""


def compute_bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step that a stage spends waiting for the others."""
    return (stages - 1) / (micro_batches + stages - 1)


def count_in_flight(stage: Axis, micro_batches: int) -> int:
    """Return the maximum number of micro-batches in flight on a stage: one for itself and one for each later stage."""
    return min(stage.size - stage.index, micro_batches)


class BufferedStage(PipelineStage):
    """PyTorch's pipeline stage with receive buffers only for the micro-batches in flight.

    PyTorch's own stage has a buffer for each micro-batch of a step, unless it allocates them on receipt. Under 1F1B a
    stage receives a micro-batch only after the backward pass of the micro-batch `in_flight` positions earlier, and a
    gradient only after the previous one's backward pass.
    """

    in_flight: int

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if ALLOCATES_ON_RECEIPT:
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        found = super()._prepare_forward_infra(min(num_microbatches, self.in_flight), *args, **kwargs)
        for index in range(self.in_flight, num_microbatches):
            self.args_recv_info[index] = self.args_recv_info[index - self.in_flight]
        return found

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        if ALLOCATES_ON_RECEIPT:
            return super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        found = super()._prepare_backward_infra(1, *args, **kwargs)
        self.grad_recv_info |= dict.fromkeys(range(1, num_microbatches), self.grad_recv_info[0])
        self.chunks = num_microbatches
        return found

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        # torch 2.11 also compares the strides of the losses, which no other stage receives; later versions do not.
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]


class PipelineSchedule:
    """This rank's stage of a GPT and its schedule, for micro-batches of one shape [B, T].

    The shape is that of training unless `micro_batch` is given; T counts the positions of this rank.
    """

    def __init__(
        self, gpt: GPT, config: Config, groups: ProcessGroups, micro_batch: tuple[int, int] | None = None
    ) -> None:
        training, mesh = config.training, groups.mesh
        self.gpt, self.groups = gpt, groups
        self._factor = 1.0
        self.z_coefficient = training.z_loss
        self._sums = torch.zeros(2, dtype=torch.float64, device=groups.device)
        """Sums of the counted tokens' losses and z-losses in the last pass, on the last stage with a z-loss; 0
        elsewhere.
        """
        batch, length = micro_batch or (
            training.train_micro_batch_size_per_gpu,
            config.model.seq_length // mesh.context.size,
        )
        # Known shapes avoid PyTorch's shape inference, which runs the stage and the loss on arbitrary data in the first
        # step.
        tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
        shape = (2, batch, length) if self.z_coefficient else (batch, length)
        losses = torch.empty(shape, dtype=torch.float32, device="meta", requires_grad=True)
        dtype = get_torch_dtype(training.compute_dtype)
        hidden = torch.empty(length, batch, config.model.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        stage = BufferedStage(
            gpt,
            mesh.pipeline.index,
            mesh.pipeline.size,
            groups.device,
            input_args=tokens if gpt.is_first_stage else hidden,
            output_args=losses if gpt.is_last_stage else hidden,
            group=groups.group("pipeline"),
        )
        stage.in_flight = count_in_flight(mesh.pipeline, training.gradient_accumulation_steps)
        self.schedule = Schedule1F1B(
            stage, training.gradient_accumulation_steps, loss_fn=self._compute_loss, scale_grads=False
        )

    def _compute_loss(self, losses: Tensor, mask: Tensor) -> Tensor:
        if not self.z_coefficient:
            return (losses * mask).sum() * self._factor
        of_tokens, log_z = losses * mask
        z_loss = self.z_coefficient * log_z.square().sum()
        self._sums += torch.stack([of_tokens.sum(), z_loss]).detach()
        return (of_tokens.sum() + z_loss) * self._factor

    def forward_backward(self, micro_batches: Sequence[Batch], factor: float, position_seed: int | None) -> Tensor:
        """Run the forward and backward passes of a whole step, with the loss scaled by `factor`.

        Returns:
            On the last stage the sum of the counted tokens' losses, elsewhere 0: float64 on this rank's device.
        """
        self._factor = factor
        self._sums.zero_()
        losses: list[Tensor] = []
        args, kwargs = self._collect_inputs(micro_batches, position_seed)
        self.schedule.step(*args, losses=losses, return_outputs=False, **kwargs)
        for stages, parameter in self.gpt.list_replicated_parameters():
            all_reduce_sum_(_get_gradient(parameter), self.groups, stages)
        return self._sums[0].clone() if self.z_coefficient else self._sum_losses(losses) / factor

    def evaluate_loss(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Run the forward passes only, without gradients and without a factor."""
        self._factor = 1.0
        self._sums.zero_()
        losses: list[Tensor] = []
        args, kwargs = self._collect_inputs(micro_batches, None)
        self.schedule.eval(*args, losses=losses, **kwargs)
        return self._sums[0].clone() if self.z_coefficient else self._sum_losses(losses)

    @property
    def z_loss(self) -> Tensor:
        """Sum of the counted tokens' z-losses in the last step on the last stage, 0 elsewhere."""
        return self._sums[1]

    def _collect_inputs(
        self, micro_batches: Sequence[Batch], position_seed: int | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the inputs of this stage for all micro-batches.

        These are tokens on the first stage, and labels and the mask on the last.
        """

        def join(name: str) -> Tensor:
            return torch.cat([batch[name] for batch in micro_batches]).to(self.groups.device, non_blocking=True)

        args = (join("tokens"),) if self.gpt.is_first_stage else ()
        kwargs: dict[str, Any] = {"position_seed": position_seed}
        if "document_starts" in micro_batches[0]:  # on the CPU, where document layouts are computed
            kwargs["document_starts"] = torch.cat([batch["document_starts"] for batch in micro_batches])
        if self.gpt.is_last_stage:
            kwargs |= {"labels": join("labels"), "target": join("loss_mask")}
            kwargs |= {"with_log_z": True} if self.z_coefficient else {}
        return args, kwargs

    def _sum_losses(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        for loss in losses:
            total += loss.detach()
        return total


def _get_gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, wherever DeepSpeed keeps it, or zeros if this stage has none."""
    gradient = getattr(parameter, "_hp_grad", None)  # float32, next to a parameter in half precision
    if gradient is None:
        gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient
