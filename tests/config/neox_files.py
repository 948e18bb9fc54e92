"""Keys and values of other projects' stock configurations that must load.

GPT-NeoX: configs/125M.yml, configs/local_setup.yml, configs/bf16_125M.yml. KERPLE: kerple_configs/train.yml,
local_setup.yml and a generated experiment. DAPE: configs/125M/512/*.yml.
"""

from typing import Any

ZERO = {
    "stage": 1,
    "allgather_partitions": True,
    "allgather_bucket_size": 500000000,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500000000,
    "contiguous_gradients": True,
}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


def adam(lr: float, beta2: float) -> dict[str, Any]:
    return {"type": "Adam", "params": {"lr": lr, "betas": [0.9, beta2], "eps": 1.0e-8}}


NEOX_125M: dict[str, Any] = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "norm": "layernorm",
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "gpt_j_residual": False,
    "output_layer_parallelism": "column",
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "rope_fusion": False,
    "layernorm_fusion": False,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": adam(0.0006, 0.95),
    "min_lr": 0.00006,
    "zero_optimization": ZERO,
    "train_micro_batch_size_per_gpu": 4,
    "data_impl": "mmap",
    "checkpoint_activations": True,
    "checkpoint_num_layers": 1,
    "partition_activations": True,
    "synchronize_each_layer": True,
    "gradient_clipping": 1.0,
    "weight_decay": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fp16": FP16,
    "train_iters": 320000,
    "lr_decay_iters": 320000,
    "distributed_backend": "nccl",
    "lr_decay_style": "cosine",
    "warmup": 0.01,
    "checkpoint_factor": 10000,
    "eval_interval": 1000,
    "eval_iters": 10,
    "log_interval": 100,
    "steps_per_print": 10,
    "keep_last_n_checkpoints": 4,
    "wall_clock_breakdown": True,
    "hostfile": "/mock_path",
}

NEOX_LOCAL_SETUP: dict[str, Any] = {
    "data_path": "data/enwik8/enwik8_text_document",
    "vocab_file": "data/gpt2-vocab.json",
    "merge_file": "data/gpt2-merges.txt",
    "save": "checkpoints",
    "load": "checkpoints",
    "checkpoint_validation_with_forward_pass": False,
    "tensorboard_dir": "tensorboard",
    "log_dir": "logs",
    "use_wandb": True,
    "wandb_host": "https://api.wandb.ai",
    "wandb_project": "neox",
}

NEOX_BF16: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "fp32_allreduce": True,
}

KERPLE_TRAIN: dict[str, Any] = {
    "pipe-parallel-size": 1,
    "model-parallel-size": 1,
    "num-layers": 12,
    "hidden-size": 768,
    "num-attention-heads": 12,
    "seq-length": 512,
    "seq-length-val": 2048,
    "max-position-embeddings": 512,
    "norm": "layernorm",
    "no-weight-tying": True,
    "scaled-upper-triang-masked-softmax-fusion": False,
    "bias-gelu-fusion": False,
    "optimizer": adam(0.0006, 0.999),
    "zero_optimization": {**ZERO, "stage": 0, "cpu_offload": False},
    "train_micro_batch_size_per_gpu": 32,
    "data-impl": "mmap",
    "split": "949,50,1",
    "checkpoint-activations": True,
    "checkpoint-num-layers": 1,
    "partition-activations": True,
    "synchronize-each-layer": True,
    "gradient_clipping": 1.0,
    "weight-decay": 0.0,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "fp16": {**FP16, "type": "bfloat16"},
    "fp32_allreduce": True,
    "train-iters": 50000,
    "lr-decay-iters": 50000,
    "distributed-backend": "nccl",
    "lr-decay-style": "cosine",
    "warmup": 0.01,
    "save-interval": 10000,
    "eval-interval": 1000,
    "eval-iters": 10,
    "log-interval": 100,
    "steps_per_print": 10,
    "keep-last-n-checkpoints": 1,
    "wall_clock_breakdown": True,
}

KERPLE_LOCAL_SETUP: dict[str, Any] = {
    "vocab-file": "data/gpt2-vocab.json",
    "merge-file": "data/gpt2-merges.txt",
    "checkpoint_validation_with_forward_pass": False,
    "tensorboard-dir": "tensorboard",
    "use_wandb": False,
    "wandb_host": "https://api.wandb.ai",
    "wandb_project": "neox",
}

KERPLE_EXPERIMENT: dict[str, Any] = {
    "save": "kerple_power_ap__github_1235_checkpoints",
    "load": "kerple_power_ap__github_1235_checkpoints",
    "log-dir": "kerple_power_ap__github_1235_logs",
    "seed": 1235,
    "data-path": "data/github/github_text_document",
    "pos-emb": "kerple_power_ap_",
}

DAPE_125M: dict[str, Any] = {
    **{
        name.replace("_", "-"): value
        for name, value in NEOX_125M.items()
        if name not in ("rope_fusion", "layernorm_fusion")
    },
    "zero-optimization": ZERO,
    "seq-length": 512,
    "train-micro-batch-size-per-gpu": 32,
    "mlp_width": 32,
    "train-iters": 50000,
    "lr-decay-iters": 50000,
    "eval-interval": 5000,
    "eval-iters": 20,
    "save": "checkpoints",
    "load": "checkpoints",
    "tensorboard-dir": "tensorboard",
    "log-dir": "logs",
}


def dape(pos_emb: str, **more: Any) -> dict[str, Any]:
    """Return one of DAPE's configurations, which differ in these keys."""
    return {**DAPE_125M, "pos-emb": pos_emb, **more}


DAPE: dict[str, dict[str, Any]] = {
    "125M": dape("rotary"),
    "125M_alibi": dape("alibi", noise_seq_length=128),
    "125M_alibi_c": dape("alibi_c", noise_seq_length=128),
    "125M_alibi_capev2": dape("alibi_capev2", capev2_kernel=3, noise_seq_length=512),
    "125M_cope": dape("cope"),
    "125M_fire": dape("fire", noise_seq_length=128),
    "125M_fire_c": dape("fire_c", noise_seq_length=128),
    "125M_kerple": dape("kerple", noise_seq_length=128),
    "125M_kerple_c": dape("kerple_c", noise_seq_length=128),
    "125M_kerple_capev2": dape("capev2", capev2_kernel=3, noise_seq_length=512),
    "125M_none": dape("none"),
    "125M_none_c": dape("nope_c"),
    "125M_none_capev2": dape("nope_c_ffn"),
    "125M_rpe": dape("rpe"),
    "125M_transformer_xl": dape("xl_bias"),
}
