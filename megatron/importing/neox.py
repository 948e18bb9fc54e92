"""Checkpoints of GPT-NeoX, and of KERPLE and DAPE, which are built on it: any number of tensor-parallel ranks.

    RUN/latest                                        the name of the newest checkpoint
    RUN/global_step1000/layer_03-model_01-model_states.pt    one layer's part of one tensor-parallel rank
    RUN/global_step1000/mp_rank_01_model_states.pt           or all layers', under `module`, as `sequential.3.…`
    RUN/global_step1000/configs/*.yml                 the configuration, where it was saved (`--config` names others)

Layer 0 is the embedding, 2 to L + 1 are the layers, L + 3 is the last norm and L + 4 the output matrix. What becomes of
the parts of several ranks:

| part                                  | whole                                                                       |
|---------------------------------------|-----------------------------------------------------------------------------|
| embedding, output matrix              | behind one another                                                          |
| queries, keys, values                 | behind one another, heads in order; grouped, each rank has [q; k; v]        |
| feed-forward, first matrix            | behind one another; gated, each rank has [up; gate], and ours is [gate; up] |
| attention's and feed-forward's second | side by side; their biases are one and the same, but with gpt_j_residual    |
|                                       | each rank adds its own before the sum over ranks, so they are summed        |
| norms                                 | the mean of what should be equal                                            |
| kernels and tables of positions       | behind one another, heads in order                                          |

KERPLE's modules are in every layer's file although all layers share them; DAPE's are each layer's own.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import neox as vocabulary
from megatron.config.load import merge
from megatron.config.schema import Config, owners
from megatron.config.yaml_files import Document, read_yaml
from megatron.errors import RunError, UserError, shortened
from megatron.formats.transforms import Interleaved
from megatron.importing.source import Source
from megatron.options.model import GATED, ffn_hidden_size, intermediate_size_of, num_kv_heads

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.importing.weight_files import Tensors

LATEST, CONFIGS = "latest", "configs"
MOST = 4096
"""Characters that are read of `latest`, which holds a name."""
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_WHOLE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
IGNORED = re.compile(r".*\b(inv_freq|slopes|masked_bias)|attention\.bias|.*\.cached_\w+|.*\.cache_matrix\w*")
"""Buffers that are computed anew."""

FIRST_MATRICES = ("mlp.dense_h_to_4h", "mlp.linear1")
"""Names that versions of GPT-NeoX have given the first matrix of the feed-forward layer."""

SECTIONS = ("model", "position")
OF_TRAINING = {
    "init_method", "output_layer_init_method", "init_method_std", "hidden_dropout", "attention_dropout",
    "checkpoint_activations", "checkpoint_num_layers", "attention_backend", "attention_chunk_rows",
    "make_vocab_size_divisible_by",
}  # fmt: skip
"""Keys of the model that its weights do not depend on any more."""
REFUSALS = (
    "sparsity_config", "sparse_attention", "use_qk_layernorm", "num_unique_layers",
    "opt_pos_emb_offset", "soft_prompt_tuning", "moe_num_experts", "use_mup",
)  # fmt: skip
"""Of what is refused in a training's configuration, that which changes what the weights compute."""


def checkpoint_of(path: Path) -> Path | None:
    """The checkpoint in a folder of GPT-NeoX's, which may be the folder itself; None if it is none of them."""
    if (path / LATEST).is_file():
        with open(path / LATEST, encoding="utf-8", errors="replace") as file:
            name = file.read(MOST).strip()
        if name and Path(name).name == name and os.path.isdir(path / name):
            return path / name
        if not _holds_states(path):
            raise UserError(f"{path / LATEST}: names {shortened(name)!r}, and there is no such folder beside it")
    return path if _holds_states(path) else None


def _holds_states(path: Path) -> bool:
    """Are there files of a checkpoint's in a folder?"""
    return any(any(path.glob(names)) for names in ("*_model_states.pt", "layer_*-model_*-model_states.pt"))


def neox_checkpoint(checkpoint: Path, configs: Sequence[Path] = ()) -> Source:
    """What a checkpoint's configuration says that it holds.

    Args:
        checkpoint: its folder.
        configs: configuration files; those that it was saved with if there are none.

    Raises UserError: there is no configuration, or it says what ours cannot be, naming the key.
    """
    files = list(configs) or sorted((checkpoint / CONFIGS).glob("*.y*ml"))
    if not files:
        raise UserError(f"{checkpoint}: holds no {CONFIGS}/*.yml; name the model's configuration with --config")
    loaded = merge([_of_model(read_yaml(path)) for path in files])
    config = loaded.config
    sections = (config.model, config.position)
    keys = {name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()}
    keys.pop("mlp_multiple_of", None)
    notes = loaded.notes
    if (activation := config.model.activation) in GATED:
        width = _gated_width(checkpoint)
        keys["intermediate_size"] = intermediate_size_of(width, activation)
        if (said := ffn_hidden_size(config.model)) != width:
            notes = (*notes, f"{checkpoint}: its weights have a feed-forward width of {width}, not {said}")
    return Source(checkpoint, "GPT-NeoX", keys, partial(_opened, checkpoint), None, notes)


def _gated_width(checkpoint: Path) -> int:
    """The width of gated layers, from the weights: versions of GPT-NeoX have counted it differently."""
    parts = Parts(checkpoint)
    name = next((name for name in FIRST_MATRICES if f"2.{name}.weight" in parts), FIRST_MATRICES[0])
    return sum(part.shape[0] for part in parts[f"2.{name}.weight"]) // 2


def _of_model(document: Document) -> Document:
    """Of a configuration the keys that say what the model is; those of its training do not matter any more."""
    kept = {name: value for name, value in document.values.items() if _matters(name.replace("-", "_"))}
    return Document(document.source, kept, document.lines)


def _matters(name: str) -> bool:
    rule = vocabulary.RULES.get(name)
    match rule:
        case None:
            return owners().get(name) in SECTIONS and name not in OF_TRAINING
        case vocabulary.Renamed() | vocabulary.Share():
            return owners().get(rule.to.split(".")[0]) in SECTIONS
        case vocabulary.Option() | vocabulary.Variant() | vocabulary.Checked():
            return True
    return name in REFUSALS


@contextmanager
def _opened(checkpoint: Path, config: Config) -> "Iterator[NeoxWeights]":
    yield NeoxWeights(checkpoint, config)


class Parts:
    """What each tensor-parallel rank holds, by number of the layer and name."""

    def __init__(self, checkpoint: Path) -> None:
        from megatron.importing.weight_files import Tensors

        self.checkpoint = checkpoint
        found = [(path, _LAYER.fullmatch(path.name)) for path in sorted(checkpoint.iterdir())]
        layers = [(path, int(match[1]), int(match[2])) for path, match in found if match]
        self.ranks: dict[int, Tensors] = {}
        if layers:
            for path, number, rank in layers:
                self._add(self.ranks.setdefault(rank, Tensors()), path, f"{number}.")
        else:
            wholes = [(path, _WHOLE.fullmatch(path.name)) for path in sorted(checkpoint.iterdir())]
            for path, match in wholes:
                if match:
                    self._add(self.ranks.setdefault(int(match[1]), Tensors()), path, None)
        if sorted(self.ranks) != list(range(len(self.ranks))) or not self.ranks:
            raise RunError(f"{checkpoint}: holds parts of the ranks {sorted(self.ranks)}; some are missing")
        self.names = self.ranks[0].names
        for rank, tensors in self.ranks.items():
            if other := sorted(set(tensors.names) ^ set(self.names)):
                raise RunError(f"{checkpoint}: rank {rank} and rank 0 differ in {other[0]}; a file is missing")

    @staticmethod
    def _add(tensors: "Tensors", path: Path, prefix: str | None) -> None:
        from megatron.importing.weight_files import add_mapping, read_torch

        content = read_torch(path, classes=_numpy())
        if prefix is None:
            content = content.get("module") if isinstance(content, dict) else None
            if not isinstance(content, dict) or not all(str(name).startswith("sequential.") for name in content):
                raise RunError(f"{path}: holds no `module` of GPT-NeoX's (sequential.…)")
            content = {name.removeprefix("sequential."): value for name, value in content.items()}
        add_mapping(tensors, path, content, prefix or "")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> "list[Tensor]":
        """The parts of a tensor, in the order of the ranks. Raises RunError if there is none of this name."""
        if name not in self.names:
            raise RunError(f"{self.checkpoint}: holds no {name}, which its configuration asks for")
        return [self.ranks[rank][name] for rank in range(len(self.ranks))]


def _numpy() -> list[Any]:
    """numpy's random state, which DeepSpeed's files hold beside the weights: nothing of it is run."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    kinds = {type(np.dtype(kind)) for kind in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")}
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [*((_reconstruct, name) for name in names), np.ndarray, np.dtype, *kinds]


class NeoxWeights:
    """The weights of a checkpoint, by our names."""

    def __init__(self, checkpoint: Path, config: Config) -> None:
        self.checkpoint, self.config, self.parts = checkpoint, config, Parts(checkpoint)
        model = config.model
        self.ranks = len(self.parts.ranks)
        self.used: set[str] = set()
        self.last = model.num_layers + 3
        self.rows = sum(part.shape[0] for part in self.parts["0.word_embeddings.weight"])

    def check(self, names: list[str]) -> None:
        for name in names:
            self._sources(name)
        for number in self._layers():
            if self.config.model.gpt_j_tied:  # built and never used
                self.used |= {each for each in self.parts.names if f"{number}.post_attention_layernorm." in each}
            # What all layers share was taken from the first; the others' files have copies.
            self.used |= {f"{number}.{end}" for end in self._ends(2)} & set(self.parts.names)
        if not self.config.position.pos_emb_per_layer:
            self._check_shared()
        if not self.config.model.no_weight_tying:  # a copy for the last stage
            self.used.add(f"{self.last + 1}.final_linear.weight")
        rest = [name for name in self.parts.names if name not in self.used and not IGNORED.fullmatch(name)]
        rest = [name for name in rest if not IGNORED.fullmatch(name.partition(".")[2])]
        if rest:
            more = f", and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise RunError(
                f"{self.checkpoint}: holds {rest[0]}{more}, which a model of its configuration has not; it would be "
                "dropped"
            )

    def _ends(self, number: int) -> set[str]:
        """What is used of a layer's file."""
        return {name.partition(".")[2] for name in self.used if name.startswith(f"{number}.")}

    def _check_shared(self) -> None:
        """An encoding that all layers share is the same in every layer's file."""
        first, *others = ({k: v for k, v in self._position(n).items() if "mlp2." not in k} for n in self._layers())
        for other in others:
            for end, name in other.items():
                pairs = zip(self.parts[name], self.parts[first.get(end, name)], strict=True)
                if end not in first or not all(a.equal(b) for a, b in pairs):
                    raise RunError(
                        f"{self.checkpoint}: {name} is another than layer 2's, although its configuration says "
                        "pos_emb_per_layer: false; name a configuration that says true with --config"
                    )

    def __call__(self, name: str) -> "Tensor":
        sources, join = self._sources(name)
        try:
            return join([self.parts[source] for source in sources])
        except (RuntimeError, ValueError, IndexError) as error:
            why = str(error).splitlines()[0]
            raise RunError(
                f"{self.checkpoint}: the parts of {sources[0]} do not fit its configuration ({why})"
            ) from None

    def _layers(self) -> range:
        return range(2, self.config.model.num_layers + 2)

    def _sources(self, name: str) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        """The tensors that a weight of ours is made of, and how."""
        found = self._found(name)
        self.used |= set(found[0])
        for source in found[0]:
            _ = self.parts[source]
        return found

    def _found(self, name: str) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        kind = name.rpartition(".")[2]
        if name == "embedding.word_embeddings.weight":
            return ["0.word_embeddings.weight"], _behind
        if name == "output_layer.weight":
            return [f"{self.last + 1}.final_linear.weight"], _behind
        if name == "position.vectors.weight":
            return ["0.position_embeddings.weight"], _mean
        if name.startswith("decoder.final_layernorm."):
            return [self._norm(f"{self.last}.norm", kind)], _mean
        if name.startswith("position."):
            return self._of_position(2, name.removeprefix("position."))
        _, _, layer, inner = name.split(".", 3)
        return self._of_layer(int(layer) + 2, inner, kind)

    def _norm(self, theirs: str, kind: str) -> str:
        """RMSNorm's weight is called scale."""
        return f"{theirs}.scale" if kind == "weight" and f"{theirs}.scale" in self.parts else f"{theirs}.{kind}"

    def _of_layer(
        self, number: int, inner: str, kind: str
    ) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        model = self.config.model
        summed = _sum if model.gpt_j_residual else _mean
        if inner.startswith("input_layernorm."):
            return [self._norm(f"{number}.input_layernorm", kind)], _mean
        if inner.startswith("pre_mlp_layernorm."):
            return [self._norm(f"{number}.post_attention_layernorm", kind)], _mean
        if inner.startswith("self_attention.linear_qkv."):
            grouped = num_kv_heads(model) != model.num_attention_heads
            return [f"{number}.attention.query_key_value.{kind}"], self._grouped if grouped else _behind
        if inner.startswith("self_attention.linear_proj."):
            return [f"{number}.attention.dense.{kind}"], _beside if kind == "weight" else summed
        if inner.startswith("mlp.linear_fc1."):
            theirs = self._either(number, *FIRST_MATRICES)
            return [f"{theirs}.{kind}"], _gate_first if model.activation in GATED else _behind
        if inner.startswith("mlp.linear_fc2."):
            theirs = self._either(number, "mlp.dense_4h_to_h", "mlp.linear2")
            return [f"{theirs}.{kind}"], _beside if kind == "weight" else summed
        core = "self_attention.core_attention."
        own = inner.removeprefix(core).removeprefix("_own.")
        if inner.startswith(core):
            return self._of_position(number, own)
        raise RuntimeError(f"no rule for {inner}")

    def _either(self, number: int, *names: str) -> str:
        """Versions differ in a name."""
        return next(
            (f"{number}.{name}" for name in names if f"{number}.{name}.weight" in self.parts), f"{number}.{names[0]}"
        )

    def _grouped(self, parts: "list[list[Tensor]]") -> "Tensor":
        model = self.config.model
        heads, groups = model.num_attention_heads // self.ranks, num_kv_heads(model) // self.ranks
        d = model.hidden_size // model.num_attention_heads
        one = Interleaved(heads, groups)
        return _behind([[one.to_ours(part.split([heads * d, groups * d, groups * d])) for part in parts[0]]])

    # Positions

    def _position(self, number: int) -> dict[str, str]:
        """What a layer's file holds of positions: the end of each name, without that of its module, and the name."""
        inside = re.compile(rf"{number}\.attention\.(?!query_key_value|dense|rotary_emb|qk_)\w+\.(.+)")
        found = ((inside.fullmatch(name), name) for name in self.parts.names)
        return {match[1]: name for match, name in found if match and not IGNORED.fullmatch(name)}

    def _of_position(self, number: int, ours: str) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        encoding, there = self.config.position.pos_emb, self._position(number)
        if ours.startswith("processor."):
            module, _, kind = ours.removeprefix("processor.").partition(".")
            source = f"mlp2.{ {'hidden': 0, 'output': 2}[module] }.{kind}"
            join = _kernel if kind == "weight" else _mean
        else:
            rules = ENCODINGS.get(encoding, {})
            if ours not in rules:
                raise UserError(
                    f"{self.checkpoint}: pos_emb {encoding} cannot be imported from GPT-NeoX's files; of those with "
                    f"weights, {', '.join(sorted(ENCODINGS))} can"
                )
            source, make = rules[ours]
            join = partial(make, self.config)
        names = source.split(" and ")
        missing = [name for name in names if name not in there]
        if missing:
            raise RunError(
                f"{self.checkpoint}: layer {number} holds no attention.….{missing[0]}, for {encoding}'s {ours}"
            )
        return [there[name] for name in names], join


def _cat(parts: "Sequence[Tensor]", dim: int) -> "Tensor":
    import torch

    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _behind(parts: "list[list[Tensor]]") -> "Tensor":
    return _cat(parts[0], 0)


def _beside(parts: "list[list[Tensor]]") -> "Tensor":
    return _cat(parts[0], 1)


def _sum(parts: "list[list[Tensor]]") -> "Tensor":
    return parts[0][0] if len(parts[0]) == 1 else sum(part.float() for part in parts[0])  # type: ignore[return-value]


def _mean(parts: "list[list[Tensor]]") -> "Tensor":
    first, *others = parts[0]
    return first if all(first.equal(other) for other in others) else _sum(parts) / len(parts[0])


def _gate_first(parts: "list[list[Tensor]]") -> "Tensor":
    halves = [part.chunk(2) for part in parts[0]]
    return _cat([gate for _, gate in halves] + [up for up, _ in halves], 0)


def _kernel(parts: "list[list[Tensor]]") -> "Tensor":
    """A layer of a perceptron [out, in] is a convolution of size 1, [out, in, 1, 1]."""
    whole = _mean(parts)
    return whole if whole.dim() == 4 else whole[:, :, None, None]


def _per_head(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    """[heads of a rank, 1, 1] of each; where every rank holds all heads, one and the same."""
    heads = config.model.num_attention_heads
    return (_mean(parts) if parts[0][0].shape[0] == heads else _behind(parts)).reshape(-1)


def _buckets(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    """T5's table [buckets, heads of a rank], which the module multiplies by the root of the head dimension."""
    model = config.model
    return _cat(parts[0], 1).float() * (model.hidden_size / model.num_attention_heads) ** 0.5


def _same(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    return _mean(parts)


def _vectors(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    """CoPE's table [1, d, positions], whose products with queries are not divided by the root of d there."""
    d = config.model.hidden_size // config.model.num_attention_heads
    return _mean(parts)[0].t().float() * d**0.5


def _size(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    """FIRE computes with the absolute value."""
    return _mean(parts).abs().reshape(1)


def _multiplier(config: Config, parts: "list[list[Tensor]]") -> "Tensor":
    """FIRE's threshold is |multiplier · init_L|, ours multiplier · T_train / 2."""
    multiplier, length = (_mean([each]) for each in parts)
    return (multiplier.float() * length.float()).abs().reshape(1) / (config.model.seq_length / 2)


Make = Callable[[Config, "list[list[Tensor]]"], "Tensor"]
ENCODINGS: dict[str, dict[str, tuple[str, Make]]] = {
    "t5": {"bias.value": ("weight", _buckets)},
    # The two kernels give the same names to different numbers.
    "kerple_log": {"r1.value": ("bias_p", _per_head), "r2.value": ("bias_a", _per_head)},
    "kerple_power": {"r1.value": ("bias_a", _per_head), "r2.value": ("bias_p", _per_head)},
    "gaussian_weight2": {"r1.value": ("wei_a", _per_head), "r2.value": ("wei_p", _per_head)},
    "kerple_bias_weight": {
        "r1.value": ("bias_a", _per_head), "r2.value": ("bias_p", _per_head),
        "r3.value": ("wei_a", _per_head), "r4.value": ("wei_p", _per_head),
    },
    "fire": {
        "c.value": ("c", _size), "multiplier.value": ("L_multiplier and init_L", _multiplier),
        "weight1.value": ("mlp.0.weight", _same), "bias1.value": ("mlp.0.bias", _same),
        "weight2.value": ("mlp.2.weight", _same), "bias2.value": ("mlp.2.bias", _same),
    },
    "cope": {"vectors.value": ("pos_emb", _vectors)},
    "transformer_xl": {
        "u.value": ("r_w_bias", _same), "v.value": ("r_r_bias", _same), "project.weight": ("r_net.weight", _same),
    },
}  # fmt: skip
"""For each weight of an encoding of ours, how the name of theirs ends, and how the one is made of the other."""
