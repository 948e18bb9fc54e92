"""Keys of GPT-NeoX, KERPLE and DAPE that have no effect here, and those that are not supported, with the reasons."""

from __future__ import annotations

from typing import Any

from megatron.config.method_names import changes_scores
from megatron.config.neox_rules import (
    ChosenMethods,
    Ignored,
    Unsupported,
)

_KERNELS = "selects between equivalent kernels; `attention_backend` selects the implementation of attention"
_RECOMPUTE = "torch's own utility recomputes activations (`checkpoint_activations`)"
FLOAT32_SOFTMAX = "the softmax is always computed in float32"
_RUNTIME = "GPT-NeoX sets it at run time"
_REPORT = "`log_interval` sets when losses, times and throughput are reported"
_ELSEWHERE = "belongs to a feature that is not supported"
_GENERATION = "belongs to text generation, not to training"

_FEATURE_KEYS = (
    "expert_interval", "moe_top_k", "moe_loss_coeff", "moe_train_capacity_factor", "moe_eval_capacity_factor",
    "moe_min_capacity", "moe_token_dropping", "moe_use_residual", "moe_expert_parallel_size", "moe_type", "moe_glu",
    "moe_lbl_in_fp32", "moe_jitter_eps", "create_moe_param_group", "enable_expert_tensor_parallelism",
    "comet_workspace", "comet_project", "comet_experiment_name", "comet_tags", "comet_others",
    "gmlp_attn_dim", "scalenorm_epsilon", "param_sharing_style",
    "gradient_noise_scale_n_batches", "gradient_noise_scale_cpu_offload", "s3_chunk_size",
    "dpo_fp32", "dpo_reference_free", "dpo_beta", "kto_fp32", "kto_beta", "kto_desirable_weight",
    "kto_undesirable_weight", "fp32_reinforce", "kl_impl", "kl_div_beta", "reinforce_leave_one_out",
    "weight_server_port", "online_dataserver_ips", "online_dataserver_ports", "moe_expert_interval", "moe_router_type",
    "dim_att", "head_size", "ffn_dim",
    "mamba_selective_scan_fusion", "mamba_causal_conv_fusion", "mamba_inner_func_fusion",
    "mamba_selective_fp32_params", "mamba_use_bias_in_conv", "mamba_use_bias_in_linears",
)  # fmt: skip
_RUNTIME_KEYS = (
    "world_size", "rank", "local_rank", "iteration", "do_train", "do_valid", "do_test", "global_num_gpus",
    "is_pipe_parallel", "padded_vocab_size", "save_iters", "config_files", "user_script", "dynamic_loss_scale",
    "curriculum_seqlen", "comet_experiment",
)  # fmt: skip
_GENERATION_KEYS = (
    "text_gen_type", "precompute_model_name", "temperature", "top_p", "top_k", "return_logits", "maximum_tokens",
    "prompt_end", "sample_input_file", "sample_output_file", "num_samples", "recompute",
)  # fmt: skip

IGNORED = (
    Ignored(
        (
            "scaled_upper_triang_masked_softmax_fusion",
            "scaled_masked_softmax_fusion",
            "bias_dropout_fusion",
            "rope_fusion",
            "layernorm_fusion",
            "rmsnorm_fusion",
            "use_flashattn_swiglu",
            "fused_kernels_build_path",
        ),
        _KERNELS,
    ),
    Ignored(("attention_softmax_in_fp32",), FLOAT32_SOFTMAX),
    Ignored(
        ("use_bias_in_norms",), "GPT-NeoX never reads it: its layernorm has a bias and its rmsnorm has none, as here"
    ),
    Ignored(("fp16.auto_cast",), "a model's inputs are token ids, which are never rounded"),
    Ignored(("comms_logger",), "collectives are not logged"),
    Ignored(("slurm_comment",), "set a job's comment in slurm.options: --comment=TEXT"),
    Ignored(
        (
            "te_fp8_format",
            "te_fp8_wgrad",
            "te_fp8_amax_history_len",
            "te_fp8_amax_compute_algo",
            "te_fp8_margin",
        ),
        _ELSEWHERE,
    ),
    Ignored(("fp16_lm_cross_entropy",), "the loss is always computed in float32"),
    Ignored(("use_cpu_initialization", "lazy_mpu_init"), "initial weights are the same on every device"),
    Ignored(("output_layer_parallelism",), "the output layer is always divided along the vocabulary"),
    Ignored(("pipe_partition_method",), "layers are divided evenly; the first stages have one more if needed"),
    Ignored(
        (
            "partition_activations",
            "synchronize_each_layer",
            "contiguous_checkpointing",
            "deepspeed_activation_checkpointing",
            "profile_backward",
            "distribute_saved_activations",
        ),
        _RECOMPUTE,
    ),
    Ignored(("steps_per_print", "wall_clock_breakdown", "dump_state"), _REPORT),
    Ignored(("log_grad_norm",), "the gradient norm is always logged"),
    Ignored(("memory_profiling_path",), "memory snapshots are written to the run's folder (`save`)"),
    Ignored(("log_dir",), "the log is log.txt in the run's folder (`save`)"),
    Ignored(("wandb_init_all_ranks", "git_hash"), "rank 0 reports for all"),
    Ignored(("wandb_run_name",), "a run of Weights & Biases is named after its folder (`save`)"),
    Ignored(("checkpoint_validation_with_forward_pass",), "checkpoints are written atomically"),
    Ignored(("load_universal",), "a run can resume from its checkpoint in any layout"),
    Ignored(("seq_length_val",), "`eval_lengths` names further lengths to validate at"),
    Ignored(("use_shared_fs", "mmap_warmup", "short_seq_prob", "allow_chopped"), "datasets are megatron-core's"),
    Ignored(("override_lr_scheduler",), "the schedule always follows the configuration of the run"),
    Ignored(("optimizer.params.max_grad_norm",), "`gradient_clipping` limits the gradient norm"),
    Ignored(("fp16.fp16",), "use `fp16.enabled`"),
    Ignored(("bf16.bf16",), "use `bf16.enabled`"),
    Ignored(
        ("fp32_allreduce", "communication_data_type", "data_types"),
        "gradients are accumulated and reduced as DeepSpeed does for the precision of the run",
    ),
    Ignored(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "the optimizer is fixed"),
    Ignored(
        ("zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint"),
        "checkpoints contain the float32 masters, and a run resumes from them",
    ),
    Ignored(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        "weights are always gathered before saving",
    ),
    Ignored(
        ("zero_optimization.memory_efficient_linear", "zero_optimization.override_module_apply"),
        "belong to deepspeed.zero.Init, which is not used",
    ),
    Ignored(("zero_optimization.ignore_unused_parameters",), "every parameter is used"),
    Ignored(
        (
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.fast_init",
            "zero_optimization.offload_optimizer.pipeline_read",
            "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.cpuadam_cores_perc",
            "zero_optimization.offload_param.nvme_path",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.offload_param.max_in_cpu",
        ),
        "belongs to a kind of offloading that is not supported",
    ),
    Ignored(
        ("master_addr", "no_ssh_check", "detect_nvlink_pairs", "deepspeed_slurm", "deepspeed_mpi", "force_multi"),
        "the launcher, srun or mpirun decides how processes start and connect",
    ),
    Ignored(("comment",), "use slurm.options: [--comment=…]"),
    Ignored(("adlr_autoresume_interval", "onnx_safe", "deepscale", "deepscale_config", "deepspeed"), "obsolete"),
    Ignored(("rotary_save_freqs_buffer",), "rotary frequencies are computed, never stored"),
    Ignored(_RUNTIME_KEYS, _RUNTIME),
    Ignored(_FEATURE_KEYS, _ELSEWHERE),
    Ignored(
        ("base_shapes_file", "mup_width_scale"),
        "mup_base_hidden_size, mup_base_num_attention_heads and mup_base_num_layers define the base model",
    ),
    Ignored(_GENERATION_KEYS, _GENERATION),
    Ignored(
        ("eval_results_prefix", "eval_tasks"),
        "`./deepy.py evaluate` evaluates a run, and harness.tasks names tasks to evaluate during training",
    ),
)

_QUANTIZED = "gradients and parameters are communicated without quantization; leave it out"
_MOE = "there are no mixture-of-experts layers; leave it out to train a dense model"
_SPARSE = "sparse attention; use attention_window, as one value or a pattern of layers"
_GLOBAL = 'write [[["global"], LAYERS]], or leave attention_config out'
_RING = f"context_parallel_size divides a sequence among GPUs here; with it, {_GLOBAL}"
_RECURRENT = f"a recurrent layer has no attention scores for position encodings; {_GLOBAL}"
_GATED_MLP = f"a gated MLP over tokens has weights only up to the training length; {_GLOBAL}"
_ATTENTION_REASONS = {
    **dict.fromkeys(("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer"), _SPARSE),
    **dict.fromkeys(("mamba", "rwkv"), _RECURRENT),
    **dict.fromkeys(("gmlp", "amlp"), _GATED_MLP),
}
"""Unsupported attention types of GPT-NeoX, with reasons."""
_NODES = "set a hostfile with the machines to use, and num_gpus"
_COMPILE = (
    "training on a GPU compiles all but attention unless compile_regions is false; attention_backend: flex compiles "
    "attention"
)
DEEPSPEED_ADVICE = "DeepSpeed's section of this name is not passed on; leave it out"

_LABEL_DATA_KEYS = (
    "train_label_data_paths", "valid_label_data_paths", "test_label_data_paths", "train_reward_data_paths",
    "valid_reward_data_paths", "test_reward_data_paths", "pos_train_data_paths", "neg_train_data_paths",
    "pos_valid_data_paths", "neg_valid_data_paths", "pos_test_data_paths", "neg_test_data_paths",
    "pos_train_label_data_paths", "neg_train_label_data_paths", "pos_valid_label_data_paths",
    "neg_valid_label_data_paths", "pos_test_label_data_paths", "neg_test_label_data_paths",
)  # fmt: skip
_DEEPSPEED_SECTIONS = (
    "activation_checkpointing", "autotuning", "checkpoint", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "elasticity", "flops_profiler", "tensorboard", "wandb",
)  # fmt: skip

UNSUPPORTED = (
    Unsupported(("sparsity_config", "sparse_attention"), _SPARSE, (None, False, {})),
    Unsupported(
        ("te_columnparallel", "te_rowparallel", "te_layernorm_mlp", "te_mha", "te_fp8_mha"),
        "Transformer Engine's FP8 layers; use precision: bf16",
    ),
    Unsupported(("num_unique_layers",), "layers do not share weights; leave it out"),
    Unsupported(("opt_pos_emb_offset",), "positions start at 0; leave it out", (None, 0)),
    Unsupported(
        ("soft_prompt_tuning",),
        "prompts cannot be tuned; finetune: true trains all weights of a loaded model",
        (None, {}, {"enabled": False}),
    ),
    Unsupported(("moe_num_experts",), _MOE, (None, 0, 1)),
    Unsupported(("use_tutel",), _MOE),
    Unsupported(
        ("coord_check", "save_base_shapes"),
        "use mup_base_hidden_size and the other mup_base keys; tools/mup/coordinate_check.py plots the check",
    ),
    Unsupported(
        ("use_bnb_optimizer",), "moments are float32; zero_optimization.offload_optimizer moves them to host memory"
    ),
    Unsupported(
        ("zero_optimization.round_robin_gradients",),
        "DeepSpeed would mix up the float32 masters of parameters, also in checkpoints; leave it out",
    ),
    Unsupported(
        ("zero_optimization.offload_optimizer.ratio",),
        "the optimizer is offloaded completely or not at all; use 1",
        (None, 1, 1.0),
    ),
    Unsupported(("zero_optimization.offload_optimizer.super_offload",), "use offload_optimizer without it"),
    Unsupported(
        tuple(
            f"zero_optimization.zero_quantized_{tensors}"
            for tensors in ("weights", "nontrainable_weights", "gradients")
        ),
        _QUANTIZED,
    ),
    Unsupported(("zero_optimization.zero_hpz_partition_size",), "use stage 2 within one node", (None, 1)),
    Unsupported(("zero_optimization.legacy_stage1", "zero_optimization.parameter_alignment"), "use stage 1 without it"),
    Unsupported(("zero_optimization.stage3_use_all_reduce_for_fetch_params",), "parameters are gathered; leave it out"),
    Unsupported(("zero_optimization.stage3_model_persistence_threshold",), "use stage3_param_persistence_threshold"),
    Unsupported(
        ("recompute_method",),
        "checkpoint_activations: true recomputes all layers, checkpoint_num_layers at a time",
        (None, "uniform"),
    ),
    Unsupported(
        ("recompute_modules",),
        "checkpoint_activations: selective recomputes attention, and true whole layers",
        (None, ["core_attn"]),
    ),
    # torchtitan's and transformers'.
    Unsupported(("compile", "torch_compile"), _COMPILE, (None, False, {}, {"enable": False})),
    Unsupported(("checkpoint_in_cpu",), "activations are recomputed, not moved to the CPU; use checkpoint_activations"),
    Unsupported(("fp16.consecutive_hysteresis",), "use hysteresis without it", (None, False)),
    Unsupported(("amp",), "use precision: bf16 or fp16", (None, {}, {"enabled": False})),
    Unsupported(("scheduler",), "use lr_decay_style, lr_decay_iters, min_lr and warmup"),
    Unsupported(("use_checkpoint_lr_scheduler",), "the schedule follows the configuration of the run; leave it out"),
    Unsupported(
        ("prescale_gradients", "sparse_gradients"), "dense gradients are averaged after the reduction; leave it out"
    ),
    Unsupported(
        ("gradient_predivide_factor",), "gradients are averaged after the reduction; leave it out", (None, 1, 1.0)
    ),
    Unsupported(("exit_interval",), "give train_iters and, for the schedule, lr_decay_iters"),
    Unsupported(
        ("checkpoint_scale",), "name the steps in extra_save_iters, or use checkpoint_factor", (None, "linear")
    ),
    Unsupported(
        ("no_save_optim", "no_save_rng"), "checkpoints are always complete, so that resuming is exact; leave it out"
    ),
    Unsupported(("no_load_optim", "no_load_rng"), "use finetune: true to load weights only"),
    Unsupported(("s3_path",), "checkpoints are written to a folder; copy them from there"),
    Unsupported(
        _LABEL_DATA_KEYS,
        "only language modeling on plain tokens is supported; use train_data_paths",
        (None, []),
    ),
    Unsupported(("train_impl",), "only language modeling is supported; leave it out", (None, "normal")),
    Unsupported(("dataset_impl",), "only language modeling is supported; leave it out", (None, "gpt2")),
    Unsupported(
        ("pack_impl",), "documents are always packed; attention_mask: document separates them", (None, "packed")
    ),
    Unsupported(("serve_model_weights",), "weights are read from checkpoints; leave it out"),
    Unsupported(("char_level_ppl",), "use `./deepy.py evaluate`, which reports perplexity and bits per byte"),
    Unsupported(
        ("log_grad_pct_zeros", "log_optimizer_states", "log_gradient_noise_scale"),
        "not logged; log_param_norm logs norms of weights and updates",
    ),
    Unsupported(("wandb_host",), "set the environment variable WANDB_BASE_URL", (None, "https://api.wandb.ai")),
    Unsupported(("use_comet",), "use TensorBoard or Weights & Biases"),
    Unsupported(("adlr_autoresume",), "resume with load"),
    Unsupported(("sequence_parallel",), "use context_parallel_size, which shards all activations of a sequence"),
    Unsupported(("use_axonn_model_parallelism", "optimize_axonn_communication"), "use ZeRO"),
    Unsupported(
        ("depth_model_parallel_size", "row_model_parallel_size", "column_model_parallel_size"), "use ZeRO", (None, 1)
    ),
    Unsupported(("include", "exclude"), _NODES),
    Unsupported(("num_nodes",), "use nodes", (None, -1, 1)),
    Unsupported(("autotuning_run",), "layouts are not tuned on GPUs; `./deepy.py plan` finds the fastest by formulas"),
    Unsupported(
        _DEEPSPEED_SECTIONS,
        DEEPSPEED_ADVICE,
        (None, {}, {"enabled": False}),
    ),
)


def find_attention_config_problem(value: Any, methods: ChosenMethods) -> str | None:
    """Return what is wrong with `[[["global"], 12]]`, or None. Flash attention counts as global attention."""
    if value is None:
        return None
    is_nested_list = isinstance(value, list) and all(isinstance(item, list) and item for item in value)
    patterns = [item[0] if isinstance(item[0], list) else [item[0]] for item in value] if is_nested_list else [[value]]
    others = sorted({str(name) for names in patterns for name in names if name not in ("global", "flash")})
    reasons: dict[str, list[str]] = {}
    for name in others:
        reasons.setdefault(_describe_unsupported_attention(name), []).append(name)
    refused = [f"attention {', '.join(names)} is not supported: {reason}" for reason, names in reasons.items()]
    return "; ".join(refused) or None


def _describe_unsupported_attention(name: str) -> str:
    """Return why an attention type of GPT-NeoX is not supported, and the alternative."""
    if name.startswith("ring"):  # ring, ringX1 etc.: global attention on several GPUs
        return _RING
    return _ATTENTION_REASONS.get(name, f"GPT-NeoX has no such attention type; {_GLOBAL}")


def find_layer_scaling_problem(value: Any, methods: ChosenMethods) -> str | None:
    """Return what is wrong with `apply_query_key_layer_scaling`, or None.

    GPT-NeoX divides q·k of layer n by n, and multiplies by n after all terms are added to the scores (`coeff` in its
    ParallelSelfAttention). That has no effect if nothing is added.
    """
    if value not in (None, True, False):
        return f"is {value!r}; it must be true or false"
    if not value:
        return None
    changed = [
        *(f"pos_emb {name}" for name in methods.encodings if changes_scores(name)),
        *(f"score_processor {name}" for name in methods.processors if name != "none"),
    ]
    if not changed:
        return None
    return (
        f"true is not supported with {' and '.join(changed)}: GPT-NeoX multiplies by n what layer n adds to its "
        "scores, and Farfield does not; false trains the method as in its paper"
    )
