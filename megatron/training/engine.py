"""DeepSpeed engine of a run, and the tasks that DeepSpeed leaves to its caller.

The engine averages gradients over the ranks, shards by ZeRO stage, keeps float32 masters, scales the loss in float16,
clips, and steps. `Engine` hides the differences between its optimizers, so that the loop sees one behavior:

* A step whose gradients are not finite changes no weight, in every precision. DeepSpeed's float32 optimizer without
  ZeRO has no such check, so its clipping is done here.
* The loss is scaled in float16 at every ZeRO stage. Without ZeRO, DeepSpeed divides the gradients by the loss scale but
  does not multiply the loss by it, so this is done here.
* The gradient norm of every step is available, without the loss scale.
* The loss is divided by the tokens of the whole step, over data × context ranks and micro-steps. Any split of the same
  global batch therefore gives the same gradient, even if masks leave different numbers of tokens.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.schema import Config
from megatron.data.torch_data import Batch
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import ModelParallelUnit, ProcessGroups
from megatron.distributed.sharding import all_reduce_sum_, is_owned_by_rank
from megatron.model.device_dtype import get_torch_dtype
from megatron.model.gpt import GPT
from megatron.model.graphed_model import GraphedModel
from megatron.model.parameter_groups import build_parameter_groups
from megatron.training.optimizer import build_optimizer, label_parameters, list_grouped_weights
from megatron.training.pipeline import PipelineSchedule
from megatron.training.projected_optimizers import ProjectedOptimizer
from megatron.utils.errors import UserError
from megatron.utils.imports import trim_imports


class Engine:
    """Training of one process: forward, backward, step. Wraps DeepSpeed's engine (`.deepspeed`)."""

    def __init__(self, config: Config, model: nn.Module, groups: ProcessGroups) -> None:
        with trim_imports():
            import deepspeed  # after `init_distributed` has chosen the accelerator

            # ZeRO would import this later, which compiles three functions of an optimizer that Farfield does not offer.
            import deepspeed.runtime.zero.muon.muon_optimizer

            from megatron.training.zero_optimizer import average_gradients, can_flatten, flatten_optimizer

        # DeepSpeed calls two collectives by deprecated names, on which users cannot act.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
        # Otherwise DeepSpeed queries the compiler, whose complaints fill the log, and builds a shared-memory
        # collective, which takes 30 s. Nothing else reads this attribute.
        deepspeed.ops.__compatible_ops__ = {}
        self.precision = config.training.compute_dtype
        self.stage = config.training.zero_optimization.stage
        self.clip = config.optimizer.gradient_clipping
        self.groups = groups
        mesh = groups.mesh
        # DeepSpeed's only optimizer that steps without checking the gradients first.
        self.is_plain_optimizer = self.precision == "fp32" and self.stage == 0
        if self.stage == 3:
            check_equal_calls(config, model)
        param_groups = build_parameter_groups(
            model,
            config.optimizer.weight_decay,
            config.optimizer.optimizer.algorithm,
            decay_positions=config.optimizer.decay_positions,
        )
        self.grouped_weights = list_grouped_weights(param_groups, model, mesh)
        """Optimizer group of each parameter whose first copy is on this rank."""
        self.parameter_labels = label_parameters(param_groups, model)
        """Optimizer group and module of each parameter, by name (`ParameterNorms`)."""
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
            self._check_equal_groups(len(param_groups))
        if self.stage == 0 and mesh.dp_cp.size == 1:
            self.deepspeed.enable_backward_allreduce = (
                False  # otherwise it copies all gradients to reduce them over one rank
            )
        self.deepspeed.allreduce_no_retain = partial(
            average_gradients,
            groups=groups,
            dtype=self.deepspeed.communication_data_type,
            max_elements=config.training.zero_optimization.reduce_bucket_size,
        )
        self.z_coefficient = config.training.z_loss
        self.z_loss: Tensor | None = None
        """This rank's share of the last step's z-loss, float64, or None without z-loss."""
        self.pipeline = None
        self._config, self._pipelines = config, dict[tuple[int, int], PipelineSchedule]()
        if mesh.pipeline.size > 1:
            self.pipeline = PipelineSchedule(self.deepspeed.module, config, groups)
            training_shape = (config.training.train_micro_batch_size_per_gpu, config.model.seq_length)
            self._pipelines[training_shape[0], training_shape[1] // mesh.context.size] = self.pipeline
            self.deepspeed.enable_backward_allreduce = False  # `forward_backward` calls the reduction
            self.deepspeed.pipeline_parallelism = True
        self._graphs: GraphedModel | None = None
        self.grad_norm: Tensor | float = 0.0
        """Global gradient norm of the last step, before clipping; infinite if the step was skipped."""
        self.skipped = False
        """True if the last step changed no weights because its gradients were not finite."""

    def _check_equal_groups(self, count: int) -> None:
        """Raise UserError if pipeline stages have different groups.

        DeepSpeed's optimizer sums norms over stages group by group.
        """
        if self.groups.mesh.pipeline.size > 1 and len(set(self.groups.gather_objects(count))) > 1:
            raise UserError(
                "zero_optimization: pipeline stages have different parameter groups here (Muon, use_mup), which "
                "DeepSpeed does not support with overlap_comm or offload_optimizer or without contiguous_gradients"
            )

    @property
    def model(self) -> nn.Module:
        """Model, whose parameters may be sharded."""
        return self.deepspeed.module

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in float16; 1 otherwise."""
        return float(self.deepspeed.optimizer.loss_scale) if self.precision == "fp16" else 1.0

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        tokens: int,
        *,
        position_seed: int | None = None,
        progress: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Compute the gradient of one step: forward and backward passes over all its micro-batches.

        Args:
            micro_batches: micro-batches of this rank, see `megatron.data.torch_data`.
            tokens: scored tokens of the whole step, over all ranks that divide the batch and all micro-batches.
            position_seed: seed of randomized positions.
            progress: called with the number of finished micro-batches, before each.

        Returns:
            This rank's share of the mean loss per token, a float64 scalar on its device. It excludes the z-loss
            (`z_loss`), which is part of the gradient only.
        """
        # DeepSpeed averages over these ranks and, by default, divides by the number of micro-steps.
        factor = self.groups.mesh.dp_cp.size / tokens
        if self.stage == 0:
            factor *= self.loss_scale
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
                self.deepspeed.step()  # ends a micro-step; `step` ends the last one of a step
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
        """Return this rank's share of the summed loss of scored tokens, float64 on its device.

        Call `model.eval()` first, and pass as many micro-batches as a step has.
        """
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
        """Return the schedule for micro-batches of shape [B, T]; validation at other lengths needs its own."""
        if shape not in self._pipelines:
            self._pipelines[shape] = PipelineSchedule(self.deepspeed.module, self._config, self.groups, shape)
        return self._pipelines[shape]

    def _compute_losses(self, batch: Batch, position_seed: int | None, *, with_log_z: bool = False) -> Tensor:
        """Return the loss of each token, 0 if not scored, float32 [B, T]; or loss and log Z, [2, B, T]."""
        device = self.groups.device
        tokens, labels, mask = (batch[n].to(device, non_blocking=True) for n in ("tokens", "labels", "loss_mask"))
        options: dict[str, Any] = {"position_seed": position_seed, "with_log_z": with_log_z}
        # These stay on the CPU, where document layouts are computed.
        options |= {name: batch[name] for name in ("document_starts", "position_ids") if name in batch}
        losses: Tensor = self.deepspeed(tokens, labels=labels, **options)
        return losses * mask

    def step(self, lr: float) -> None:
        """Clip and step with learning rate `lr`, after the gradient of a whole step has accumulated."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self.is_plain_optimizer:
            self._step_plain_optimizer()
            return
        scale = self.loss_scale
        self.deepspeed.step()
        self.skipped = not self.deepspeed.was_step_applied()
        if self.skipped and self.stage in (1, 2):
            # With offloading in half precision, DeepSpeed would add the next gradients to the non-finite ones.
            sums = self.deepspeed.optimizer.__dict__.get("averaged_gradients", {})
            sums.update(dict.fromkeys(sums))
        norm = self.deepspeed.get_global_grad_norm()
        if self.stage == 0:  # this norm still includes the loss scale
            norm = norm / scale
        self.grad_norm = math.inf if self.skipped else norm

    def _step_plain_optimizer(self) -> None:
        mesh = self.groups.mesh
        parameters = [p for group in self.inner_optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if is_owned_by_rank(p, mesh)])
        if mesh.tensor.size * mesh.pipeline.size > 1:
            squares = norm.double().square()
            all_reduce_sum_(squares, self.groups, "tensor", "pipeline")
            norm = squares.sqrt().float()
        self.skipped = not bool(torch.isfinite(norm))
        self.grad_norm = math.inf if self.skipped else norm
        if self.skipped:
            # Without gradients AdamW changes neither weights nor moments, and DeepSpeed still counts the step.
            for parameter in parameters:
                parameter.grad = None
            self.deepspeed.skipped_steps += 1
        elif self.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        self.deepspeed.step()

    def restore_options(self) -> None:
        """Restore this configuration's weight decay, betas, epsilon and bounds after a checkpoint replaced them."""
        for group, options in zip(self.deepspeed.optimizer.param_groups, self._options, strict=True):
            group.update(options)

    def use_graphs(self, graphs: GraphedModel | None) -> None:
        """Replay CUDA graphs for training micro-batches from now on, or stop replaying if `graphs` is None."""
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
    """Raise UserError if modules are called once per document under ZeRO 3.

    ZeRO 3 gathers parameters at each call on all ranks together, but the rows of ranks contain different numbers of
    documents.
    """
    if config.position.attention_mask != "document" or not isinstance(model, GPT):
        return
    if not model.masks_documents and model.has_attention_parameters():
        raise UserError(
            f"attention_mask: document: pos_emb {', '.join(config.position.encodings)} with score_processor "
            f"{', '.join(config.position.processors)} is computed one document at a time here, which "
            "zero_optimization.stage 3 does not support; use stage 2, attention_backend chunked, or another pos_emb",
            "attention_mask",
        )


def build_deepspeed_config(config: Config, mesh: Mesh, parameters: int, clip: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run.

    Args:
        config: configuration of the run.
        mesh: mesh of the ranks that divide a batch.
        parameters: number of parameters of the model; larger buckets are useless.
        clip: maximum gradient norm; 0 turns DeepSpeed's clipping off.
    """
    training = config.training
    zero = training.zero_optimization.model_dump()
    for name in ("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"):
        zero[name] = min(zero[name], parameters + parameters % 2)  # allocated in full; the first one must be even
    for name in ("offload_optimizer", "offload_param"):
        if zero[name]["device"] == "none":
            del zero[name]
    micro, steps = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
    pipelined = mesh.pipeline.size > 1
    if pipelined:
        steps = 1  # for DeepSpeed (pipeline.py)
    result: dict[str, Any] = {
        "train_batch_size": micro * steps * mesh.dp_cp.size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # ours keeps bounds if offloaded; torch's CPU kernel is fused
        # DeepSpeed's own reporting is off: it costs time in every step.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    precision = training.compute_dtype
    if precision == "bf16":
        result["bf16"] = {"enabled": True, "immediate_grad_update": pipelined}
        if (steps > 1 or pipelined) and zero["stage"] > 0:
            result["data_types"] = {"grad_accum_dtype": "fp32"}  # bfloat16 would lose small terms in the sum
    if precision == "fp16":
        fp16 = training.fp16
        result["fp16"] = {**fp16.model_dump(), "enabled": True}
    return result
