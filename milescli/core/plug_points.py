"""The table of plug points: every kind of plug-in that a user can supply, in the order in which it
is listed. Docs, `miles plugins`, TAB completion and the checks before a run read it. Each plug
point also has a protocol in its package, a contract test that plug-ins must pass, and an example
for `miles plugins new`."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.core.registry import PlugPoint

_ROLLOUT, _TRAIN = "milescli.rollout.contract", "milescli.train.contract"
_HOOKS = "milescli.runtime.recording.user_hooks"
_REWARDS, _SELECTORS = "milescli.rollout.rewards", "milescli.rollout.collect.selectors"


def _all_of(module: str, *names: str) -> Mapping[str, str]:
    """Map names to functions of a module that have the same names."""
    return {name: f"{module}:{name}" for name in names}


REWARDS = PlugPoint(
    kind="reward",
    key="rollout.reward",
    signature="(*, prompt, response, label) -> float",
    about="scores a response; or (prompt, responses, label): a group, or (prompts, responses, "
    "labels): a batch -> floats; plain or async",
    builtin={
        **_all_of(f"{_REWARDS}.math.reward", "math"),
        **_all_of(f"{_REWARDS}.math.gsm8k", "gsm8k"),
        **_all_of(f"{_REWARDS}.text.multiple_choice", "multiple_choice"),
        **_all_of(f"{_REWARDS}.text.short_answers", "exact_match", "f1"),
        **_all_of(f"{_REWARDS}.text.instructions", "instructions"),
        **_all_of(f"{_REWARDS}.reasoning_gym_tasks", "reasoning_gym"),
        **_all_of(f"{_REWARDS}.code.reward", "code"),
        **_all_of(f"{_REWARDS}.served.judge", "judge"),
        **_all_of(f"{_REWARDS}.served.remote", "remote"),
        **_all_of(f"{_REWARDS}.served.reward_model", "reward_model"),
        **_all_of(f"{_REWARDS}.text.unlabelled", "format", "length", "none"),
    },
    others=(
        ("prompt", "response", "label", "images"),
        ("prompt", "responses", "label"),
        ("prompts", "responses", "labels"),
    ),
    runs_in="package",
    contract=f"{_ROLLOUT}:check_reward",
)
"""Besides being a RewardFn, a built-in one may have: `needs_label: bool`; `takes_num_tokens: bool`,
then it gets `num_tokens`; `takes_token_ids: bool`, then it gets `token_ids`, prompt and response as
the policy saw and sampled them; `takes_images: bool`, then it gets `images`, the PNG file of each
image of the prompt, as a user's reward with this parameter does; `with_settings(rollout)`, which
returns the same reward with the recipe's settings, and raises RecipeError if they are invalid;
`with_server(server)`, which returns the same with the run's ScoreServer; `runs_apart: bool`, then
it runs in processes of its own, as a user's reward does."""
AGENTS = PlugPoint(
    kind="agent",
    key="rollout.agent",
    signature="(prompt, session) -> Outcome",
    about="plays an episode: turns, tools, sub-agents; async",
    builtin={
        "single_turn": "milescli.agents.single_turn:single_turn",
        "tools": "milescli.agents.tools:ToolAgent",
        "environment": "milescli.agents.environment:EnvironmentAgent",
        "multi_agent": "milescli.agents.multi_agent:MultiAgent",
        "chat": "milescli.agents.chat:Chat",
        "verifiers": "milescli.agents.verifiers:VerifiersAgent",
        "harbor": "milescli.agents.harbor:HarborAgent",
    },
    others=(("settings",),),
    is_async=True,
    runs_in="package",
    contract=f"{_ROLLOUT}:check_agent",
)
TOOLS = PlugPoint(
    kind="tool",
    key="rollout.tools",
    signature="(text: str) -> text, or what JSON can say",
    about="what a model may call; its types and docstring are what the model is told; or a "
    "class, of which each episode has one of its own; plain or async",
    builtin={
        "calculator": "milescli.agents.calculator:calculator",
        "python": "milescli.agents.python:Python",
        "search": "milescli.agents.search:Search",
    },
    in_list=True,
    runs_in="package",
    contract=f"{_ROLLOUT}:check_tool",
)
ENVIRONMENTS = PlugPoint(
    kind="environment",
    key="rollout.environment.name",
    signature="(**settings) -> an Environment",
    about="what a policy acts in: a class with `reset` and `step`, made with "
    "`rollout.environment.settings`; lives in processes of its own",
    builtin={
        "frozen_lake": "milescli.agents.frozen_lake:FrozenLake",
        "gymnasium": "milescli.agents.gymnasium:GymnasiumText",
        "textarena": "milescli.agents.textarena:TextArenaGame",
        "reasoning_gym": "milescli.agents.reasoning_gym:ReasoningGymTask",
        "openenv": "milescli.agents.openenv:OpenEnvEnvironment",
    },
    goes_with="rollout.agent=environment",
    runs_in="package",
    contract="milescli.rollout.environment_contract:check_environment",
)
GENERATIONS = PlugPoint(
    kind="generation",
    key="rollout.generation",
    signature="(*, token_ids, generate, settings) -> Turn",
    about="makes a response of calls of the engine, for any agent; async",
    builtin=_all_of("milescli.rollout.episode.generations", "once"),
    is_async=True,
    runs_in="package",
    contract=f"{_ROLLOUT}:check_generation",
)
ROWS = PlugPoint(
    kind="task",
    key="data.prompts",
    signature="(*, seed) -> rows of prompt, label, ...",
    about="makes prompts: data.prompts=task:mypkg.tasks:rows",
    builtin={
        "frozen_lake": "milescli.agents.frozen_lake:rows",
        "frozen_lake-heldout": "milescli.agents.frozen_lake:heldout_rows",
        "verifiers": "milescli.agents.verifiers:rows",
        "verifiers-heldout": "milescli.agents.verifiers:rows",
        "harbor": "milescli.agents.harbor:rows",
        "harbor-heldout": "milescli.agents.harbor:rows",
        "instructions": "milescli.data.short_instructions:rows",
        "instructions-heldout": "milescli.data.short_instructions:heldout_rows",
        "seeds": "milescli.data.tasks:seed_rows",
        "seeds-heldout": "milescli.data.tasks:heldout_seed_rows",
    },
    prefix="task:",
    contract=f"{_ROLLOUT}:check_task",
)
CURRICULA = PlugPoint(
    kind="curriculum",
    key="data.curriculum",
    signature="(*, candidates, history, count, settings) -> [count] places",
    about="chooses a step's prompts among the next ones, by what came of them before",
    builtin={
        "none": f"{_SELECTORS}:in_order",
        "learnable": f"{_SELECTORS}:learnable",
    },
    contract=f"{_ROLLOUT}:check_curriculum",
)
FILTERS = PlugPoint(
    kind="filter",
    key="rollout.filter",
    signature="(*, group, settings) -> bool",
    about="keeps a group, or has it replaced by another prompt's",
    builtin={
        "none": f"{_SELECTORS}:keep_all",
        **_all_of(_SELECTORS, "zero_variance", "pass_rate"),
    },
    contract=f"{_ROLLOUT}:check_filter",
)
SAMPLE_FILTERS = PlugPoint(
    kind="sample_filter",
    key="rollout.sample_filter",
    signature="(*, sample, settings) -> bool",
    about="learns from a sample, or lets it count for its group alone",
    builtin={
        "none": f"{_SELECTORS}:keep_sample",
        "truncated": f"{_SELECTORS}:truncated",
    },
    contract=f"{_ROLLOUT}:check_sample_filter",
)
SELECTIONS = PlugPoint(
    kind="selection",
    key="rollout.selection",
    signature="(*, groups, count, settings) -> [count] places",
    about="chooses the groups to train on, where over-sampling began more",
    builtin=_all_of(_SELECTORS, "first", "variance"),
    contract=f"{_ROLLOUT}:check_selection",
)
SHAPINGS = PlugPoint(
    kind="shaping",
    key="rollout.shaping",
    signature="(*, group, settings) -> [samples] floats",
    about="makes trained rewards of scored ones, a group at a time",
    builtin={
        "none": f"{_SELECTORS}:unchanged",
        "overlong": f"{_SELECTORS}:overlong",
    },
    contract=f"{_ROLLOUT}:check_shaping",
)
OBJECTIVES = PlugPoint(
    kind="objective",
    key="train.objective",
    signature="(*, recipe) -> Objective",
    about="all that a step minimises",
    builtin={
        "policy": "milescli.train.objectives.policy:Policy",
        "supervised": "milescli.train.objectives.supervised:Supervised",
        "preference": "milescli.train.objectives.preference:objective",
        "distillation": "milescli.train.objectives.supervised:Distillation",
        "reward_model": "milescli.train.objectives.reward_model:RewardModel",
    },
    runs_in="package",
    contract=f"{_TRAIN}:check_objective",
)
ADVANTAGES = PlugPoint(
    kind="advantage",
    key="train.advantage",
    signature="(*, groups, settings) -> [groups][samples] floats, or arrays of tokens",
    about="how much better a sample is than others",
    builtin={
        **_all_of(
            "milescli.train.advantages",
            *("grpo", "rloo", "reinforce", "remax", "opo", "gpg", "gigpo", "hgpo"),
            *("turns", "pass_at_k", "best_of_n", "max_rl", "gdpo"),
        ),
        **_all_of("milescli.train.advantages.role_baselines", "rae"),
    },
    contract=f"{_TRAIN}:check_advantage",
)
CREDITS = PlugPoint(
    kind="credit",
    key="train.credit",
    signature="(*, advantages, penalty, tokens, settings) -> [S]",
    about="spreads an advantage over the tokens of a sample",
    builtin=_all_of("milescli.train.credits", "sample", "to_go", "gae"),
    runs_in="rank",
    contract=f"{_TRAIN}:check_credit",
)
SURROGATES = PlugPoint(
    kind="surrogate",
    key="train.surrogate",
    signature="(*, log_ratio, advantages, tokens, settings) -> SurrogateTerms",
    about="the term of the loss that advantages drive",
    builtin=_all_of(
        "milescli.train.surrogates",
        *("clip", "reinforce", "cispo", "topr", "gmpo", "sapo", "dppo_tv", "dppo_kl"),
        *("clip_cov", "kl_cov"),
    ),
    runs_in="rank",
    contract=f"{_TRAIN}:check_surrogate",
)
CORRECTIONS = PlugPoint(
    kind="correction",
    key="train.correction.kind",
    signature="(*, log_ratio, tokens, settings) -> Correction",
    about="weighs what trainer and engine do not agree on",
    builtin=_all_of("milescli.train.corrections", "importance"),
    off="none",
    runs_in="rank",
    contract=f"{_TRAIN}:check_correction",
)
AGGREGATIONS = PlugPoint(
    kind="aggregation",
    key="train.aggregation",
    signature="(*, num_tokens, settings) -> LossShare",
    about="what a token weighs in the mean",
    builtin=_all_of(
        "milescli.train.aggregation", "token_mean", "sequence_mean", "sequence_sum", "constant"
    ),
    contract=f"{_TRAIN}:check_aggregation",
)
RULES = PlugPoint(
    kind="optimizer",
    key="train.optimizer.rule",
    signature="(*, weight, grad, first, second, step, lr, weight_decay, settings) -> None",
    about="changes a weight by its gradient, on each rank",
    builtin=_all_of("milescli.train.optimizers", "adamw", "lion", "sgd", "muon"),
    runs_in="rank",
    contract=f"{_TRAIN}:check_rule",
)
SCHEDULES = PlugPoint(
    kind="schedule",
    key="train.optimizer.schedule",
    signature="(*, progress, settings) -> float",
    about="the learning rate after its warm-up",
    builtin=_all_of("milescli.train.optimizers", "constant", "linear", "cosine"),
    contract=f"{_TRAIN}:check_schedule",
)
BEFORE_LOG_PROBS = PlugPoint(
    kind="before_log_probs",
    key="train.before_log_probs",
    signature="(*, model, stream) -> None",
    about="is called on each rank before it computes log-probs",
    runs_in="rank",
    contract=f"{_TRAIN}:check_before_log_probs",
)
"""`model` is this rank's part of the policy, or of the reference whose weights replace it, under
torch.no_grad; `stream`: purpose of the log-probs (`old`, `reference`)."""
LAYER_SPECS = PlugPoint(
    kind="layer_spec",
    key="model.layer_spec",
    signature="(*, spec, config, facts, layer) -> ModuleSpec",
    about="changes what Megatron builds a layer of",
    builtin={"default": "milescli.backends.megatron.layer_specs:unchanged"},
    runs_in="rank",
    contract="milescli.backends.megatron.contract:check_layer_spec",
)
"""Functions of Megatron's ModuleSpec of layer `layer` (from 0), its TransformerConfig, and the
model's milescli.models.ModelFacts. Parameters must keep their names and shapes, by which they are
loaded, saved and sent."""
EVALUATIONS = PlugPoint(
    kind="evaluation",
    key="eval.function",
    signature="(*, prompts, play, settings) -> [prompts][] Samples",
    about="takes the samples of an evaluation; async",
    builtin={"all": "milescli.rollout.evaluation.functions:all_prompts"},
    is_async=True,
    runs_in="package",
    contract=f"{_ROLLOUT}:check_evaluation",
)
METRICS = PlugPoint(
    kind="metrics",
    key="eval.metrics",
    signature="(*, groups, settings) -> {name: float}",
    about="figures of an evaluation, beside its accuracy",
    builtin={
        "none": "milescli.rollout.evaluation.metrics:nothing",
        "pass_at_k": "milescli.rollout.evaluation.metrics:pass_at_k",
    },
    contract=f"{_ROLLOUT}:check_metrics",
)
CHANNELS = PlugPoint(
    kind="channel",
    key="weights.channel",
    signature="(*, backend, host, timeout_s) -> WeightChannel",
    about="sends the trainer's weights to the engines; a class",
    builtin={
        "tensor": "milescli.backends.sglang.weights.channels:TensorChannel",
        "distributed": "milescli.backends.sglang.weights.channels:DistributedChannel",
        "disk": "milescli.backends.sglang.weights.read_channels:DiskChannel",
        "rdma": "milescli.backends.sglang.weights.read_channels:RdmaChannel",
        "store": "milescli.backends.sglang.weights.store_channel:StoreChannel",
    },
    off="auto",
    runs_in="rank",
    contract="milescli.weights.base:check_channel",
)
FORMATS = PlugPoint(
    kind="format",
    key="weights.format",
    signature="(*, name, tensor) -> [(name, tensor)]",
    about="makes what engines are sent of a tensor of the model",
    builtin=_all_of("milescli.weights.formats", "hf"),
    runs_in="rank",
    contract="milescli.weights.formats:check_format",
)
TRACKERS = PlugPoint(
    kind="run_tracker",
    key="run.trackers",
    signature="(*, run) -> Tracker",
    about="receives every step, evaluation and event, in a separate thread; a class with `log`, "
    "`event` and `close`",
    builtin={
        "tensorboard": "milescli.trackers.tensorboard:TensorBoard",
        "wandb": "milescli.trackers.wandb:WeightsAndBiases",
        "mlflow": "milescli.trackers.mlflow:MLflow",
        "trackio": "milescli.trackers.trackio:Trackio",
        "opentelemetry": "milescli.trackers.opentelemetry:OpenTelemetry",
    },
    in_list=True,
    runs_in="package",
    contract="milescli.trackers.base:check_tracker",
)


def _hook(kind: str, arguments: str, about: str) -> PlugPoint:
    """Make the plug point of a user's function that observes a run. It runs in a process of its
    own, so that it does not delay filters."""
    return PlugPoint(
        kind=kind,
        key=f"run.hooks.{kind}",
        signature=f"(*, {arguments}) -> None",
        about=about,
        lane="hooks",
        contract=f"{_HOOKS}:check_{kind}",
    )


HOOKS = (
    _hook(
        "all_samples",
        "step, groups, refused",
        "sees all that was sampled, what the filter refused too",
    ),
    _hook("before_step", "step, groups", "sees the groups of a step, before they are trained on"),
    _hook("after_step", "step, report, groups", "sees what a step did, and all of its samples"),
    _hook("after_save", "step, folder", "gets the folder of a complete checkpoint, to upload it"),
    _hook("tracker", "step, scalars", "logs the scalars of steps and evaluations"),
)
"""all_samples: the groups that a step will be trained on, and those that its filter refused;
before_step: the groups of a step, before they are trained on; after_step: its StepReport and its
groups, when the engines have the weights; after_save: the folder of a complete checkpoint; tracker:
the scalars of a step, a warm-up step or an evaluation."""

POINTS = (
    *(REWARDS, AGENTS, TOOLS, ENVIRONMENTS, GENERATIONS, ROWS, CURRICULA, FILTERS),
    *(SAMPLE_FILTERS, SELECTIONS, SHAPINGS, OBJECTIVES, ADVANTAGES, CREDITS, SURROGATES),
    *(CORRECTIONS, AGGREGATIONS, RULES, SCHEDULES, BEFORE_LOG_PROBS, LAYER_SPECS, EVALUATIONS),
    *(METRICS, CHANNELS, FORMATS, TRACKERS, *HOOKS),
)
