"""muP and CompleteP: multipliers, initialization and optimizer scales of a model relative to a base model.

Sources: Yang et al. 2022 (2203.03466, table 8) for the width, Dey et al. 2025 (2505.01618, table 1) for the depth and
for AdamW's epsilon and weight decay, Yang et al. 2023 (2310.17813, condition 1) for Muon's rates. With

    m = hidden_size / base,    h = heads / base heads,    l = layers / base layers,    α = mup_depth_alpha

                              initial deviation   learning rate        weight decay   Adam's ε
    embedding, output matrix  base's              1                    1              1 / m
    matrices of layers        base's / √m         1/m · l^(α−1)        m              1 / (m·l^α)
      by Muon                 the same            1/√m · l^(α−1)       √m
    norms, biases of layers   base's              l^(α−1)              -              1 / (m·l^α)
    the last norm             base's              1                    -              1 / m
    encodings, processors,    their own           l^(α−1)              1 or none      1 / (m·l^α)
      temperatures
      that sum over heads     their own / √h      1/h · l^(α−1)        h              1 / (m·l^α)

and the forward pass multiplies

    token embeddings          mup_embedding_mult
    scores q·k                √(base head size) / (head size · mup_attn_temp), instead of 1/√(head size)
    residual branches         l^(−α)
    logits                    1 / (m · mup_output_temp)

For the base model itself all factors are 1. The base's deviation is the one that init_method gives for the base's width
and depth. Weight decay in a step is λ·lr, so its factor cancels that of the learning rate.

Encodings, processors and temperatures
--------------------------------------
KERPLE's r1 and r2, T5's table and similar parameters are numbers per head, of size 1 at every width. The bias that they
produce is added to scores of size 1, and changes by the same fraction as they do. The step size of Adam is its learning
rate for any gradient size, so the rate is the base's. The gradient of one head's number decreases with the head's share
in the output, 1/h, and so does ε. A temperature's numbers per head behave in the same way: they multiply scores of size
1.

A score processor's first convolution sums over the heads' scores and biases (fan-in heads·k, or twice as much) into a
fixed number W of channels; its second maps these back to all heads. For the heads, the first is like an output matrix
for the hidden units: from many to few. If its weights had size 1/√h, as torch initializes them, each step would move
the scores of all heads together in the direction of these weights, and their sum by √h. They therefore have size 1/h
(their own deviation, which contains 1/√h, over √h) and move by 1/h. The second is like an embedding, from few to many:
its fan-in W·k does not grow, so nothing changes. Transformer-XL's projection sums over hidden units into hidden units:
it is a layer's matrix. If it is drawn like the weight of torch.nn.Linear, its start values contain 1/√m already.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.options.model import ModelOptions, get_head_dim

ParameterRole = Literal["embedding", "hidden", "heads", "layer", "last norm"]
"""Row of the table for a parameter: `hidden` sums over hidden units, `heads` over heads, `layer` is the rest of a
layer.
"""


@dataclass(frozen=True)
class StepScales:
    """Factors on an optimizer's learning rate, weight decay and epsilon for a parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Multipliers:
    """Multipliers applied in the forward pass; all 1 unless a key sets another factor."""

    embedding: float = 1.0
    position_embedding: float = 1.0
    query: float = 1.0
    """Multiplier of the queries; backends divide the products with keys by √(head size)."""
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class MupScaling:
    """Ratios of a model's sizes to those of its base model."""

    model: ModelOptions
    width: float
    heads: float
    depth: float

    @staticmethod
    def from_options(model: ModelOptions) -> "MupScaling | None":
        """Return the muP scaling of a model configuration, or None if muP is off."""
        if not model.use_mup:
            return None
        assert model.mup_base_hidden_size is not None, "find_model_conflicts rejects this"
        head_size = model.hidden_size // model.num_attention_heads
        base_heads = model.mup_base_num_attention_heads or model.mup_base_hidden_size // head_size
        return MupScaling(
            model,
            width=model.hidden_size / model.mup_base_hidden_size,
            heads=model.num_attention_heads / base_heads,
            depth=model.num_layers / (model.mup_base_num_layers or model.num_layers),
        )

    @property
    def base_layers(self) -> int:
        """Number of layers of the base model."""
        return self.model.mup_base_num_layers or self.model.num_layers

    @property
    def multipliers(self) -> Multipliers:
        """Multipliers applied in the forward pass."""
        model, alpha = self.model, self.model.mup_depth_alpha
        return Multipliers(
            embedding=model.mup_embedding_mult,
            position_embedding=model.mup_rp_embedding_mult,
            query=math.sqrt(self.heads / self.width) / model.mup_attn_temp,
            residual=self.depth**-alpha,
            logits=1 / (self.width * model.mup_output_temp),
        )

    def get_init_scale(self, role: ParameterRole) -> float:
        """Return the factor on the initial deviation of parameters of a role.

        The unscaled deviation is init_method's for the base's shapes, or an encoding's or processor's own.
        """
        return 1 / math.sqrt({"hidden": self.width, "heads": self.heads}.get(role, 1.0))

    def get_step_scales(self, role: ParameterRole, *, by_muon: bool = False) -> StepScales:
        """Return the optimizer scales for parameters of a role."""
        alpha = self.model.mup_depth_alpha
        if role in ("embedding", "last norm"):
            return StepScales(eps=1 / self.width)
        growth = {"hidden": math.sqrt(self.width) if by_muon else self.width, "heads": self.heads}.get(role, 1.0)
        return StepScales(
            lr=self.depth ** (alpha - 1) / growth, weight_decay=growth, eps=1 / (self.width * self.depth**alpha)
        )


def get_multipliers(model: ModelOptions) -> Multipliers:
    """Return the forward multipliers of a configuration, set by muP or by explicit keys."""
    scaling = MupScaling.from_options(model)
    if scaling is not None:
        return scaling.multipliers
    scalar = model.query_pre_attn_scalar
    query = 1.0 if scalar is None else math.sqrt(get_head_dim(model) / scalar)
    return Multipliers(
        embedding=model.embedding_multiplier,
        query=query,
        residual=model.residual_multiplier,
        logits=model.logit_scale,
    )
