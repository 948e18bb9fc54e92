"""Random checkpoints in GPT-NeoX's layout, and the results of a model run directly from these files.

The forward pass follows the layout's description for each tensor-parallel rank and its own shard. It never assembles a
whole weight, so it assumes nothing about how to do so.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.config.yaml_files import dump_yaml

WIDTH, HEADS, LAYERS, LENGTH, ROWS, INNER = 32, 4, 2, 24, 48, 40
D = WIDTH // HEADS
FIRES = ("fire", "fire_c", "fire_dapev2")
CONVOLVED = ("kerple_dapev2", "fire_dapev2")
PROCESSED = (*CONVOLVED, "kerple_c", "fire_c", "nope_c")


@dataclass
class Layout:
    """Properties of a checkpoint."""

    keys: dict[str, Any]
    """Configuration with GPT-NeoX's names."""
    ranks: int = 1
    mlp: tuple[str, str] = ("dense_h_to_4h", "dense_4h_to_h")
    whole_files: bool = False
    """True for mp_rank files instead of layer files."""
    module: str = "rpe"
    """Name of the position module."""
    per_layer: bool = False
    """True if each layer has its own, as in DAPE."""
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def of(self, name: str, default: Any = None) -> Any:
        return self.keys.get(name, default)

    @property
    def groups(self) -> int:
        return self.of("num_kv_heads", HEADS)

    @property
    def gated(self) -> bool:
        return self.of("activation", "gelu") in ("geglu", "swiglu")

    def fill(self) -> "Layout":
        """Add random weights of every rank."""
        generator = torch.Generator().manual_seed(7)

        def draw(*size: int, spread: float = 0.2, center: float = 0.0) -> Tensor:
            return center + spread * torch.randn(size, generator=generator)

        def positive(count: int, scale: float) -> Tensor:
            return (0.05 + scale * torch.rand(count, generator=generator))[:, None, None]

        ranks, rms = self.ranks, self.of("norm", "layernorm") == "rmsnorm"
        h, g, positions = HEADS // ranks, self.groups // ranks, self.of("pos_emb")
        bias, mlp_bias = self.of("use_bias_in_attn_linear", True), self.of("use_bias_in_mlp", True)
        first = INNER * (2 if self.gated else 1) // ranks
        self.states = [{} for _ in range(ranks)]

        def put(name: str, *parts: Tensor) -> None:
            for state, part in zip(self.states, parts if len(parts) == ranks else parts * ranks, strict=True):
                state[name] = part.clone()

        def norm(name: str) -> None:
            put(f"{name}.{'scale' if rms else 'weight'}", draw(WIDTH, center=1.0))
            if not rms:
                put(f"{name}.bias", draw(WIDTH))

        put("0.word_embeddings.weight", *(draw(ROWS // ranks, WIDTH) for _ in range(ranks)))
        if positions == "learned":
            put("0.position_embeddings.weight", draw(LENGTH, WIDTH))
        kernels = {
            "kerple_log": {"bias_p": 2.0, "bias_a": 1.0}, "kerple_power": {"bias_a": 0.2, "bias_p": 1.0},
            "kerple_power_ap_ap": {"bias_a": 0.2, "bias_p": 1.0, "wei_a": 0.1, "wei_p": 1.0},
            "kerple_power__ap": {"wei_a": 0.1, "wei_p": 1.0},
            "kerple_dapev2": {"bias_p": 2.0, "bias_a": 1.0}, "kerple_c": {"bias_p": 2.0, "bias_a": 1.0},
        }.get(positions, {})  # fmt: skip
        shared: dict[str, list[Tensor]] = {}
        for layer in range(2, LAYERS + 2):
            norm(f"{layer}.input_layernorm")
            norm(f"{layer}.post_attention_layernorm")
            rows = (h + 2 * g) * D
            put(f"{layer}.attention.query_key_value.weight", *(draw(rows, WIDTH) for _ in range(ranks)))
            put(f"{layer}.attention.dense.weight", *(draw(WIDTH, h * D) for _ in range(ranks)))
            put(f"{layer}.mlp.{self.mlp[0]}.weight", *(draw(first, WIDTH) for _ in range(ranks)))
            put(f"{layer}.mlp.{self.mlp[1]}.weight", *(draw(WIDTH, INNER // ranks) for _ in range(ranks)))
            # With parallel residuals each rank has its own bias there; otherwise all are equal.
            own = ranks if self.of("gpt_j_residual") else 1
            if bias:
                put(f"{layer}.attention.query_key_value.bias", *(draw(rows) for _ in range(ranks)))
                put(f"{layer}.attention.dense.bias", *(draw(WIDTH) for _ in range(own)))
            if mlp_bias:
                put(f"{layer}.mlp.{self.mlp[0]}.bias", *(draw(first) for _ in range(ranks)))
                put(f"{layer}.mlp.{self.mlp[1]}.bias", *(draw(WIDTH) for _ in range(own)))
            for name, scale in kernels.items():
                parts = shared.get(name) if not self.per_layer else None
                shared[name] = parts or [positive(h, scale) for _ in range(ranks)]
                put(f"{layer}.attention.{self.module}.{name}", *shared[name])
            if positions == "rpe":
                parts = shared.setdefault("weight", [draw(32, h) for _ in range(ranks)])
                put(f"{layer}.attention.rpe.weight", *parts)
            if positions in PROCESSED:
                inputs, width = (HEADS if positions == "nope_c" else 2 * HEADS), self.of("mlp_width", 6)
                size = (1, self.of("dapev2_kernel", 3)) if positions in CONVOLVED else ()
                module = f"{layer}.attention.{self.module}.mlp2"
                put(f"{module}.0.weight", draw(width, inputs, *size))
                put(f"{module}.0.bias", draw(width))
                put(f"{module}.2.weight", draw(HEADS, width, *size))
                put(f"{module}.2.bias", draw(HEADS))
            if positions in FIRES:
                module = f"{layer}.attention.{self.module}"
                put(f"{module}.c", torch.tensor(-0.3))
                put(f"{module}.L_multiplier", torch.tensor(-1.5 + 0.1 * layer))
                put(f"{module}.init_L", torch.tensor(8.0))
                inside = self.of("mlp_width", 32)
                put(f"{module}.mlp.0.weight", draw(inside, 1, spread=1.0))
                put(f"{module}.mlp.0.bias", draw(inside))
                put(f"{module}.mlp.2.weight", draw(HEADS, inside))
                put(f"{module}.mlp.2.bias", draw(HEADS))
            if positions == "cope":
                put(f"{layer}.attention.{self.module}.pos_emb", draw(1, D, 6))
            if positions == "xl_bias":
                module = f"{layer}.attention.{self.module}"
                put(f"{module}.r_w_bias", draw(HEADS, D))
                put(f"{module}.r_r_bias", draw(HEADS, D))
                put(f"{module}.r_net.weight", draw(WIDTH, WIDTH))
                put(f"{module}.pos_emb.inv_freq", torch.ones(3))
            if positions == "rotary":
                put(f"{layer}.attention.rotary_emb.inv_freq", torch.ones(3))
        norm(f"{LAYERS + 3}.norm")
        if self.of("no_weight_tying"):
            put(f"{LAYERS + 4}.final_linear.weight", *(draw(ROWS // ranks, WIDTH) for _ in range(ranks)))
        return self

    def write(self, folder: Path) -> Path:
        """Write the files under RUN/global_step10."""
        import numpy as np

        checkpoint = folder / "global_step10"
        (checkpoint / "configs").mkdir(parents=True)
        (folder / "latest").write_text("global_step10")
        (checkpoint / "configs" / "model.yml").write_text(dump_yaml(self.keys))
        for rank, state in enumerate(self.states):
            if self.whole_files:
                module = {f"sequential.{name}": value for name, value in state.items()}
                content = {"module": module, "np_rng_state": np.random.get_state(), "iteration": 10}
                torch.save(content, checkpoint / f"mp_rank_{rank:02d}_model_states.pt")
                continue
            for number in sorted({int(name.split(".")[0]) for name in state}):
                part = {k.partition(".")[2]: v for k, v in state.items() if k.split(".")[0] == str(number)}
                torch.save(part, checkpoint / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        return folder

    # Computation

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V] of tokens [B, T] from the shards of each rank."""
        embedding = torch.cat([state["0.word_embeddings.weight"] for state in self.states])
        x = embedding[tokens]
        if self.of("pos_emb") == "learned":
            x = x + self.states[0]["0.position_embeddings.weight"][: tokens.shape[1]]
        for layer in range(2, LAYERS + 2):
            parallel, tied = self.of("gpt_j_residual", False), self.of("gpt_j_tied", False)
            attention = [
                self._attention(r, layer, self._norm(x, f"{layer}.input_layernorm")) for r in range(self.ranks)
            ]
            bias = f"{layer}.attention.dense.bias", f"{layer}.mlp.{self.mlp[1]}.bias"
            if parallel:
                which = "input_layernorm" if tied else "post_attention_layernorm"
                mlp = [self._mlp(r, layer, self._norm(x, f"{layer}.{which}")) for r in range(self.ranks)]
                # Each rank adds its biases before the single sum over ranks.
                for r, state in enumerate(self.states):
                    x = x + attention[r] + mlp[r] + sum(state.get(name, torch.zeros(())) for name in bias)
            else:
                x = x + sum(attention) + self.states[0].get(bias[0], torch.zeros(()))
                normed = self._norm(x, f"{layer}.post_attention_layernorm")
                mlp = [self._mlp(r, layer, normed) for r in range(self.ranks)]
                x = x + sum(mlp) + self.states[0].get(bias[1], torch.zeros(()))
        x = self._norm(x, f"{LAYERS + 3}.norm")
        name = f"{LAYERS + 4}.final_linear.weight" if self.of("no_weight_tying") else "0.word_embeddings.weight"
        return torch.cat([x @ state[name].t() for state in self.states], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        state = self.states[0]
        if f"{name}.scale" in state:
            rms = (
                x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
            )  # as its RMSNorm, which adds epsilon to the root
            return x / (rms + self.of("rms_norm_epsilon", 1e-8)) * state[f"{name}.scale"]
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def _mlp(self, rank: int, layer: int, x: Tensor) -> Tensor:
        state, (up_name, down_name) = self.states[rank], (f"{layer}.mlp.{name}" for name in self.mlp)
        inner = F.linear(x, state[f"{up_name}.weight"], state.get(f"{up_name}.bias"))
        kind = self.of("activation", "gelu")
        if self.gated:
            up, gate = inner.chunk(2, -1)
            inner = up * (F.silu(gate) if kind == "swiglu" else F.gelu(gate))
        else:
            inner = F.gelu(inner, approximate="tanh" if self.of("bias_gelu_fusion") else "none")
        return inner @ state[f"{down_name}.weight"].t()

    def _attention(self, rank: int, layer: int, x: Tensor) -> Tensor:
        state, h, g = self.states[rank], HEADS // self.ranks, self.groups // self.ranks
        name = f"{layer}.attention"
        qkv = F.linear(x, state[f"{name}.query_key_value.weight"], state.get(f"{name}.query_key_value.bias"))
        batch, length = qkv.shape[:2]
        if g == h:
            q, k, v = qkv.view(batch, length, h, 3 * D).split(D, -1)
        else:
            q, k, v = (part.view(batch, length, -1, D) for part in qkv.split([h * D, g * D, g * D], -1))
            k, v = (part.repeat_interleave(h // g, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.of("pos_emb") == "rotary":
            q, k = self._rotated(q), self._rotated(k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        if self.of("pos_emb") == "xl_bias":
            scores = self._relative(q, k, layer)
        if self.of("pos_emb") == "cope":
            scores = scores + self._counted(q, scores, layer)
        scores = self._positioned(scores, rank, layer)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        if (width := self.of("sliding_window_width")) is not None:  # width keys before a token, and its own
            future |= torch.ones(length, length, dtype=torch.bool).tril(-width - 1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, h * D) @ state[f"{name}.dense.weight"].t()

    def _relative(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        """Compute Transformer-XL's scores one token pair at a time."""
        name = f"{layer}.attention.{self.module}"
        u, v, project = (self.states[0][f"{name}.{end}"] for end in ("r_w_bias", "r_r_bias", "r_net.weight"))
        length = q.shape[2]
        scores = torch.zeros(q.shape[0], HEADS, length, length)
        for i in range(length):
            for j in range(i + 1):
                angle = (i - j) / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
                distance = (project @ torch.cat([angle.sin(), angle.cos()])).view(HEADS, D)
                scores[:, :, i, j] = ((q[:, :, i] + u) * k[:, :, j] + (q[:, :, i] + v) * distance).sum(-1)
        return scores / math.sqrt(D)

    def _counted(self, q: Tensor, scores: Tensor, layer: int) -> Tensor:
        """Compute CoPE's terms: the number of open gates between key and query selects the query's vector."""
        table = self.states[0][f"{layer}.attention.{self.module}.pos_emb"][0]  # [d, positions]
        length, last = scores.shape[-1], table.shape[1] - 1
        gates = scores.sigmoid()
        terms = torch.zeros_like(scores)
        for i in range(length):
            for j in range(i + 1):
                position = gates[:, :, i, j : i + 1].sum(-1).clamp(max=last)
                low, high = position.floor().long(), position.ceil().long()
                products = q[:, :, i] @ table
                one, other = (products.gather(-1, each[..., None])[..., 0] for each in (low, high))
                terms[:, :, i, j] = one + (position - low) * (other - one)
        return terms

    def _rotated(self, x: Tensor) -> Tensor:
        turned = int(D * self.of("rotary_pct", 1.0))
        angle = torch.arange(x.shape[2])[:, None] / 10000 ** (torch.arange(0, turned, 2) / turned)
        cos, sin = (torch.cat([each, each], -1) for each in (angle.cos(), angle.sin()))
        part, rest = x[..., :turned], x[..., turned:]
        half = torch.cat([-part[..., turned // 2 :], part[..., : turned // 2]], -1)
        return torch.cat([part * cos + half * sin, rest], -1)

    def _positioned(self, scores: Tensor, rank: int, layer: int) -> Tensor:
        length, kind = scores.shape[-1], self.of("pos_emb")
        n = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0).float()
        inside = f"{layer}.attention.{self.module}."
        own = {k.removeprefix(inside): v for k, v in self.states[rank].items() if k.startswith(inside)}
        power = n.clamp(min=1e-30)
        match kind:
            case "kerple_log" | "kerple_dapev2" | "kerple_c":
                bias = -own["bias_p"] * torch.log(1 + own["bias_a"] * n)
            case "kerple_power":
                return scores - own["bias_a"] * power ** own["bias_p"]
            case "kerple_power_ap_ap":
                weight = torch.exp(-own["wei_a"] * power ** own["wei_p"])
                return scores * weight - own["bias_a"] * power ** own["bias_p"]
            case "kerple_power__ap":
                return scores * torch.exp(-own["wei_a"] * power ** own["wei_p"])
            case "rpe":
                buckets = torch.tensor([[_bucket(int(each)) for each in row] for row in n])
                return scores + own["weight"][buckets].permute(2, 0, 1) * math.sqrt(D)
            case "fire" | "fire_c" | "fire_dapev2":
                threshold = (own["L_multiplier"] * own["init_L"]).abs()
                i = torch.arange(length)[:, None].float()
                x = torch.log(own["c"].abs() * n + 1) / (torch.log(own["c"].abs() * i.maximum(threshold) + 1) + 1e-6)
                # DAPE's FIRE uses another activation inside a processor than alone.
                bend = torch.relu if kind == "fire" else F.leaky_relu
                hidden = bend(x[..., None] * own["mlp.0.weight"][:, 0] + own["mlp.0.bias"])
                bias = (hidden @ own["mlp.2.weight"].t() + own["mlp.2.bias"]).permute(2, 0, 1)
            case "nope_c":
                return scores + self._perceptron(scores, own)
            case _:
                return scores
        if kind in ("kerple_log", "fire"):
            return scores + bias
        both = torch.cat([scores, bias.expand(scores.shape)], 1)
        if kind not in CONVOLVED:
            return scores + bias + self._perceptron(both, own)
        kernel = own["mlp2.0.weight"].shape[-1]
        hidden = F.conv2d(both.tril(), own["mlp2.0.weight"], own["mlp2.0.bias"], padding=(0, kernel // 2))
        hidden = F.leaky_relu(hidden)
        return scores + bias + F.conv2d(hidden, own["mlp2.2.weight"], own["mlp2.2.bias"], padding=(0, kernel // 2))

    @staticmethod
    def _perceptron(x: Tensor, own: dict[str, Tensor]) -> Tensor:
        hidden = F.leaky_relu(F.linear(x.permute(0, 2, 3, 1), own["mlp2.0.weight"], own["mlp2.0.bias"]))
        return F.linear(hidden, own["mlp2.2.weight"], own["mlp2.2.bias"]).permute(0, 3, 1, 2)


def _bucket(n: int, buckets: int = 32, longest: int = 128) -> int:
    exact = buckets // 2
    if n < exact:
        return n
    return min(exact + int(math.log(n / exact) / math.log(longest / exact) * (buckets - exact)), buckets - 1)
