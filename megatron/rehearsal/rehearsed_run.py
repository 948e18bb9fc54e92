"""Configuration of a rehearsal, and the synthetic corpus that replaces missing data.

The configuration consists of the run's own configuration, resolved for its machines, and the shortened one to execute.

The rehearsal keeps everything that determines what a rank computes, stores and communicates. It changes the length of
the run and its paths: three steps, a validation of one batch and a final checkpoint, all in a temporary folder. If a
step accumulates more micro-batches than a rank can have in flight, the rest repeat the same operations, so only
`MAX_MICRO_BATCHES` of them run.

The synthetic corpus has random tokens and a given vocabulary size. It is a corpus folder as made by `prepare`, with a
tokenizer of made-up words, so the run reads it like any other corpus. The tokens themselves do not matter: losses on
the null device are meaningless.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.config.schema import Config
from megatron.config.validation import check_config
from megatron.data.corpus_metadata import CORPUS_FILE, CorpusMetadata, SplitCounts, SplitName, get_split_basename
from megatron.data.indexed_dataset import HEADER, MAGIC
from megatron.data.load_tokenizer import find_vocab_size, read_vocabulary
from megatron.data.tokenizers import HuggingFaceTokenizer
from megatron.distributed.hardware import detect_memory
from megatron.distributed.mesh import ParallelSizes
from megatron.options.data import SPLITS, TEXT_KEYS, DataOptions, Split
from megatron.options.launch import LaunchOptions
from megatron.options.training import ACCUMULATION_KEY, GLOBAL_BATCH_KEY
from megatron.planning.plan import find_largest_stage
from megatron.training.check_resources import START_ANYWAY_HINT, count_offloaded_bytes
from megatron.training.check_start import check_data_files, check_run_folder
from megatron.training.resolve_run import resolve_remote_run
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.formatting import format_bytes

END_TOKEN = "<|endoftext|>"
INT32 = 4
"""Data type code of tokens in an index file."""
MIN_TOKENS = 1 << 20
"""Minimum number of tokens of each split, which gives readers room to skip; longer sequences get more."""


def write_synthetic_corpus(
    folder: Path, vocab_size: int, seq_length: int, document_length: int | None = None
) -> dict[str, Path]:
    """Write a corpus folder and return the dataset of each split, as `train_data_paths` and similar keys name it.

    Args:
        folder: folder to create.
        vocab_size: vocabulary size of the tokenizer, including the end-of-document token.
        seq_length: sequence length of the run; every split contains several sequences.
        document_length: length of a document in tokens; None for almost no document boundaries.

    Raises:
        OSError: if the files cannot be written.
    """
    folder.mkdir(parents=True)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer_file.write_text(json.dumps(_describe_tokenizer(vocab_size)), encoding="utf-8")
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    generator, num_tokens = np.random.default_rng(0), max(MIN_TOKENS, 4 * (seq_length + 1))
    counts: dict[SplitName, SplitCounts] = {}
    prefixes: dict[str, Path] = {}
    for split in SPLITS:
        prefix = folder / get_split_basename(split)
        tokens = generator.integers(0, vocab_size, num_tokens, dtype=np.int32)
        if document_length is not None:
            tokens[document_length - 1 :: document_length] = tokenizer.eod
        tokens[-1] = tokenizer.eod
        _write_dataset(prefix, tokens)
        counts[split] = SplitCounts(documents=1, tokens=num_tokens, bytes=num_tokens)
        prefixes[split] = prefix
    metadata = CorpusMetadata(made_from={"synthetic": vocab_size}, tokenizer=tokenizer.metadata, splits=counts)
    (folder / CORPUS_FILE).write_text(metadata.model_dump_json(), encoding="utf-8")
    return prefixes


def _write_dataset(prefix: Path, tokens: np.ndarray) -> None:
    """Write an indexed dataset of one document. Importing megatron-core's builder would take seconds."""
    tokens.astype("<i4").tofile(f"{prefix}.bin")
    header = HEADER.pack(MAGIC, 1, INT32, 1, 2)
    index = (np.array([len(tokens)], "<i4"), np.array([0], "<i8"), np.array([0, 1], "<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in index))


def _describe_tokenizer(vocab_size: int) -> dict[str, object]:
    """Return a tokenizer.json with the words w1, w2 and so on."""
    words = {END_TOKEN: 0} | {f"w{index}": index for index in range(1, vocab_size)}
    end = {"id": 0, "content": END_TOKEN, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": END_TOKEN},
    }


STEPS = 3
"""Optimizer steps. The first creates the optimizer states, so the second is the first complete one."""
MAX_MICRO_BATCHES = 2
"""Micro-batches per step without a pipeline. A pipeline uses its number of stages plus one if that many are in
flight."""
GPT2_VOCAB_SIZE = 50257


@dataclass(frozen=True)
class RehearsedRun:
    """Run and its rehearsal."""

    config: Config
    """Configuration of the run, resolved for all its ranks."""
    sizes: ParallelSizes
    devices_per_node: int
    vocab_size: int
    synthetic_splits: tuple[Split, ...] = ()
    """Splits with synthetic data; empty if the run's own data are available or it trains on a task."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    requested: Config | None = None
    """Configuration as loaded, for its number of machines and with its launcher."""

    @property
    def world_size(self) -> int:
        return self.sizes.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rehearsed step."""
        return min(self.config.training.gradient_accumulation_steps, count_micro_batches(self.sizes))

    def build_config(self, folder: Path) -> Config:
        """Build the configuration to execute. Create a synthetic corpus if the run's own is unavailable.

        Args:
            folder: folder of the rehearsal, which receives all files.
        """
        training, micro_batches = self.config.training, self.micro_batches
        keys: dict[str, object] = {
            "save": str(folder / "run"),
            "load": None,
            "finetune": False,
            "rollback": False,
            "train_iters": STEPS,
            "checkpoint_factor": None,
            "extra_save_iters": [],
            "keep_last_n_checkpoints": None,
            "log_interval": 1,
            "eval_iters": 1 if training.eval_iters is None else min(1, training.eval_iters),
            "data_cache": str(folder / "data_cache"),
            "tensorboard_dir": None,
            "use_wandb": False,
            "use_trackio": False,
            "launcher": "auto",
            "hostfile": None,
            "hang_timeout": None,
            "check_resources": False,  # the null device enforces memory limits, and zeros use no disk space
            ACCUMULATION_KEY: micro_batches,
            GLOBAL_BATCH_KEY: training.train_micro_batch_size_per_gpu * micro_batches * self.sizes.data,
        }
        if self.synthetic_splits:
            keys |= self._make_corpus(folder / "corpus")
        return self.config.replace(**keys)

    def _make_corpus(self, folder: Path) -> dict[str, object]:
        length = self.config.model.seq_length
        # Rows contain several documents whose starts do not coincide with row starts.
        document_length = max(length * 2 // 5, 2) if self.config.position.attention_mask == "document" else None
        prefixes = write_synthetic_corpus(folder, self.vocab_size, length, document_length)
        return _describe_text({split: [str(prefixes[split])] for split in self.synthetic_splits}) | {
            "eod_mask_loss": self.config.data.eod_mask_loss
        }


def count_micro_batches(sizes: ParallelSizes) -> int:
    """Return the maximum number of micro-batches of a rehearsed step."""
    return MAX_MICRO_BATCHES if sizes.pipeline == 1 else sizes.pipeline + 1


def list_named_splits(data: DataOptions) -> list[Split]:
    """List the splits for which a configuration names data."""
    if data.data_path is not None:
        return list(SPLITS)
    return [split for split in SPLITS if getattr(data, f"{split}_data_paths")]


def plan_rehearsal(
    config: Config,
    num_gpus: int | None,
    devices_per_node: int | None,
    vocab_size: int | None,
    gpu_memory: int | None = None,
) -> RehearsedRun:
    """Plan the rehearsal of a configuration.

    Args:
        config: configuration as loaded.
        num_gpus, devices_per_node: as for `LaunchOptions.choose_gpus`.
        vocab_size: vocabulary size; by default that of the data if available, else GPT-2's.
        gpu_memory: memory of each GPU, in bytes; if None, the rehearsal itself finds out-of-memory errors.

    Raises:
        UserError: if `train` would reject the configuration, or the GPUs do not fill whole nodes.
    """
    world_size, per_node = config.launch.choose_gpus(num_gpus, devices_per_node)
    if world_size % per_node:
        raise UserError(
            f"--gpus {world_size}: not a multiple of {per_node} GPUs per node; change it, or set --gpus-per-node"
        )
    check_run_folder(config)
    missing = _find_missing_data(config)
    notes = []
    known_size = find_vocab_size(config.data)
    if vocab_size is not None and known_size not in (None, vocab_size):
        raise UserError(f"--vocabulary is {vocab_size}, but the data have {known_size} tokens")
    size = known_size or vocab_size or GPT2_VOCAB_SIZE
    keys: dict[str, object] = {"launcher": "auto", "hostfile": None, "device": "cuda", "num_gpus": per_node}
    keys |= {"profile": {}, "memory_snapshot": None, "harness": {}}  # meaningless on a device that computes nothing
    synthetic_splits: tuple[Split, ...] = ()
    if missing is not None:
        notes.append(f"{missing}; random text with a vocabulary of {size:,} tokens replaces them (--vocabulary)")
        synthetic_splits = tuple(list_named_splits(config.data)) or SPLITS
        keys |= _describe_text({split: ["synthetic"] for split in synthetic_splits})
    nodes = world_size // per_node
    notes += _describe_machines(config.launch, per_node, nodes)
    requested = config.replace(num_gpus=per_node, nodes=nodes)
    config = config.replace(**keys, nodes=nodes)
    check_config(config)
    resolved = resolve_remote_run(config, gpu_memory=gpu_memory)
    config, sizes, stages = resolved.config, resolved.sizes, resolved.stages
    if len(stages) > 1:
        largest = find_largest_stage(stages, sizes, size)
        notes.append(f"rehearsing stage {largest.index + 1} of {len(stages)}, which needs the most memory")
        config = largest.config.replace(stages=[])
    run = RehearsedRun(config, sizes, per_node, size, synthetic_splits, requested=requested)
    _check_host_memory(run, detect_memory())
    return replace(run, notes=(*notes, *_describe_changes(run)))


def _describe_machines(launch: LaunchOptions, per_node: int, nodes: int) -> list[str]:
    """Describe how the rehearsal's machines differ from the configuration's."""
    notes = []
    for key, asked, taken in (("num_gpus", launch.num_gpus, per_node), ("nodes", launch.nodes, nodes)):
        if asked not in (None, taken):
            notes.append(f"{key}: {asked} in the configuration, {taken} in the rehearsal (--gpus, --gpus-per-node)")
    if launch.device == "cpu":
        notes.append("device: cpu in the configuration, a GPU in the rehearsal")
    return notes


def _check_host_memory(run: RehearsedRun, available: int | None) -> None:
    """Raise an error if the host has too little memory for the data that a rank really computes with."""
    if available is None or not run.config.launch.check_resources:
        return
    try:
        needed = count_offloaded_bytes(run.config, run.sizes, run.vocab_size)
    except UserError:  # unknown encoding
        return
    if needed > available:
        device = run.config.training.zero_optimization.offload_optimizer.device
        raise UserError(
            f"zero_optimization.offload_optimizer.device is {device}: a rank updates {format_bytes(needed)} of states "
            f"in host memory, but this machine has {format_bytes(available)}; use more --gpus, or "
            f"a machine with more memory; {START_ANYWAY_HINT}",
            "zero_optimization",
        )


def _find_missing_data(config: Config) -> str | None:
    """Explain why the run's own data cannot be read on this machine; None if they can."""
    if config.data.task is not None:
        return None
    if not list_named_splits(config.data):
        return "the configuration names no data"
    try:
        check_data_files(config)
        read_vocabulary(config.data)
    except FarfieldError as error:
        return f"the run's data cannot be read here ({error})"
    return None


def _describe_text(paths: dict[str, list[str]]) -> dict[str, object]:
    """Return the data keys that select these text datasets and clear all other sources."""
    defaults = {key: DataOptions.model_fields[key].get_default(call_default_factory=True) for key in TEXT_KEYS}
    return defaults | {f"{split}_data_paths": names for split, names in paths.items()}


def _describe_changes(run: RehearsedRun) -> list[str]:
    """Describe the parts of the run that the rehearsal omits."""
    checkpoint, training = run.config.checkpoint, run.config.training
    notes = []
    if checkpoint.load is not None:
        notes.append(f"load: {checkpoint.load} is ignored; the rehearsal starts with new weights")
    if run.config.logging.use_wandb:
        notes.append("use_wandb: nothing is sent to Weights & Biases")
    if run.config.logging.use_trackio:
        notes.append("use_trackio: nothing is reported to Trackio")
    asked = (run.requested or run.config).logging
    if asked.profile.steps or asked.memory_snapshot is not None:
        notes.append("profile, memory_snapshot: disabled, because the null device computes nothing")
    if asked.harness.tasks:
        notes.append("harness.tasks: not evaluated, because the null device computes nothing")
    if training.gradient_accumulation_steps > run.micro_batches:
        notes.append(
            f"{run.micro_batches} of the {training.gradient_accumulation_steps} micro-batches of a step are rehearsed; "
            "the others repeat the same operations"
        )
    return notes
