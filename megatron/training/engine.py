"""The DeepSpeed engine of a run, and the few things DeepSpeed leaves to its caller.

The engine averages gradients over the ranks, shards by ZeRO's stage, keeps float32 masters, scales the loss in float16,
clips, and steps. `Engine` adds what differs between its optimizers, so that the loop sees one behavior:

* a step whose gradients are not finite changes no weight, in every precision (DeepSpeed's float32 optimizer without
  ZeRO has no such check, so its clipping is done here);
* the gradient norm of every step, without the loss scale;
* the loss is divided by the tokens of the whole step, over data × context ranks and micro-steps, so that any split of
  the same global batch gives the same gradient, also where a mask leaves different numbers of tokens.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.schema import Config
from megatron.data.dataloader import Batch
from megatron.distributed.collectives import all_reduce_sum_
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import ModelParallelUnit, ProcessGroups
from megatron.distributed.sharding import is_counted_here
from megatron.model.device_dtype import get_torch_dtype
from megatron.model.gpt import GPT
from megatron.model.parameter_groups import parameter_groups
from megatron.training.graphed_model import GraphedModel
from megatron.training.optimizer import build_optimizer, label_parameters, list_grouped_weights
from megatron.training.pipeline import PipelineSchedule
from megatron.training.projected_optimizers import ProjectedOptimizer
from megatron.utils.errors import UserError
from megatron.utils.imports import trim_imports


class Engine:
    """One process's share of training: forward, backward, step. Wraps DeepSpeed's engine (`.deepspeed`)."""

    def __init__(self, config: Config, model: nn.Module, groups: ProcessGroups) -> None:
        with trim_imports():
            import deepspeed  # after `init_distributed` has chosen the accelerator

            # ZeRO would import it later, and it compiles three functions of an optimizer that is not offered.
            import deepspeed.runtime.zero.muon.muon_optimizer

            from megatron.training.zero_optimizer import average_gradients, can_flatten, flatten_optimizer

        # DeepSpeed calls two collectives by names that PyTorch has replaced, which no user can do anything about.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
        # Else DeepSpeed asks the compiler what it could build, whose complaints fill the log, and then builds a
        # collective over shared memory, which takes 30 s. Nothing else reads this.
        deepspeed.ops.__compatible_ops__ = {}
        self.precision = config.training.compute_dtype
        self.stage = config.training.zero_optimization.stage
        self.clip = config.optimizer.gradient_clipping
        self.groups = groups
        mesh = groups.mesh
        # The only optimizer of DeepSpeed's that steps without looking at the gradients first.
        self.is_plain_optimizer = self.precision == "fp32" and self.stage == 0
        if self.stage == 3:
            check_equal_calls(config, model)
        param_groups = parameter_groups(
            model,
            config.optimizer.weight_decay,
            config.optimizer.optimizer.algorithm,
            decay_positions=config.optimizer.decay_positions,
        )
        self.grouped_weights = list_grouped_weights(param_groups, model, mesh)
        """Which group of the optimizer's each parameter is in that this rank is the first to hold."""
        self.parameter_labels = label_parameters(param_groups, model)
        """Of each parameter's name its group of the optimizer's and its part of the model (`parameter_norms.py`)."""
        self.inner_optimizer: ProjectedOptimizer = build_optimizer(
            param_groups, config.optimizer, groups, get_torch_dtype(self.precision)
        )
        self._options = [
            {k: v for k, v in group.items() if k != "params"} for group in self.inner_optimizer.param_groups
        ]
        parameters = sum(p.numel() for p in model.parameters())
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.inner_optimizer,
            config=build_deepspeed_config(config, mesh, parameters, clip=0.0 if self.is_plain_optimizer else self.clip),
            mpu=ModelParallelUnit(groups),
            dist_init_required=False,
        )
        self.inner_optimizer.reset_steps()
        if can_flatten(self.deepspeed.optimizer):
            flatten_optimizer(self.deepspeed.optimizer, groups)
        elif self.stage in (1, 2) and type(self.deepspeed.optimizer).__name__ == "DeepSpeedZeroOptimizer":
            self._refuse_unequal_groups(len(param_groups))
        if self.stage == 0 and mesh.dp_cp.size == 1:
            self.deepspeed.enable_backward_allreduce = (
                False  # else it copies all gradients to reduce them over one rank
            )
        self.deepspeed.allreduce_no_retain = partial(
            average_gradients,
            groups=groups,
            dtype=self.deepspeed.communication_data_type,
            max_elements=config.training.zero_optimization.reduce_bucket_size,
        )
        self.z_coefficient = config.training.z_loss
        self.z_loss: Tensor | None = None
        """This rank's share of the last step's z-loss, float64; None without one."""
        self.pipeline = None
        self._config, self._pipelines = config, dict[tuple[int, int], PipelineSchedule]()
        if mesh.pipeline.size > 1:
            self.pipeline = PipelineSchedule(self.deepspeed.module, config, groups)
            training_shape = (config.training.train_micro_batch_size_per_gpu, config.model.seq_length)
            self._pipelines[training_shape[0], training_shape[1] // mesh.context.size] = self.pipeline
            self.deepspeed.enable_backward_allreduce = False  # `forward_backward` asks for it
            self.deepspeed.pipeline_parallelism = True
        self._graphs: GraphedModel | None = None
        self.grad_norm: Tensor | float = 0.0
        """The global gradient norm of the last step, before clipping; infinite if the step was skipped."""
        self.skipped = False
        """Did the last step leave the weights as they were, because its gradients were not finite?"""

    def _refuse_unequal_groups(self, count: int) -> None:
        """DeepSpeed's own optimizer sums the norm of one group after the other over pipeline stages."""
        if self.groups.mesh.pipeline.size > 1 and len(set(self.groups.gather_objects(count))) > 1:
            raise UserError(
                "zero_optimization: pipeline stages have different groups of parameters here (Muon, use_mup), which "
                "DeepSpeed cannot do with overlap_comm, offload_optimizer or without contiguous_gradients; leave these"
            )

    @property
    def model(self) -> nn.Module:
        """The model, its parameters possibly sharded."""
        return self.deepspeed.module

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in float16; 1 otherwise."""
        return float(self.deepspeed.optimizer.loss_scale) if self.precision == "fp16" else 1.0

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        tokens: int,
        *,
        position_seed: int | None = None,
        progress: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """The gradient of one step: forward and backward over its micro-batches, as many as the configuration says.

        Args:
            micro_batches: this rank's, see `megatron.data.dataloader`.
            tokens: counted tokens of the whole step, over all ranks that divide the batch and all micro-batches.
            position_seed: seed of randomized positions.
            progress: called with the number of micro-batches that are done, before each.

        Returns:
            This rank's share of the mean loss per token, a float64 scalar on its device. The z-loss (`z_loss`) is no
            part of it, only of the gradient.
        """
        # DeepSpeed takes the mean over these ranks and, unless told not to, divides by the number of micro-steps.
        factor = self.groups.mesh.dp_cp.size / tokens
        if self.pipeline is not None:
            progress(0)
            total = self.pipeline.forward_backward(micro_batches, factor, position_seed)
            self.deepspeed.allreduce_gradients()
            self.z_loss = self.pipeline.z_loss / tokens if self.z_coefficient else None
            return total / tokens
        total = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        z_total = torch.zeros_like(total) if self.z_coefficient else None
        for index, batch in enumerate(micro_batches):
            progress(index)
            if index:
                self.deepspeed.step()  # ends a micro-step; the last one of a step is ended by `step`
            if z_total is not None:
                losses, log_z = self._compute_losses(batch, position_seed, with_log_z=True)
                loss, z_loss = losses.sum(), self.z_coefficient * log_z.square().sum()
                self.deepspeed.backward((loss + z_loss) * factor, scale_wrt_gas=False)
                z_total += z_loss.detach()
            else:
                loss = self._compute_losses(batch, position_seed).sum()
                self.deepspeed.backward(loss * factor, scale_wrt_gas=False)
            total += loss.detach()
        self.z_loss = None if z_total is None else z_total / tokens
        return total / tokens

    @torch.no_grad()
    def evaluate_loss(
        self, micro_batches: Sequence[Batch], *, progress: Callable[[int], None] = lambda index: None
    ) -> Tensor:
        """This rank's share of the sum of the counted tokens' losses, float64 on its device, of as many micro-batches
        as a step has; `model.eval()` comes first."""
        if self.pipeline is not None:
            progress(0)
            rows, length = micro_batches[0]["tokens"].shape
            return self._get_pipeline((rows, length)).evaluate_loss(micro_batches)
        total = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        for index, batch in enumerate(micro_batches):
            progress(index)
            total += self._compute_losses(batch, None).sum(dtype=torch.float64)
        return total

    def _get_pipeline(self, shape: tuple[int, int]) -> PipelineSchedule:
        """Return the schedule for micro-batches of a shape [B, T], which validation at other lengths has."""
        if shape not in self._pipelines:
            self._pipelines[shape] = PipelineSchedule(self.deepspeed.module, self._config, self.groups, shape)
        return self._pipelines[shape]

    def _compute_losses(self, batch: Batch, position_seed: int | None, *, with_log_z: bool = False) -> Tensor:
        """The loss of each token, 0 where it does not count, float32 [B, T]; or that and log Z, [2, B, T]."""
        device = self.groups.device
        tokens, labels, mask = (batch[n].to(device, non_blocking=True) for n in ("tokens", "labels", "loss_mask"))
        options: dict[str, Any] = {"position_seed": position_seed, "with_log_z": with_log_z}
        # These stay on the CPU, which lays tokens out.
        options |= {name: batch[name] for name in ("document_starts", "position_ids") if name in batch}
        losses: Tensor = self.deepspeed(tokens, labels=labels, **options)
        return losses * mask

    def step(self, lr: float) -> None:
        """Clip, and step with learning rate `lr`, once the gradient of a whole step is accumulated."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self.is_plain_optimizer:
            self._step_plain_optimizer()
            return
        scale = self.loss_scale
        self.deepspeed.step()
        self.skipped = not self.deepspeed.was_step_applied()
        if self.skipped and self.stage in (1, 2):
            # Offloading in half precision, DeepSpeed would add the next gradients to those that are not finite.
            sums = self.deepspeed.optimizer.__dict__.get("averaged_gradients", {})
            sums.update(dict.fromkeys(sums))
        norm = self.deepspeed.get_global_grad_norm()
        if self.stage == 0:  # this one still contains the loss scale
            norm = norm / scale
        self.grad_norm = math.inf if self.skipped else norm

    def _step_plain_optimizer(self) -> None:
        mesh = self.groups.mesh
        parameters = [p for group in self.inner_optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if is_counted_here(p, mesh)])
        if mesh.tensor.size * mesh.pipeline.size > 1:
            squares = norm.double().square()
            all_reduce_sum_(squares, self.groups, "tensor", "pipeline")
            norm = squares.sqrt().float()
        self.skipped = not bool(torch.isfinite(norm))
        self.grad_norm = math.inf if self.skipped else norm
        if self.skipped:
            # Without gradients AdamW touches neither weights nor moments, and DeepSpeed still counts the step.
            for parameter in parameters:
                parameter.grad = None
            self.deepspeed.skipped_steps += 1
        elif self.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.deepspeed.step()

    def restore_options(self) -> None:
        """Put this configuration's weight decay, betas, epsilon and bounds back after a checkpoint brought its own."""
        for group, options in zip(self.deepspeed.optimizer.param_groups, self._options, strict=True):
            group.update(options)

    def use_graphs(self, graphs: GraphedModel | None) -> None:
        """Have training micro-batches replay CUDA graphs of the model from now on; None for none."""
        if self._graphs is not None:
            self._graphs.remove()
        self._graphs = graphs
        if graphs is not None:
            graphs.install()

    def close(self) -> None:
        """Release CUDA graphs, and DeepSpeed's hooks and buffers."""
        self.use_graphs(None)
        self.deepspeed.destroy()


def check_equal_calls(config: Config, model: nn.Module) -> None:
    """Refuse what calls modules once for each document: ZeRO 3 gathers parameters at each call, by all ranks together,
    and their rows hold different numbers of documents."""
    if config.position.attention_mask != "document" or not isinstance(model, GPT):
        return
    if not model.masks_documents and model.has_attention_parameters():
        raise UserError(
            f"attention_mask: document: pos_emb {', '.join(config.position.encodings)} with score_processor "
            f"{', '.join(config.position.processors)} is computed document by document here, which "
            "zero_optimization.stage 3 cannot do; use stage 2, or another attention_backend (chunked) or pos_emb",
            "attention_mask",
        )


def build_deepspeed_config(config: Config, mesh: Mesh, parameters: int, clip: float) -> dict[str, Any]:
    """DeepSpeed's configuration of a run.

    Args:
        config: the run's.
        mesh: says among how many ranks a batch is divided.
        parameters: of the model; no bucket needs to be larger.
        clip: largest gradient norm; 0 turns DeepSpeed's clipping off.
    """
    training = config.training
    zero = training.zero_optimization.model_dump()
    for name in ("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"):
        zero[name] = min(zero[name], parameters + parameters % 2)  # allocated whole; of the first only even sizes
    for name in ("offload_optimizer", "offload_param"):
        if zero[name]["device"] == "none":
            del zero[name]
    micro, steps = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
    pipelined = mesh.pipeline.size > 1
    if pipelined:
        steps = 1  # as far as DeepSpeed is concerned (pipeline.py)
    result: dict[str, Any] = {
        "train_batch_size": micro * steps * mesh.dp_cp.size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # offloaded too, ours keeps bounds; torch's kernel for CPUs is fused
        # Nothing of DeepSpeed's own reporting: each of these costs time in every step.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    precision = training.compute_dtype
    if precision == "bf16":
        result["bf16"] = {"enabled": True, "immediate_grad_update": pipelined}
        if (steps > 1 or pipelined) and zero["stage"] > 0:
            result["data_types"] = {"grad_accum_dtype": "fp32"}  # bfloat16 would lose the small ones in the sum
    if precision == "fp16":
        fp16 = training.fp16
        result["fp16"] = {**fp16.model_dump(), "enabled": True}
    return result
