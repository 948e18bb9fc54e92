"""Keys of the optimizer and of its learning-rate schedule."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import model_validator

from megatron.options.section import MAX_STEPS, ConfigSection, config_field, require_count

DecayStyle = Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd", "infinite"]
WsdDecayStyle = Literal["minus_sqrt", "linear", "cosine", "exponential"]
CooldownStyle = Literal["cosine", "inverse_sqrt"]
OptimizerAlgorithm = Literal["AdamW", "Muon", "Lion"]

LION_BETAS = [0.9, 0.99]
"""Default betas of 2302.06675 and GPT-NeoX."""


class OptimizerParams(ConfigSection):
    lr: float = config_field(
        6e-4,
        "peak learning rate; Muon needs about the same as AdamW, Lion a third to a tenth of it",
        gt=0,
        policy="schedule",
    )
    betas: Annotated[list[float], require_count(2, "numbers")] = config_field(
        lambda: [0.9, 0.95],
        "decay rates of Adam, or of Lion, whose default is [0.9, 0.99]",
        policy="numerics",
    )
    eps: float = config_field(1e-8, "Adam's epsilon", gt=0, policy="numerics")
    momentum: float = config_field(0.95, "decay rate of Muon's momentum", ge=0, lt=1, policy="numerics")
    ns_steps: int = config_field(5, "Muon's Newton-Schulz iterations", ge=1, le=20, policy="numerics")


class OptimizerChoice(ConfigSection):
    type: Literal["Adam", "AdamW", "Muon", "Lion"] = config_field(
        "Adam",
        "Adam and AdamW both mean AdamW (decoupled weight decay), as in GPT-NeoX; Muon updates the layers' matrices by "
        "orthogonalized momentum and other parameters by AdamW; Lion updates by the sign of a momentum",
        policy="numerics",
    )
    params: OptimizerParams = config_field(OptimizerParams, "learning rate, betas, epsilon, momentum")

    @property
    def algorithm(self) -> OptimizerAlgorithm:
        """Algorithm that `type` selects."""
        return "AdamW" if self.type == "Adam" else self.type

    @model_validator(mode="before")
    @classmethod
    def _fill_in_betas(cls, values: Any) -> Any:
        """Set Lion's default betas if none are given."""
        if not isinstance(values, dict) or values.get("type") != "Lion":
            return values
        params = values.get("params", {})
        if isinstance(params, OptimizerParams):
            params = params.model_dump(exclude_unset=True)
        return {**values, "params": {"betas": LION_BETAS, **params}} if isinstance(params, dict) else values


class OptimizerOptions(ConfigSection):
    """The optimizer and its learning-rate schedule."""

    optimizer: OptimizerChoice = config_field(OptimizerChoice, "type and its params")
    weight_decay: float = config_field(
        0.1,
        "decoupled weight decay; not applied to biases, norms, sinks, temperatures and encodings, except the matrix of "
        "FoX's gate (docs/optimizers.md)",
        ge=0,
        policy="numerics",
    )
    decay_positions: bool = config_field(
        False,
        "also decay encodings and temperatures, except biases of their linear layers, as GPT-NeoX does; DAPE was "
        "trained this way, KERPLE without weight decay",
        policy="numerics",
    )
    gradient_clipping: float = config_field(
        1.0, "maximum global gradient norm; 0 disables clipping", ge=0, policy="numerics"
    )
    min_lr: float = config_field(0.0, "learning rate at the end of the decay", ge=0, policy="schedule")
    lr_decay_style: DecayStyle = config_field(
        "linear",
        "shape of the decay after warm-up; wsd stays at the peak until its last steps, infinite at constant_lr "
        "(docs/schedules.md)",
        policy="schedule",
    )
    lr_decay_iters: int | None = config_field(
        None, "step at which min_lr is reached; train_iters if absent", ge=1, le=MAX_STEPS, policy="schedule"
    )
    warmup: float = config_field(
        0.01, "fraction of lr_decay_iters used for linear warm-up", ge=0, le=1, policy="schedule"
    )
    lr_warmup_iters: int | None = config_field(
        None,
        "steps of linear warm-up, instead of warmup; unchanged when a run is extended",
        ge=0,
        le=MAX_STEPS,
        policy="schedule",
    )
    lr_wsd_decay_style: WsdDecayStyle = config_field(
        "minus_sqrt", "shape of wsd's decay in the last steps; minus_sqrt is 1 − √x", policy="schedule"
    )
    lr_wsd_decay_iters: int | None = config_field(
        None, "number of last steps in which wsd decays; lr_wsd_decay_fraction if absent", ge=1, le=MAX_STEPS,
        policy="schedule",
    )  # fmt: skip
    lr_wsd_decay_fraction: float = config_field(
        0.1, "fraction of lr_decay_iters in which wsd decays", gt=0, le=1, policy="schedule"
    )
    constant_lr: float | None = config_field(
        None, "constant learning rate of infinite after its cooldown", gt=0, policy="schedule"
    )
    lr_cooldown_iters: int = config_field(
        0, "steps of infinite's cooldown after warm-up", ge=0, le=MAX_STEPS, policy="schedule"
    )
    lr_cooldown_style: CooldownStyle = config_field("cosine", "shape of infinite's cooldown", policy="schedule")
    lr_anneal_iters: int = config_field(
        0,
        "number of last steps before lr_decay_iters in which infinite decays to min_lr; 0 disables the decay",
        ge=0,
        le=MAX_STEPS,
        policy="schedule",
    )


SCHEDULE_KEYS: dict[str, DecayStyle] = {
    **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_fraction"), "wsd"),
    **dict.fromkeys(("constant_lr", "lr_cooldown_iters", "lr_cooldown_style", "lr_anneal_iters"), "infinite"),
}
"""Keys that apply to one decay style only."""


def find_schedule_conflicts(optimizer: OptimizerOptions, train_iters: int) -> Iterator[tuple[str, str]]:
    """Yield conflicts in a schedule that ends after `train_iters` steps (0: not yet known)."""
    if train_iters < 0:
        yield "train_iters", f"train_iters is {train_iters}; it must be at least 1"
        return
    lr, min_lr, style = optimizer.optimizer.params.lr, optimizer.min_lr, optimizer.lr_decay_style
    if min_lr > lr:
        yield "min_lr", f"min_lr {min_lr} is greater than optimizer.params.lr {lr}"
    steps, warmup = optimizer.lr_decay_iters or train_iters, optimizer.lr_warmup_iters
    if warmup is None:
        warmup = round(optimizer.warmup * steps)
    constant_lr = optimizer.constant_lr
    if style == "infinite" and constant_lr is None:
        yield "lr_decay_style", "lr_decay_style infinite needs constant_lr, its constant learning rate"
    elif style == "infinite" and constant_lr is not None:
        if not min_lr <= constant_lr <= lr:
            yield (
                "constant_lr",
                f"constant_lr {constant_lr} is not between min_lr {min_lr} and optimizer.params.lr {lr}",
            )
        if optimizer.lr_anneal_iters and min_lr == 0:
            yield "lr_anneal_iters", "min_lr is 0, which an exponential decay (lr_anneal_iters) never reaches; raise it"
    if not steps:
        return
    phases = {"lr_warmup_iters" if optimizer.lr_warmup_iters is not None else "warmup": warmup}
    if style == "wsd":
        share = max(1, round(optimizer.lr_wsd_decay_fraction * steps))
        is_share = optimizer.lr_wsd_decay_iters is None
        phases["lr_wsd_decay_fraction" if is_share else "lr_wsd_decay_iters"] = optimizer.lr_wsd_decay_iters or share
    if style == "infinite" and optimizer.lr_anneal_iters:
        phases |= {"lr_cooldown_iters": optimizer.lr_cooldown_iters, "lr_anneal_iters": optimizer.lr_anneal_iters}
    if len(phases) > 1 and sum(phases.values()) > steps:
        *_, last = phases
        end = "lr_decay_iters" if optimizer.lr_decay_iters else "train_iters"
        parts = " + ".join(
            f"{name} {value:g}" if (value := getattr(optimizer, name)) == size else f"{name} {value:g} (steps: {size})"
            for name, size in phases.items()
        )
        yield last, f"{parts} are more steps than {end} {steps}"
