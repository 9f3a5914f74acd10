"""Defines the section `train`: the optimizer, and the components of an algorithm. With the rules
for which components cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.distill import Distill
from milescli.recipe.lora import Lora
from milescli.recipe.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rule,
    Section,
)
from milescli.recipe.speculative import Draft, Mtp

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

Ratio = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "k2", "k3", "low_var"]
PAIR_OBJECTIVES = ("preference", "reward_model")
"""Built-in objectives that learn from pairs of `data.train`."""
ROW_OBJECTIVES = ("supervised", "distillation", *PAIR_OBJECTIVES)
"""Built-in objectives that learn from rows of `data.train`."""
SCORE_OBJECTIVES = ("reward_model",)
"""Objectives whose model returns a score instead of a next token."""


class Optimizer(Section):
    """The optimizer, which runs as Megatron-Core's distributed optimizer."""

    rule: str = "adamw"
    """Update rule: adamw; lion; sgd, with momentum `beta1`; muon for the matrices of layers, with
    adamw for the rest; or an import path."""
    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that `schedule` reaches after the last step."""
    schedule: str = "constant"
    """Learning-rate schedule after the warm-up: constant; linear or cosine down to `min_lr`; or an
    import path."""
    warmup_steps: NonNegative = 0
    """Number of steps in which the learning rate rises linearly; they count towards
    `train.steps`."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: PositiveFloat = 1e-8
    muon_momentum: Fraction = 0.95
    """muon: momentum of the matrices."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    offload: bool | None = None
    """Keep Adam's moments and the float32 weights in host memory, and update them there; null: only
    if the run does not fit otherwise."""


class SoftClip(Section):
    """Steepness of the gate of the surrogate `sapo` around a ratio of 1."""

    positive: PositiveFloat = 1.0
    """Steepness for positive advantages."""
    negative: PositiveFloat = 1.05
    """Steepness for all other advantages."""


class Covariance(Section):
    """Which tokens the surrogates `clip_cov` and `kl_cov` restrict, and how."""

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.0002
    """Fraction of a step's trained tokens to restrict; at least one token."""
    low: float = 1.0
    """clip_cov: lower bound on the covariance of the tokens to draw from."""
    high: float = 5.0
    """clip_cov: upper bound on the covariance of the tokens to draw from."""
    kl_coef: NonNegativeFloat = 1.0
    """kl_cov: weight of |log ratio| for the restricted tokens."""


class CorrectionSettings(Section):
    """Importance weights that correct differences between trainer and engine: kernels, precision,
    staleness. They compare the trainer's log-probs before the step's first update with the
    engine's."""

    kind: str = "none"
    """none, importance (configured by the keys below), or an import path."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Level of a ratio: a token, the whole sequence (the product), or the sequence's geometric
    mean."""
    mode: Literal["truncate", "clip", "mask", "binary_kl", "none"] = "truncate"
    """truncate: weights of at most `high` (TIS); clip: weights between `low` and `high`; mask:
    exclude tokens outside of them (IcePop); binary_kl: exclude tokens whose divergence is above
    `high`, in nats and in either direction (KPop); none: no weights, only rejection."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    veto: PositiveFloat | None = None
    """Exclude a sequence if one of its tokens has a ratio below this."""
    reject_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Level at which to exclude ratios outside of `reject_low` and `reject_high`."""
    reject_low: NonNegativeFloat = 0.5
    reject_high: PositiveFloat = 2.0


MATRIX_RULES = ("muon",)
"""Built-in update rules that need whole matrices."""
PreferenceLoss = Literal[
    *("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "exo", "nca", "bco", "sppo"),
    *("apo_zero", "apo_down", "simpo", "cpo", "orpo", "kto"),
]
REFERENCE_FREE = ("orpo", "simpo", "cpo")
"""Preference losses that need no reference."""


class Preference(Section):
    """Settings of `train.objective: preference`."""

    loss: PreferenceLoss = "sigmoid"
    """sigmoid (DPO; cDPO with `label_smoothing`), sigmoid_norm, robust, hinge (SLiC), ipo, exo,
    nca, bco, sppo, apo_zero, apo_down, simpo, cpo, orpo or kto."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference (ipo: its tau; sppo: 1 / its eta; orpo: the weight
    of the odds ratio; simpo, cpo: the scale of the reward)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair is labelled the wrong way round (sigmoid, sigmoid_norm, robust, exo,
    simpo, cpo)."""
    gamma: NonNegativeFloat = 0.5
    """simpo: target margin between the chosen and the rejected response."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an additional SFT loss on chosen responses, per token (orpo, cpo: at least 1)."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of responses that were judged good."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the other responses."""
    reference: Literal["cached", "live"] = "cached"
    """cached: compute the log-probs of all rows under the initial weights once, before the first
    step, and store them in the run directory (one number per token). live: keep the initial
    weights, and score each step's rows (kto: always)."""


class RewardModelSettings(Section):
    """Settings of `train.objective: reward_model`."""

    center_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0; 0.01 is usual."""


class Critic(Section):
    """The value model of `train.credit: gae`. Its own optimizer has the policy's settings."""

    path: str | None = None
    """A Hugging Face folder with a score head, or a model whose output layer is replaced by one (a
    reward model, the policy's base model); null: the policy's initial weights, with a new head."""
    lr: PositiveFloat = 1e-5
    """Learning rate of its optimizer; it follows the policy's schedule."""
    warmup_steps: NonNegative = 0
    """Number of first steps in which only the critic learns."""
    clip: PositiveFloat | None = 0.2
    """Clip a value's change in one step to this range; null: no clipping."""


class Train(Section):
    """How groups or rows become one optimizer step."""

    algorithm: str | None = None
    """A row of `miles algorithms`: it sets those keys below that you do not set. null: use each key
    as it is."""
    steps: Annotated[Positive, Field(le=10**9)] = 100
    """Number of training steps."""
    epochs: PositiveFloat | None = None
    """Number of passes over the rows of `data.train`, instead of `steps`; null: `steps` sets the
    length."""
    batch_size: Positive = 32
    """Rows of `data.train` per step; a pair counts as one row."""
    before_log_probs: str | None = None
    """Import path of a function (*, model, stream) that each trainer rank calls before it computes
    log-probs: of the policy before the step (old), or of the reference."""
    precision: Literal["auto", "bf16", "fp32", "fp8_block", "mxfp8", "int4_qat", "nvfp4"] = "auto"
    """auto: bf16 on an accelerator, fp32 on a CPU. fp8_block, mxfp8, int4_qat, nvfp4: additionally
    round the matrices of the policy's layers to that format before each product; the optimizer
    keeps the unrounded ones (docs/precision.md)."""
    quantise_inputs: bool | None = None
    """Also round the inputs of those matrices to the format, in trainer and engines. null: on
    accelerators, for fp8_block, mxfp8 and nvfp4; on a CPU for the first two, with `on_policy:
    exact`."""
    exempt: list[str] = Field(default=[])
    """Regular expressions of modules that neither trainer nor engines quantise, in addition to
    those that releases keep unquantised: ["layers\\.0\\.", "shared_experts"]."""
    on_policy: Literal["auto", "exact"] = "auto"
    """exact: log-probs of engines and trainer are bit-identical (docs/on-policy.md), which is
    slower; auto: they are equal up to rounding."""
    objective: str = "policy"
    """What a step minimises: policy (composed from the keys below, on sampled responses);
    supervised, preference, reward_model or distillation (on the rows of `data.train`); or an import
    path to a factory `(recipe) -> Objective`."""
    advantage: str = "grpo"
    """Advantage estimator: grpo, rloo, reinforce, remax, opo, gpg, gigpo, hgpo, turns, pass_at_k,
    best_of_n, max_rl, gdpo, rae, or an import path."""
    normalize_std: Literal["group", "batch", "none"] = "group"
    """grpo, best_of_n, gigpo, hgpo, turns: divide by the std of the group's rewards, by that of the
    batch, or not at all (Dr. GRPO)."""
    pass_k: Positive = 4
    """pass_at_k: the k of pass@k."""
    turn_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the advantage of single turns, relative to that of the whole episode."""
    turn_history: NonNegative = 2
    """hgpo: number of earlier observations that turns are also compared by."""
    baseline_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """rae: what a baseline keeps of itself when a reward joins its moving average."""
    credit: str = "sample"
    """How to spread an advantage over a sample's tokens. sample: the same for every token; to_go:
    discounted backwards from the last trained token; gae: relative to a critic's values; or an
    import path."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """to_go, gae: discount per token; gigpo, hgpo, turns: discount per turn."""
    lam: Fraction = 1.0
    """gae: the parameter lambda."""
    whiten: bool = False
    """Normalise the advantages to mean 0 and std 1 over all trained tokens of a step."""
    ratio: Ratio = "token"
    """Level of the policy ratio. token; sequence: the geometric mean over the sequence (GSPO);
    sequence_token: the same value, with the gradient of the token's own ratio (GSPO-token)."""
    surrogate: str = "clip"
    """Policy-gradient term of the loss: clip (PPO), reinforce, cispo, gmpo, sapo, topr, clip_cov,
    kl_cov, dppo_tv, dppo_kl, or an import path."""
    aggregation: str = "token_mean"
    """How to average the loss. token_mean: mean over all trained tokens of an update (DAPO);
    sequence_mean: mean over samples of their token means (GRPO); sequence_sum: mean over samples of
    their token sums; constant: sequence_sum divided by `constant_length` (Dr. GRPO); or an import
    path."""
    constant_length: Positive | None = None
    """Divisor of `aggregation: constant`, in tokens; null: `rollout.max_response_tokens`."""
    clip_low: NonNegativeFloat = 0.2
    """Clipping range of the ratio below 1 (gmpo: of its logarithm; dppo: of a probability or a
    divergence)."""
    clip_high: NonNegativeFloat = 0.28
    """Clipping range of the ratio above 1."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound on the ratio of tokens with a negative advantage (dual-clip PPO; 3 is usual);
    null: no bound."""
    soft_clip: SoftClip = SoftClip()
    covariance: Covariance = Covariance()
    correction: CorrectionSettings = CorrectionSettings()
    off_policy_mask: NonNegativeFloat | None = None
    """Exclude a sequence with a negative advantage if the policy has moved away from it by more
    than this, measured as the mean of log pi_engine - log pi (OPSM of DeepSeek-V3.2); null: exclude
    none."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term against the frozen reference; 0: no KL term."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where to apply the KL term. loss: as a term of the loss; reward: it reduces each token's
    advantage, as `credit` describes, under the policy before the step's first update."""
    reference: bool | None = None
    """Keep the weights before RL as a frozen reference; null: if `kl_coef` is above 0."""
    reference_every: NonNegative = 0
    """Number of steps after which the current weights become the reference; 0: never."""
    kl_estimator: KlEstimator = "k3"
    """k1: log ratio; k2: half its square; k3: never negative, with the KL as its mean; low_var: k3,
    at most 10."""
    kl_unbiased: bool = False
    """Multiply the KL term by the policy ratio, so that its gradient is that of the KL although
    another policy sampled (DeepSeek-V3.2)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; with a target, its initial value."""
    entropy_target: NonNegativeFloat | None = None
    """Target entropy in nats per token (Skywork-OR1). Below it, the bonus is on and its weight
    rises by `entropy_delta` per step; above it, the bonus is off and the weight falls by as much.
    null: the weight is constant."""
    entropy_delta: PositiveFloat = 0.005
    entropy_max: PositiveFloat = 0.1
    """Largest weight of the entropy bonus with a target."""
    old_logprobs: Literal["auto", "trainer", "engine"] = "auto"
    """Whose log-probs represent the old policy. auto: the trainer's at max_staleness 0, otherwise
    the engine's."""
    updates_per_step: Positive = 1
    """Number of optimizer updates on each step's groups (PPO-style minibatches)."""
    max_tokens_per_microbatch: Positive | None = None
    """Tokens in one microbatch of a rank; a row of packed sequences holds this many tokens per
    context-parallel rank. null: the plan chooses (CPU: 8192)."""
    recompute: Literal["auto", "none", "full"] = "auto"
    """full: keep only the inputs of layers for the backward pass, and recompute the rest; auto: if
    activations do not fit otherwise (CPU: none)."""
    expert_imbalance: Annotated[float, Field(ge=1.0)] = 1.5
    """Plan memory for an expert rank that receives this many times its even share of tokens
    (mixture-of-experts only). No tokens are dropped."""
    routing_replay: bool = False
    """R3: the trainer uses the engine's expert routing (mixture-of-experts only)."""
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    preference: Preference = Preference()
    reward_model: RewardModelSettings = RewardModelSettings()
    distill: Distill = Distill()
    lora: Lora = Lora()
    mtp: Mtp = Mtp()
    draft: Draft = Draft()


ZERO_FOR_SINGLES = ("grpo", "gpg", "gigpo", "hgpo", "turns", "best_of_n", "max_rl", "gdpo")
"""Advantage estimators that are always 0 for a group of one."""
TURN_ESTIMATORS = ("gigpo", "hgpo", "turns")
"""Advantage estimators for single turns, which they find from the tokens."""
GROUP_ESTIMATORS = (*ZERO_FOR_SINGLES, "rloo", "opo", "pass_at_k")
"""Advantage estimators that compare the samples of a prompt."""
TOKEN_SURROGATES = ("reinforce", "topr", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
"""Built-in surrogates that work token by token, or use no ratio, so that the ratio of a whole
sequence has no meaning for them."""
WITHOUT_DUAL_CLIP = ("reinforce", "topr", "gmpo", "kl_cov", "dppo_tv", "dppo_kl", "cispo", "sapo")
"""Built-in surrogates without PPO's clip."""
CLIPS_RATIO = ("clip", "clip_cov", "cispo")
"""Surrogates whose `clip_low` limits a ratio; for the others it limits a logarithm, a probability
or a divergence."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the optimizer."""
    train, optimizer, scratch = recipe.train, recipe.train.optimizer, recipe.model.scratch
    yield Rule(
        # the steps of epochs are known when the data is read
        train.epochs is None and optimizer.warmup_steps >= train.steps,
        "the learning rate would never reach its value",
        why=f"train.optimizer.warmup_steps {optimizer.warmup_steps}, train.steps {train.steps}",
        fix=f"--set train.optimizer.warmup_steps={train.steps // 10}",
    )
    yield Rule(
        optimizer.min_lr > optimizer.lr,
        "the learning rate would rise instead of fall",
        why=f"train.optimizer.min_lr {optimizer.min_lr:g} exceeds train.optimizer.lr "
        f"{optimizer.lr:g}",
        fix="--set train.optimizer.min_lr=0",
    )
    for name in ("beta1", "beta2"):
        yield Rule(
            getattr(optimizer, name) == 1.0,
            f"`train.optimizer.{name}` cannot be 1",
            why="with a factor of 1, the moving average would never change",
            fix=f"--set train.optimizer.{name}={Optimizer.model_fields[name].default}",
        )
    is_of_matrices = optimizer.rule in MATRIX_RULES
    yield Rule(
        is_of_matrices and train.lora.is_on,
        f"`train.optimizer.rule={optimizer.rule}` does not train adapters",
        why="it updates the matrices of the model's layers, which stay as they are with "
        "`train.lora`",
        fix=["--set train.optimizer.rule=adamw", "--set train.lora.rank=null"],
    )
    yield Rule(
        is_of_matrices and bool(optimizer.offload),
        f"`train.optimizer.rule={optimizer.rule}` does not run in host memory",
        why="its products of whole matrices need the accelerator, and `train.optimizer.offload` is "
        "true",
        fix=["--set train.optimizer.offload=null", "--set train.optimizer.rule=adamw"],
    )
    preference = train.preference
    yield Rule(
        train.objective == "preference"
        and preference.loss == "exo"
        and not preference.label_smoothing,
        "`train.preference.loss=exo` needs `train.preference.label_smoothing`",
        why="it learns a distribution over both responses; without smoothing, the rejected one has "
        "probability 0, and the loss is infinite",
        fix="--set train.preference.label_smoothing=1e-3",
    )
    yield Rule(
        train.routing_replay and scratch is not None and scratch.family == "qwen3",
        "there is no routing to replay",
        why="`train.routing_replay` is for mixtures of experts, but `model.scratch.family` is "
        "qwen3",
        fix=[
            "--set train.routing_replay=false",
            "--set model.scratch.family=qwen3_moe --set model.scratch.num_experts=8 "
            "--set model.scratch.tie_embeddings=false",
        ],
    )


def algorithm_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules against components of an algorithm that cannot be combined."""
    yield from _group_rules(recipe)
    yield from _surrogate_rules(recipe.train)
    yield from _model_rules(recipe)
    yield from _correction_rules(recipe)
    yield from _sampling_rules(recipe)


def _group_rules(recipe: Recipe) -> Iterator[Rule]:
    train, samples = recipe.train, recipe.rollout.samples_per_prompt
    is_rewarded = not recipe.teachers or train.distill.reward_weight > 0
    is_zero = train.advantage in ZERO_FOR_SINGLES
    yield Rule(
        samples == 1 and train.advantage in GROUP_ESTIMATORS and is_rewarded,
        "groups of one sample teach nothing",
        why=f"`{train.advantage}` compares the samples of one prompt; with "
        "`rollout.samples_per_prompt` 1, "
        + ("every advantage is 0" if is_zero else "there is nothing to compare with"),
        fix=["--set rollout.samples_per_prompt=8", "--set train.advantage=reinforce"],
    )
    yield Rule(
        train.advantage == "pass_at_k" and train.pass_k >= samples,
        f"pass@{train.pass_k} of {samples} samples teaches nothing",
        why="each k-subset of a group would be the whole group: `train.pass_k` must be less "
        "than `rollout.samples_per_prompt`",
        fix=[
            f"--set train.pass_k={max(samples // 2, 1)}",
            f"--set rollout.samples_per_prompt={2 * train.pass_k}",
        ],
    )
    yield Rule(
        train.advantage in TURN_ESTIMATORS and train.credit != "sample",
        f"`{train.advantage}` cannot be combined with `{train.credit}`",
        why="it assigns each turn its own advantage, already discounted",
        fix="--set train.credit=sample",
    )


def _surrogate_rules(train: Train) -> Iterator[Rule]:
    surrogate, covariance = train.surrogate, train.covariance
    is_unbounded = train.clip_low == 1.0 and surrogate == "cispo"
    yield Rule(
        surrogate in CLIPS_RATIO and train.clip_low >= 1.0 and not is_unbounded,
        f"`train.clip_low` cannot be {train.clip_low:g}",
        why="the ratio is clipped at 1 - clip_low and is always positive, so clip_low must be "
        "below 1",
        fix="--set train.clip_low=0.2",
    )
    yield Rule(
        train.ratio != "token" and surrogate in TOKEN_SURROGATES,
        f"`train.surrogate={surrogate}` does not support the ratio of a {train.ratio}",
        why="it uses single tokens or no ratio; clip, cispo and sapo support it",
        fix=["--set train.ratio=token", "--set train.surrogate=clip"],
    )
    yield Rule(
        train.dual_clip is not None and surrogate in WITHOUT_DUAL_CLIP,
        f"`train.dual_clip` has no effect on `{surrogate}`",
        why="it is a second bound of PPO's clip",
        fix="--set train.dual_clip=null",
    )
    yield _interval_rule(
        covariance.low >= covariance.high, "train.covariance.low", covariance.low, covariance.high
    )


def _model_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the models besides the policy, and for what keeps the policy near
    them."""
    train, warmup_steps = recipe.train, recipe.train.critic.warmup_steps
    yield Rule(
        recipe.has_critic and warmup_steps >= train.steps,
        "the policy would never learn",
        why=f"`train.critic.warmup_steps` is {warmup_steps}, and `train.steps` is {train.steps}: "
        "until then, only the critic learns",
        fix=f"--set train.critic.warmup_steps={train.steps // 10}",
    )
    yield Rule(
        recipe.has_critic and train.routing_replay,
        "routing cannot be replayed in a critic",
        why="`train.routing_replay` reuses the experts that the engine chose, but the critic is "
        "another model",
        fix="--set train.routing_replay=false",
    )
    yield Rule(
        train.kl_coef and train.reference is False,
        "a KL term needs a reference",
        why=f"`train.kl_coef` is {train.kl_coef:g}, and `train.reference` is false",
        fix=["--set train.reference=null", "--set train.kl_coef=0"],
    )
    yield Rule(
        train.reference_every and not recipe.keeps_reference,
        "there is no reference to update",
        why=f"`train.reference_every` is {train.reference_every}, but the run keeps no "
        "reference: `train.kl_coef` is 0",
        fix=["--set train.kl_coef=0.001", "--set train.reference_every=0"],
    )
    yield Rule(
        train.entropy_target is not None and train.entropy_coef > train.entropy_max,
        "the initial entropy bonus exceeds its bound",
        why=f"`train.entropy_coef` {train.entropy_coef:g}, `train.entropy_max` "
        f"{train.entropy_max:g}",
        fix=f"--set train.entropy_max={train.entropy_coef:g}",
    )
    yield Rule(
        train.kl_unbiased and train.kl_in == "reward",
        "`train.kl_unbiased` needs the KL term in the loss",
        why="in the reward, the term has no gradient to correct (`train.kl_in` is reward)",
        fix=["--set train.kl_in=loss", "--set train.kl_unbiased=false"],
    )


def _correction_rules(recipe: Recipe) -> Iterator[Rule]:
    correction, staleness = recipe.train.correction, recipe.rollout.max_staleness
    if correction.kind == "none":
        return
    why = (
        "train.old_logprobs=engine"
        if recipe.train.old_logprobs == "engine"
        else f"rollout.max_staleness={staleness}, which makes train.old_logprobs=auto the engine"
    )
    yield Rule(
        recipe.old_logprobs == "engine",
        "the run would correct the same difference twice",
        why=f"the policy ratio already uses the engine's log-probs ({why}), and "
        f"`train.correction.kind={correction.kind}` would apply trainer / engine again",
        fix=["--set train.old_logprobs=trainer", "--set train.correction.kind=none"],
    )
    if correction.kind != "importance":
        return
    for name in ("", "reject_"):
        low, high = getattr(correction, f"{name}low"), getattr(correction, f"{name}high")
        yield _interval_rule(low > high, f"train.correction.{name}low", low, high)
    yield Rule(
        correction.mode == "binary_kl" and correction.level != "token",
        f"`train.correction.mode=binary_kl` does not support the level {correction.level}",
        why="it compares the probabilities of single tokens",
        fix="--set train.correction.level=token",
    )
    is_unweighted = correction.mode == "none" and correction.veto is None
    yield Rule(
        is_unweighted and correction.reject_level == "none",
        "the correction has no effect",
        why="`train.correction.mode` is none, and neither `reject_level` nor `veto` is set",
        fix=["--set train.correction.mode=truncate", "--set train.correction.kind=none"],
    )


def _sampling_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for what is sampled, which prompts are started, and which groups are used."""
    rollout, curriculum = recipe.rollout, recipe.data.curriculum
    yield Rule(
        rollout.top_p != 1.0 or rollout.top_k != -1,
        "rollout would sample from a different distribution than the trainer scores",
        why=f"rollout.top_p {rollout.top_p:g} and rollout.top_k {rollout.top_k} cut off the "
        "tail, while log-probs cover the whole vocabulary: ratios and gradients would "
        "belong to a policy that did not sample",
        fix="--set rollout.top_p=1.0 --set rollout.top_k=-1   # rollout.temperature is corrected",
    )
    yield Rule(
        rollout.selection != "first" and rollout.over_sampling == 1.0,
        f"`rollout.selection={rollout.selection}` has nothing to choose from",
        why="a step starts only the prompts that it needs: `rollout.over_sampling` is 1",
        fix=["--set rollout.over_sampling=1.5", "--set rollout.selection=first"],
    )
    yield Rule(
        curriculum != "none" and rollout.max_staleness > 0,
        f"`data.curriculum={curriculum}` does not work when rollout runs ahead",
        why="it chooses by the results of earlier steps, which are not complete with "
        f"`rollout.max_staleness` {rollout.max_staleness} when the next prompts are chosen",
        fix=["--set rollout.max_staleness=0", "--set data.curriculum=none"],
    )


def _interval_rule(broken: bool, key: str, low: float, high: float) -> Rule:
    upper = key.replace("low", "high")
    return Rule(
        broken,
        f"nothing lies between `{key}` {low:g} and `{upper}` {high:g}",
        why="the lower bound must be below the upper one",
        fix=f"--set {key}={min(low, high):g} --set {upper}={max(low, high, low + (low == high)):g}",
    )


def algorithm_warnings(recipe: Recipe) -> list[str]:
    """Return warnings about legal settings that are probably not intended."""
    train, stale = recipe.train, recipe.rollout.max_staleness > 0
    doubts = {
        "`train.kl_estimator=k1` in the loss has a gradient whose expectation is zero: it adds "
        "noise and holds nothing near the reference; k2 and k3 do": (
            train.kl_coef and train.kl_in == "loss" and train.kl_estimator == "k1"
        ),
        "`train.kl_in` and `kl_unbiased` have no effect: `train.kl_coef` is 0": (
            not train.kl_coef and (train.kl_in == "reward" or train.kl_unbiased)
        ),
        "`train.old_logprobs=trainer` beyond `rollout.max_staleness` 0: the ratio is to the "
        "current trainer's policy, not to the older one that sampled, so stale samples are "
        "trained on as if they were fresh; train.algorithm=decoupled_ppo weighs them": (
            train.old_logprobs == "trainer" and stale and train.correction.kind == "none"
        ),
        f"`train.surrogate={train.surrogate}` has no policy ratio: it takes every sample for "
        "one of the current policy"
        + (", which at this `rollout.max_staleness` it is not" if stale else ""): (
            train.surrogate == "reinforce" and (stale or train.updates_per_step > 1)
        ),
        f"`train.ratio={train.ratio}` with `train.aggregation=token_mean`: a sequence counts "
        "by its length, which GSPO divides by; sequence_mean counts each once": (
            train.ratio != "token" and train.aggregation == "token_mean"
        ),
        "`train.surrogate=gmpo` is a loss of whole sequences: with another aggregation than "
        "sequence_mean it counts once for each token": (
            train.surrogate == "gmpo" and train.aggregation != "sequence_mean"
        ),
    }
    return [text for text, applies in doubts.items() if applies]
