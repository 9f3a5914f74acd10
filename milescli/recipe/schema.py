"""What a recipe can say. Strict (unknown keys are refused), frozen, with every default in one
place.

It knows nothing of the machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


Ratio = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "k2", "k3", "low_var"]


class Section(BaseModel):
    """A part of the recipe."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class ScratchModel(Section):
    """A small model made here from a seed, instead of one that is downloaded."""

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    hidden_size: Positive = 128
    num_layers: Positive = 4
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    ffn_hidden_size: Positive = 384
    num_experts: NonNegative = 0
    """0 for a dense model; needs `family: qwen3_moe` otherwise."""
    topk: Positive = 2
    """Experts per token."""
    moe_ffn_hidden_size: Positive = 128
    vocab_size: Positive = 512
    """Size of the byte-level BPE vocabulary, trained here on the task's own text."""
    tie_embeddings: bool = True
    rope_theta: PositiveFloat = 10_000.0
    max_position_embeddings: Positive = 4096


class Model(Section):
    """Which weights are trained."""

    path: str | None = None
    """A Hugging Face folder or hub name."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    scratch: ScratchModel | None = None
    """Make a small model instead. Exactly one of `path` and `scratch` is given."""
    allow_unproven: bool = False
    """Train a family that no independent implementation could be compared with (`miles models`
    names them)."""


class Data(Section):
    """Where prompts come from."""

    prompts: str | None = None
    """A .jsonl or .parquet file; `hf:NAME[@REVISION][:SUBSET][:SPLIT]` for a data set of the hub
    (`hf:openai/gsm8k:main:train`), which is fetched; or `task:NAME` for prompts that miles makes
    itself (`task:sums`)."""
    eval: str | None = None
    """Held-out prompts, in the same forms; null: no evaluation."""
    demonstrations: str | None = None
    """Worked examples for the warm-up, in the same forms."""
    prompt_key: str | None = None
    """Column of the prompt (text, or a list of messages); null: the first of prompt, messages,
    question, problem and input that is there."""
    label_key: str | None = None
    """Column of the label; null: the first of label, answer, solution and target that is there."""
    system_prompt: str | None = None
    """Put before every prompt as the system message; null: none."""
    max_prompt_tokens: Positive = 256
    """Longest prompt, chat template included."""
    long_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts. drop: left out and counted; error: the run is refused."""
    shuffle: bool = True
    """A new order for each epoch, fixed by the run's seed."""


class Rollout(Section):
    """How answers are made and scored."""

    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8
    max_response_tokens: Positive = 256
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    stop: list[str] = []
    """Strings that end a response, beside the end-of-sequence token."""
    agent: str = "single_turn"
    """How a prompt becomes a sample: single_turn (one response), or an import path
    `mypkg.agents:solve`."""
    reward: str = "math"
    """math, gsm8k, exact_match, or an import path `mypkg.rewards:strict`."""
    reward_timeout_s: PositiveFloat = 30.0
    reward_retries: NonNegative = 0
    """How often a reward that raises is tried again before the run stops."""
    filter: str = "none"
    """Groups that are replaced by further prompts. none; zero_variance: those whose rewards are all
    equal; pass_rate: those whose mean reward is outside of the bounds below; or an import path."""
    pass_rate_low: float = 0.1
    pass_rate_high: float = 0.95
    over_sampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Begin so many times the prompts of a step, take those that are done first, and give the rest
    up: stragglers hold nobody up, but short answers come first, and a resumed run is not bit for
    bit the one that was not stopped."""
    shaping: str = "none"
    """How scored rewards become those that are trained on. none; overlong: less for responses near
    `max_response_tokens` (DAPO); or an import path."""
    overlong_buffer: Positive | None = None
    """overlong: tokens before the bound over which the penalty rises; null: a fifth of it."""
    overlong_penalty: NonNegativeFloat = 1.0
    """overlong: at the bound."""
    mask_truncated: bool = False
    """Nothing is learned of the tokens of responses that were cut off (overlong filtering of DAPO);
    their rewards still count for the others of their group."""
    max_filter_rounds: Positive = 8
    """Bound on replacement rounds per step; then the run stops and says so."""
    max_staleness: NonNegative = 0
    """0: strictly on-policy. N: rollout may run up to N weight versions ahead of the trainer."""


class Optimizer(Section):
    """AdamW, as Megatron-Core's distributed optimizer runs it."""

    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
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


class Train(Section):
    """How groups become one optimizer step."""

    algorithm: str | None = None
    """A row of `miles algorithms`: sets the pieces below that nobody else sets. null: each piece as
    it stands here."""
    steps: Positive = 100
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on an accelerator, fp32 on a CPU."""
    objective: str = "policy"
    """What a step minimises: policy (made of the pieces below), supervised, or an import path to a
    factory `(recipe) -> Objective`."""
    advantage: str = "grpo"
    """Estimator of advantages: grpo, rloo, reinforce, remax, opo, gpg, gigpo, pass_at_k, best_of_n,
    max_rl, or an import path."""
    normalize_std: Literal["group", "batch", "none"] = "group"
    """grpo, best_of_n, gigpo: divide by the std of the group's rewards, of the batch's, or not at
    all (Dr. GRPO)."""
    pass_k: Positive = 4
    """pass_at_k: the k."""
    turn_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the credit of single turns beside that of the whole episode."""
    credit: str = "sample"
    """How an advantage is spread over a sample's tokens. sample: each has it; to_go: discounted
    from the last trained token; gae: against a critic's values; or an import path."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """to_go, gae, gigpo: discount of a token (gigpo: of a turn)."""
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
    kl_estimator: KlEstimator = "k3"
    """k1: log ratio; k2: half its square; k3: never negative, and its mean is the KL's; low_var:
    k3, at most 10."""
    kl_unbiased: bool = False
    """Weigh the KL term by the policy ratio, so that its gradient is that of the KL when the
    sampling policy was another (DeepSeek-V3.2)."""
    entropy_coef: NonNegativeFloat = 0.0
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


class Warmup(Section):
    """Supervised steps on `data.demonstrations` before RL; 0 steps: none."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    """Demonstrations in one step."""
    lr: PositiveFloat = 1e-3
    max_loss_tokens: Positive = 4096
    """Demonstrations longer than this are refused."""


class Weights(Section):
    """How weights reach the engines."""

    channel: Literal["auto", "tensor", "distributed"] = "auto"
    """tensor: shared memory, where trainer and engines share devices; distributed: broadcast to
    engines on other devices; auto: chosen by the plan."""
    bucket_mib: Positive = 512
    """Weights that are sent at once, in MiB."""
    verify: bool = False
    """After each publish, compare what the engines hold with what the trainer sent, bit for bit."""


class Parallel(Section):
    """Pins of the trainer's layout; what is not pinned is chosen."""

    tp: Positive | None = None
    """Tensor-parallel ranks."""
    pp: Positive | None = None
    """Pipeline stages."""
    cp: Positive | None = None
    """Context-parallel ranks, which share the positions of a sequence."""
    ep: Positive | None = None
    """Expert-parallel ranks, which share the experts."""
    etp: Positive | None = None
    """Tensor-parallel ranks of each expert."""
    dp: Positive | None = None
    """Data-parallel ranks."""
    sequence_parallel: bool | None = None
    """Split norms and residuals along the sequence over the tensor-parallel ranks."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as many as the others."""
    last_stage_layers: Positive | None = None
    """The same of the last stage, which has the output layer to compute as well."""


class EngineSettings(Section):
    """Pins of the rollout engines."""

    num: Positive | None = None
    """Engines."""
    tp: Positive | None = None
    """Devices of one engine."""
    ep: Positive | None = None
    """Expert-parallel groups among the devices of an engine."""
    attention_dp: Positive | None = None
    """Groups of an engine's devices that take different requests, each with its own cache (SGLang's
    DP attention)."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """colocated: trainer and engines share devices and take turns; split: each has its own."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Of a device's memory, for weights and cache; null: chosen by the plan."""
    max_running_requests: Positive | None = None
    """Per engine; null: chosen by the plan."""
    max_total_tokens: Positive | None = None
    """KV-cache slots per engine; null: what the memory fraction allows (on a CPU: chosen by the
    plan)."""
    attention_backend: Literal["fa3", "fa4", "flashinfer", "triton"] | None = None
    """SGLang's attention kernels on an accelerator, of those whose tokens do not depend on the
    batch; null: SGLang's choice for the device (ROCm: triton). A CPU has one of its own."""
    cuda_graphs: bool = True
    """Replay decoding steps as graphs on an accelerator (prefills are not). false: engines start
    sooner and hold less memory; decoding is slower."""
    extra: list[str] = []
    """Further arguments of SGLang's server, as on its command line: [--chunked-prefill-size=4096].
    What the recipe or miles sets already is refused."""


class Evaluation(Section):
    """Evaluation on `data.eval`."""

    every: NonNegative = 0
    """Steps between evaluations; 0: only at the start and the end."""
    num_prompts: Positive | None = None
    """Only the first N held-out prompts; null: all."""
    samples_per_prompt: Positive = 1
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    max_response_tokens: Positive | None = None
    """null: as in `rollout`."""


class Checkpoint(Section):
    """What is kept on disk."""

    every: NonNegative = 20
    """Steps between checkpoints; 0: only at the end. A stopped run is saved in any case."""
    keep: Positive = 2
    """How many of the newest are kept."""
    async_save: bool = True
    """Write in the background while training goes on."""


class MachineSettings(Section):
    """What the run may use. May also come from the environment and from files."""

    gpus: NonNegative | None = None
    """GPUs per node; null: all that are visible; 0: the CPU."""
    nodes: Positive = 1
    address: str | None = None
    """HOST:PORT of a running Ray cluster, or auto; null: start Ray on this machine alone."""
    cpu_threads: Positive | None = None
    """Threads of each trainer rank and engine on a CPU; null: chosen by the plan."""
    start_timeout_s: PositiveFloat = 600.0
    """Bound on the start of Ray, engines and trainer ranks."""
    step_timeout_s: PositiveFloat = 3600.0
    """Bound on one rollout, one optimizer step, one publish or one save."""

    @property
    def request_timeout_s(self) -> float:
        """Bound on one request to an engine within a step. It ends, and the engine is asked whether
        it lives, before the wait for the step ends: so the error names who hangs."""
        return max(self.step_timeout_s - 30.0, 0.5 * self.step_timeout_s)


class RunSettings(Section):
    """Where the run lives and what watches it. May also come from the environment and from
    files."""

    name: str | None = None
    """null: the recipe's name and a number that is free."""
    dir: str = "runs"
    """Folder that run directories are made in."""
    seed: NonNegative = 0
    tensorboard: bool = True
    """Log to TensorBoard, in the run directory."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases too; the key comes from WANDB_API_KEY alone."""


class Recipe(Section):
    """The whole recipe."""

    name: str = "unnamed"
    description: str = ""
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    train: Train = Train()
    warmup: Warmup = Warmup()
    weights: Weights = Weights()
    parallel: Parallel = Parallel()
    engines: EngineSettings = EngineSettings()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    machine: MachineSettings = MachineSettings()
    run: RunSettings = RunSettings()

    @property
    def old_logprobs(self) -> Literal["trainer", "engine"]:
        """Who says what the old policy was, `train.old_logprobs: auto` resolved: stale samples came
        from older weights, and only the engine knows their log-probs."""
        if self.train.old_logprobs != "auto":
            return self.train.old_logprobs
        return "engine" if self.rollout.max_staleness else "trainer"

    @property
    def keeps_reference(self) -> bool:
        """Whether the weights before RL are kept, `train.reference` resolved."""
        if self.train.reference is not None:
            return self.train.reference
        return self.train.kl_coef > 0
