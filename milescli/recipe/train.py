"""What a recipe can say of training: the optimizer, and the pieces that an algorithm is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.draft import Draft
from milescli.recipe.lora import Lora
from milescli.recipe.mtp import Mtp
from milescli.recipe.rewards import Requests
from milescli.recipe.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)

Ratio = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "k2", "k3", "low_var"]
OF_PAIRS = ("preference", "reward_model")
"""Built-in objectives that learn from pairs of `data.train`."""
OF_ROWS = ("supervised", "distillation", *OF_PAIRS)
"""Those that learn from its rows."""
OF_SCORES = ("reward_model",)
"""Those whose model gives a score instead of a next token."""


class Optimizer(Section):
    """As Megatron-Core's distributed optimizer runs it."""

    rule: str = "adamw"
    """What a step does to a weight: adamw; lion; sgd, with momentum `beta1`; or an import path."""
    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: str = "constant"
    """What the rate does after its warm-up: constant; linear or cosine down to `min_lr`; or an
    import path."""
    warmup_steps: NonNegative = 0
    """Linear rise of the learning rate, within `train.steps`."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Global norm; 0: no clipping."""
    offload: bool | None = None
    """Keep Adam's moments and float32 weights in host memory, and step there; null: only where
    nothing else fits."""


class SoftClip(Section):
    """Of the surrogate `sapo`: how steeply its gate falls beside a ratio of 1."""

    positive: PositiveFloat = 1.0
    """Where the advantage is positive."""
    negative: PositiveFloat = 1.05
    """Where it is not."""


class Covariance(Section):
    """Of the surrogates `clip_cov` and `kl_cov`: which tokens are held back, and how."""

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.0002
    """Of a step's trained tokens; one at least."""
    low: float = 1.0
    """clip_cov draws tokens whose covariance is above this,"""
    high: float = 5.0
    """and below this."""
    kl_coef: NonNegativeFloat = 1.0
    """kl_cov: weight of |log ratio| at the tokens it holds back."""


class CorrectionSettings(Section):
    """Weights for what trainer and engine do not agree on: kernels, precision, staleness. They
    compare the trainer's log-probs before the step's first update with the engine's."""

    kind: str = "none"
    """none, importance (by the keys below), or an import path."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What a ratio is of: a token, its whole sequence (the product), or the sequence's geometric
    mean."""
    mode: Literal["truncate", "clip", "mask", "none"] = "truncate"
    """truncate: at most `high` (TIS); clip: between `low` and `high`; mask: nothing is learned
    outside of them (IcePop); none: no weight, rejection alone."""
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    veto: PositiveFloat | None = None
    """Nothing is learned of a sequence one of whose tokens has a ratio below this."""
    reject_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Nothing is learned where the ratio at this level is outside of the bounds below."""
    reject_low: NonNegativeFloat = 0.5
    reject_high: PositiveFloat = 2.0


PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "kto", "orpo", "simpo"]
REFERENCE_FREE = ("orpo", "simpo")
"""Preference losses that compare with no reference."""


class Preference(Section):
    """Of `train.objective: preference`."""

    loss: PreferenceLoss = "sigmoid"
    """sigmoid (DPO; cDPO with `label_smoothing`), ipo, hinge (SLiC), kto, orpo or simpo."""
    beta: PositiveFloat = 0.1
    """How strongly the reference holds (ipo: its tau; orpo: the weight of the odds ratio; simpo:
    the scale of the reward)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid, simpo: chance that a pair is the wrong way round."""
    gamma: NonNegativeFloat = 0.5
    """simpo: margin that a chosen response is to have."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the imitation of chosen responses beside the loss, per token (orpo: 1 at least)."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: of responses that were judged good."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: of the others."""
    reference: Literal["cached", "live"] = "cached"
    """cached: log-probs of the rows by the weights at the start are computed once, before the first
    step, and kept in the run directory: a number for each token. live: these weights are kept, and
    score each step's rows (kto: always)."""


class RewardModelSettings(Section):
    """Of `train.objective: reward_model`."""

    center_coef: NonNegativeFloat = 0.0
    """Weight of the square of a pair's scores added up, which keeps them around 0; 0.01 is
    usual."""


class Critic(Section):
    """What `train.credit: gae` weighs rewards against: a model of values, with an optimizer of its
    own that is set as the policy's."""

    path: str | None = None
    """A Hugging Face folder that gives scores, or whose output layer is replaced by a score (a
    reward model, the policy's base); null: the policy's own weights at the start, with a new
    head."""
    lr: PositiveFloat = 1e-5
    """Of its optimizer; it falls and rises as the policy's."""
    warmup_steps: NonNegative = 0
    """First steps in which the critic alone learns."""
    clip: PositiveFloat | None = 0.2
    """A value that has moved by more than this in a step gains nothing by it; null: no bound."""


class Teacher(Section):
    """A model that is learned from. It may be of another family or size than the policy, and has
    the same tokenizer. Either `path` or `url`."""

    path: str | None = None
    """A Hugging Face folder or hub name, or a run's directory: the weights of its newest
    checkpoint. The trainer's ranks hold it."""
    url: str | None = None
    """An SGLang server that has it, http://HOST:PORT: it is asked by HTTP, while the policy
    samples."""
    sources: list[str] | None = None
    """Names of entries of `data.mix` whose prompts it teaches; null: of the one teacher, all."""

    @property
    def called(self) -> str:
        """For people."""
        return self.path or self.url or "without path and url"


class Distill(Section):
    """What is learned from teachers: each token that the policy samples is compared with what a
    teacher would say there, beside the reward or instead of it; with `train.objective:
    distillation`, each token of the rows of `data.train`."""

    teachers: list[Teacher] = Field(default=[])
    """[{path: big}], or [{url: 'http://HOST:PORT'}]; several, each with the `sources` of `data.mix`
    that it teaches: a prompt has one teacher. Empty: nothing is distilled."""
    kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """How far policy and teacher are apart. sampled: log pi - log teacher of the sampled token
    costs it that much of its advantage, as `train.credit` says; reverse, forward: KL(policy ||
    teacher), KL(teacher || policy) over the teacher's `top_k` likeliest tokens and all others as
    one, with its gradient, as a term of the loss."""
    top_k: Positive = 32
    """reverse, forward: tokens of the teacher at each position."""
    server: Requests = Requests()
    """Of teachers by `url`: how they are asked."""
    coef: PositiveFloat = 1.0
    """Weight of that distance."""
    cache: bool = True
    """distillation: what teachers say of the rows is computed once, before the first step, and kept
    in the run directory, 8 x `top_k` bytes a token; then they are dismissed. false: they stay, and
    say it at each step."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages that rewards give; 0: the teacher alone, and `rollout.reward` may be
    none."""

    @property
    def is_served(self) -> bool:
        """Whether teachers are asked by HTTP; else the trainer's ranks hold them."""
        return any(teacher.url is not None for teacher in self.teachers)


def teachers_by_source(settings: Distill) -> dict[str | None, int]:
    """Entry of `data.mix` -> number of its teacher; empty where one teaches all."""
    return {
        source: number
        for number, teacher in enumerate(settings.teachers)
        for source in teacher.sources or []
    }


class Train(Section):
    """How groups, or rows, become one optimizer step."""

    algorithm: str | None = None
    """A row of `miles algorithms`: sets the pieces below that nobody else sets. null: each piece as
    it stands here."""
    steps: Annotated[Positive, Field(le=10**9)] = 100
    epochs: PositiveFloat | None = None
    """Passes over the rows of `data.train`, instead of `steps`; null: `steps` says how long."""
    batch_size: Positive = 32
    """Rows of `data.train` in one step; a pair is one row."""
    before_log_probs: str | None = None
    """Import path of a function (*, model, stream), called on each trainer rank before it computes
    log-probs: of the policy before the step (old), or of the reference."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on an accelerator, fp32 on a CPU."""
    objective: str = "policy"
    """What a step minimises: policy (made of the pieces below, on what engines sample); supervised,
    preference, reward_model or distillation (on the rows of `data.train`); or an import path to a
    factory `(recipe) -> Objective`."""
    advantage: str = "grpo"
    """Estimator of advantages: grpo, rloo, reinforce, remax, opo, gpg, gigpo, turns, pass_at_k,
    best_of_n, max_rl, or an import path."""
    normalize_std: Literal["group", "batch", "none"] = "group"
    """grpo, best_of_n, gigpo, turns: divide by the std of the group's rewards, of the batch's, or
    not at all (Dr. GRPO)."""
    pass_k: Positive = 4
    """pass_at_k: the k."""
    turn_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the credit of single turns beside that of the whole episode."""
    credit: str = "sample"
    """How an advantage is spread over a sample's tokens. sample: each has it; to_go: discounted
    from the last trained token; gae: against a critic's values; or an import path."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """to_go, gae: discount of a token; gigpo, turns: of a turn."""
    lam: Fraction = 1.0
    """gae: its lambda."""
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and std 1 over all trained tokens of a step."""
    ratio: Ratio = "token"
    """What the policy ratio is of. token; sequence: the geometric mean over its sequence (GSPO);
    sequence_token: that value, with the gradient of the token's own (GSPO-token)."""
    surrogate: str = "clip"
    """Term of the loss that advantages drive: clip (PPO), reinforce, cispo, gmpo, sapo, topr,
    clip_cov, kl_cov, dppo_tv, dppo_kl, or an import path."""
    aggregation: str = "token_mean"
    """token_mean: mean over all trained tokens of an update (DAPO); sequence_mean: mean over
    samples of their token means (GRPO); sequence_sum: mean over samples of their token sums;
    constant: that, divided by `constant_length` (Dr. GRPO); or an import path."""
    constant_length: Positive | None = None
    """Tokens; null: `rollout.max_response_tokens`."""
    clip_low: NonNegativeFloat = 0.2
    """Of the ratio below 1 (gmpo: of its logarithm; dppo: of a probability, or a divergence)."""
    clip_high: NonNegativeFloat = 0.28
    """The same above 1."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound on the ratio of tokens with a negative advantage (dual-clip PPO; 3 is usual); null: no
    bound."""
    soft_clip: SoftClip = SoftClip()
    covariance: Covariance = Covariance()
    correction: CorrectionSettings = CorrectionSettings()
    off_policy_mask: NonNegativeFloat | None = None
    """Nothing is learned of a sequence of negative advantage that the policy has left by more than
    this: mean of log pi_engine - log pi (OPSM of DeepSeek-V3.2); null: all are learned from."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term against the frozen reference; 0: no KL term."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it stands. reward: it costs each token of its advantage, as `credit` says, by the
    policy before the step's first update."""
    reference: bool | None = None
    """Keep the weights before RL as a frozen reference; none: where `kl_coef` is above 0."""
    reference_every: NonNegative = 0
    """Steps after which the weights of now become the reference; 0: it stays."""
    kl_estimator: KlEstimator = "k3"
    """k1: log ratio; k2: half its square; k3: never negative, and its mean is the KL's; low_var:
    k3, at most 10."""
    kl_unbiased: bool = False
    """Weigh the KL term by the policy ratio, so that its gradient is that of the KL when the
    sampling policy was another (DeepSeek-V3.2)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; with a target, where it begins."""
    entropy_target: NonNegativeFloat | None = None
    """Nats a token. Below it the bonus acts, and its weight rises by `entropy_delta` a step; above
    it the weight falls by as much, and the bonus rests (Skywork-OR1). null: the weight stays."""
    entropy_delta: PositiveFloat = 0.005
    entropy_max: PositiveFloat = 0.1
    """Largest weight."""
    old_logprobs: Literal["auto", "trainer", "engine"] = "auto"
    """Who says what the old policy was. auto: the trainer at max_staleness 0, the engine beyond."""
    updates_per_step: Positive = 1
    """Optimizer updates on each step's groups (PPO-style minibatches)."""
    max_tokens_per_microbatch: Positive | None = None
    """Of one rank: a row of packed sequences has so many tokens for each context-parallel rank;
    none: chosen by the plan (CPU: 8192)."""
    recompute: Literal["auto", "none", "full"] = "auto"
    """Keep only the inputs of layers for the backward pass; auto: where activations do not fit
    otherwise (CPU: none)."""
    expert_imbalance: Annotated[float, Field(ge=1.0)] = 1.5
    """Memory is planned for an expert rank that gets so many times its even share of tokens
    (mixture-of-experts only); nothing is dropped."""
    routing_replay: bool = False
    """R3: the trainer routes as the engine did (mixture-of-experts only)."""
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    preference: Preference = Preference()
    reward_model: RewardModelSettings = RewardModelSettings()
    distill: Distill = Distill()
    lora: Lora = Lora()
    mtp: Mtp = Mtp()
    draft: Draft = Draft()
