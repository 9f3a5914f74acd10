"""What a recipe can say of training: the optimizer, and the pieces that an algorithm is made of;
and the rules of which pieces make no sense together."""

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
    precision: Literal["auto", "bf16", "fp32", "fp8_block", "mxfp8", "int4_qat", "nvfp4"] = "auto"
    """auto: bf16 on an accelerator, fp32 on a CPU. fp8_block, mxfp8, int4_qat, nvfp4: the same, and
    the matrices of the policy's layers are rounded to that format before each product; the
    optimizer keeps them as they are (docs/precision.md)."""
    quantise_inputs: bool | None = None
    """Round the inputs of those matrices to the format too, in trainer and engines. null: on
    accelerators, for fp8_block, mxfp8 and nvfp4; on a CPU for the first two, with `on_policy:
    exact`."""
    exempt: list[str] = Field(default=[])
    """Regular expressions of modules that neither trainer nor engines quantise, beside those that
    releases keep plain: ["layers\\.0\\.", "shared_experts"]."""
    on_policy: Literal["auto", "exact"] = "auto"
    """exact: the log-probs of engines and trainer are equal bit for bit (docs/on-policy.md), which
    takes longer; auto: equal up to rounding."""
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


ALWAYS_ZERO_ALONE = ("grpo", "gpg", "gigpo", "turns", "best_of_n", "max_rl")
"""Advantages of a group of one."""
OF_TURNS = ("gigpo", "turns")
COMPARING = (*ALWAYS_ZERO_ALONE, "rloo", "opo", "pass_at_k")
"""Advantages that compare the samples of a prompt."""
OF_TOKENS = ("reinforce", "topr", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
"""Built-in surrogates that look at tokens one by one, or take no ratio: that of a whole sequence
means nothing to them."""
WITHOUT_DUAL_CLIP = ("reinforce", "topr", "gmpo", "kl_cov", "dppo_tv", "dppo_kl", "cispo", "sapo")
"""Built-in surrogates without PPO's clip."""
CLIPS_RATIO = ("clip", "clip_cov", "cispo")
"""Surrogates whose `clip_low` is of a ratio; the others' is of a logarithm, a probability or a
divergence."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the optimizer."""
    train, optimizer, scratch = recipe.train, recipe.train.optimizer, recipe.model.scratch
    yield Rule(
        optimizer.warmup_steps >= train.steps,
        "the learning rate would never reach its value",
        why=f"train.optimizer.warmup_steps {optimizer.warmup_steps}, train.steps {train.steps}",
        fix=f"--set train.optimizer.warmup_steps={train.steps // 10}",
    )
    yield Rule(
        optimizer.min_lr > optimizer.lr,
        "the learning rate would rise instead of fall",
        why=f"train.optimizer.min_lr {optimizer.min_lr:g} is above train.optimizer.lr "
        f"{optimizer.lr:g}",
        fix="--set train.optimizer.min_lr=0",
    )
    for name in ("beta1", "beta2"):
        yield Rule(
            getattr(optimizer, name) == 1.0,
            f"`train.optimizer.{name}` cannot be 1",
            why="a moving average with no room for the new value never moves",
            fix=f"--set train.optimizer.{name}={Optimizer.model_fields[name].default}",
        )
    yield Rule(
        train.routing_replay and scratch is not None and scratch.family == "qwen3",
        "there is no routing to replay",
        why="`train.routing_replay` is for mixtures of experts, and `model.scratch.family` is "
        "qwen3",
        fix=[
            "--set train.routing_replay=false",
            "--set model.scratch.family=qwen3_moe --set model.scratch.num_experts=8 "
            "--set model.scratch.tie_embeddings=false",
        ],
    )


def algorithm_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules against pieces of an algorithm that make no sense together."""
    yield from _group_rules(recipe)
    yield from _surrogate_rules(recipe.train)
    yield from _model_rules(recipe)
    yield from _correction_rules(recipe)
    yield from _sampling_rules(recipe)


def _group_rules(recipe: Recipe) -> Iterator[Rule]:
    train, samples = recipe.train, recipe.rollout.samples_per_prompt
    is_rewarded = not recipe.teachers or train.distill.reward_weight > 0
    is_zero = train.advantage in ALWAYS_ZERO_ALONE
    yield Rule(
        samples == 1 and train.advantage in COMPARING and is_rewarded,
        "groups of one teach nothing",
        why=f"`{train.advantage}` compares the samples of one prompt; with "
        "`rollout.samples_per_prompt` 1 "
        + ("every advantage is 0" if is_zero else "there is no other"),
        fix=["--set rollout.samples_per_prompt=8", "--set train.advantage=reinforce"],
    )
    yield Rule(
        train.advantage == "pass_at_k" and train.pass_k >= samples,
        f"pass@{train.pass_k} of {samples} samples teaches nothing",
        why="all k-subsets of a group would be the group itself: `train.pass_k` must be less than "
        "`rollout.samples_per_prompt`",
        fix=[
            f"--set train.pass_k={max(samples // 2, 1)}",
            f"--set rollout.samples_per_prompt={2 * train.pass_k}",
        ],
    )
    yield Rule(
        train.advantage in OF_TURNS and train.credit != "sample",
        f"`{train.advantage}` cannot be spread by `{train.credit}`",
        why="it gives each turn a credit of its own, discounted already",
        fix="--set train.credit=sample",
    )


def _surrogate_rules(train: Train) -> Iterator[Rule]:
    surrogate, covariance = train.surrogate, train.covariance
    is_unbounded = train.clip_low == 1.0 and surrogate == "cispo"
    yield Rule(
        surrogate in CLIPS_RATIO and train.clip_low >= 1.0 and not is_unbounded,
        f"`train.clip_low` cannot be {train.clip_low:g}",
        why="the ratio is kept above 1 - clip_low, and a ratio is positive: it must stay below 1",
        fix="--set train.clip_low=0.2",
    )
    yield Rule(
        train.ratio != "token" and surrogate in OF_TOKENS,
        f"`train.surrogate={surrogate}` cannot take the ratio of a {train.ratio}",
        why="it looks at the tokens one by one, or has no ratio at all; clip, cispo and sapo can",
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
    """Of the models beside the policy, and of what holds the policy near them."""
    train, warmup_steps = recipe.train, recipe.train.critic.warmup_steps
    yield Rule(
        recipe.has_critic and warmup_steps >= train.steps,
        "the policy would never learn",
        why=f"`train.critic.warmup_steps` is {warmup_steps}, and `train.steps` is {train.steps}: "
        "the critic alone learns until then",
        fix=f"--set train.critic.warmup_steps={train.steps // 10}",
    )
    yield Rule(
        recipe.has_critic and train.routing_replay,
        "routing is not replayed in a critic",
        why="`train.routing_replay` fixes the experts by what the engine chose, and the critic is "
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
        "there is no reference to move",
        why=f"`train.reference_every` is {train.reference_every}, and the run keeps none: "
        "`train.kl_coef` is 0",
        fix=["--set train.kl_coef=0.001", "--set train.reference_every=0"],
    )
    yield Rule(
        train.entropy_target is not None and train.entropy_coef > train.entropy_max,
        "the entropy bonus begins above its bound",
        why=f"`train.entropy_coef` {train.entropy_coef:g}, `train.entropy_max` "
        f"{train.entropy_max:g}",
        fix=f"--set train.entropy_max={train.entropy_coef:g}",
    )
    yield Rule(
        train.kl_unbiased and train.kl_in == "reward",
        "`train.kl_unbiased` is of a KL term in the loss",
        why="in the reward the term has no gradient to set right (`train.kl_in` is reward)",
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
        "the same difference would be corrected twice",
        why=f"the policy ratio is to the engine's log-probs already ({why}), and "
        f"`train.correction.kind={correction.kind}` weighs by trainer / engine once more",
        fix=["--set train.old_logprobs=trainer", "--set train.correction.kind=none"],
    )
    if correction.kind != "importance":
        return
    for name in ("", "reject_"):
        low, high = getattr(correction, f"{name}low"), getattr(correction, f"{name}high")
        yield _interval_rule(low > high, f"train.correction.{name}low", low, high)
    is_unweighted = correction.mode == "none" and correction.veto is None
    yield Rule(
        is_unweighted and correction.reject_level == "none",
        "the correction corrects nothing",
        why="`train.correction.mode` is none, and neither `reject_level` nor `veto` is set",
        fix=["--set train.correction.mode=truncate", "--set train.correction.kind=none"],
    )


def _sampling_rules(recipe: Recipe) -> Iterator[Rule]:
    """Of what is sampled, which prompts are begun, and which groups are taken."""
    rollout, curriculum = recipe.rollout, recipe.data.curriculum
    yield Rule(
        rollout.top_p != 1.0 or rollout.top_k != -1,
        "rollout samples another distribution than the trainer scores",
        why=f"rollout.top_p {rollout.top_p:g} and rollout.top_k {rollout.top_k} cut the tail off, "
        "while log-probs are of the whole vocabulary: every ratio and every gradient would be of "
        "a policy that sampled nothing",
        fix="--set rollout.top_p=1.0 --set rollout.top_k=-1   # rollout.temperature is corrected",
    )
    yield Rule(
        rollout.selection != "first" and rollout.over_sampling == 1.0,
        f"`rollout.selection={rollout.selection}` has nothing to choose from",
        why="a step begins no more prompts than it needs: `rollout.over_sampling` is 1",
        fix=["--set rollout.over_sampling=1.5", "--set rollout.selection=first"],
    )
    yield Rule(
        curriculum != "none" and rollout.max_staleness > 0,
        f"`data.curriculum={curriculum}` cannot run ahead",
        why="it chooses by what came of the steps before, which at `rollout.max_staleness` "
        f"{rollout.max_staleness} are not done when the next prompts are chosen",
        fix=["--set rollout.max_staleness=0", "--set data.curriculum=none"],
    )


def _interval_rule(broken: bool, key: str, low: float, high: float) -> Rule:
    upper = key.replace("low", "high")
    return Rule(
        broken,
        f"nothing lies between `{key}` {low:g} and `{upper}` {high:g}",
        why="the lower bound must be below the upper one",
        fix=f"--set {key}={min(low, high):g} --set {upper}={max(low, high):g}",
    )


def algorithm_doubts(recipe: Recipe) -> list[str]:
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
