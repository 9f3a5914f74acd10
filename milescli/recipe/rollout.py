"""Defines the section `rollout`: how prompts become scored samples. With its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.core.plug_points import AGENTS, GENERATIONS
from milescli.recipe.agents import (
    PACKAGE_AGENTS,
    EnvironmentSettings,
    HarborSettings,
    McpServer,
    Role,
    SearchSettings,
    UserSettings,
    VerifiersSettings,
)
from milescli.recipe.rewards import (
    CodeSettings,
    FormatSettings,
    InstructionSettings,
    JudgeSettings,
    LengthSettings,
    MatchSettings,
    RemoteSettings,
    RewardModelSettings,
)
from milescli.recipe.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rule,
    Section,
    divisor_below,
)
from milescli.recipe.speculative import SpeculativeSettings

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

OnUpdate = Literal["continue", "drain", "abort"]


class Rollout(Section):
    """How the policy samples responses, and how they are scored."""

    prompts_per_step: Positive = 32
    """Number of prompts in one step."""
    samples_per_prompt: Positive = 8
    """Number of responses to each prompt: the size of a group."""
    max_response_tokens: Positive = 256
    """Longest response in tokens."""
    precision: Literal["same", "bf16", "fp8_block", "mxfp8", "int4", "nvfp4"] = "same"
    """Number format of the engines' weights. same: exactly the numbers that the trainer multiplies
    by; bf16: those numbers, stored without quantisation."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample only among the likeliest tokens that together have this probability; 1: all tokens."""
    top_k: int = -1
    """Sample only among this many likeliest tokens; -1: the whole vocabulary."""
    stop: list[str] = Field(default=[])
    """Strings that end a response, in addition to the end-of-sequence token."""
    speculative: SpeculativeSettings = SpeculativeSettings()
    agent: str = "single_turn"
    """How a prompt becomes a sample: single_turn (one response); tools (the model takes turns and
    calls `tools` until it makes no call); environment (turns in `environment`, which returns the
    reward); multi_agent (turns of `roles`); chat (turns of the model and of `user`); verifiers,
    harbor (episodes of these packages, which return the reward); or an import path
    `mypkg.agents:solve`."""
    environment: EnvironmentSettings = EnvironmentSettings()
    verifiers: VerifiersSettings = VerifiersSettings()
    harbor: HarborSettings = HarborSettings()
    tools: list[str] = Field(default=[])
    """Tools that the model may call; its chat template describes them to the model. calculator;
    python (in a sandbox, within the memory of `code`); search (see `search`); or import paths
    `mypkg.tools:lookup`."""
    search: SearchSettings = SearchSettings()
    mcp: dict[str, McpServer] = Field(default={})
    """MCP servers by names that you choose; the model can call their tools like `tools`: `{files:
    {command: [python, server.py]}, web: {url: http://127.0.0.1:8000/mcp, tools: [search]}}`."""
    max_turns: Positive = 8
    """Maximum number of the model's turns in one episode with tools, a user or an environment; with
    roles, of all roles together."""
    max_turn_tokens: Positive | None = None
    """Longest turn in tokens; null: `max_response_tokens`, which limits the whole conversation."""
    tool_timeout_s: PositiveFloat = 30.0
    """Time limit of one tool call."""
    tool_output_characters: Positive = 4096
    """Longest output of a tool call; the rest is cut off."""
    tool_parser: str = "auto"
    """Format of the model's tool calls, by SGLang's name (qwen25, llama3, ...); auto: from the chat
    template; none: no tool calls."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning, by SGLang's name; auto and none as in `tool_parser`."""
    episode_retries: NonNegative = 2
    """How often to repeat an episode whose agent, tool or environment fails before its sample is
    excluded; the metric `failed_episodes` counts the repeated ones."""
    roles: dict[str, Role] = Field(default={})
    """multi_agent: the roles, in the order of their turns: {solver: {prompt: Solve it.}, verifier:
    {prompt: Find the mistake.}}."""
    rounds: Positive = 1
    """multi_agent: how often to repeat that order."""
    final_role: str | None = None
    """multi_agent: the role whose last turn ends the episode and receives the reward; null: the
    last of `roles`."""
    user: UserSettings = UserSettings()
    generation: str = "once"
    """How engine calls produce a response, for every agent: once, or an import path."""
    reward: str | dict[str, float] = "math"
    """Name of a reward (docs/rewards.md): math, gsm8k, multiple_choice, exact_match, f1, ...; an
    import path `mypkg.rewards:strict`; or several with their weights, `{math: 1.0, format: 0.1}`.
    The reward is then the weighted sum, and each part is a metric of each step."""
    reward_timeout_s: PositiveFloat = 30.0
    """Time limit of one call of the reward."""
    reward_memory_gib: PositiveFloat = 8.0
    """Memory limit of each process that runs your own reward or agent; allocations beyond it
    fail."""
    reward_retries: NonNegative = 0
    """How often to retry a reward that raises before its sample is excluded."""
    max_unscored_share: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.05
    """Largest share of a step's or an evaluation's samples to exclude because a reward, judge,
    sandbox, agent or environment failed; beyond it the run stops with the last error. They teach
    nothing, and never count as wrong. 0: stop at the first."""
    filter: str = "none"
    """Which groups to replace with further prompts. none; zero_variance: groups whose rewards are
    all equal; pass_rate: groups whose mean reward is outside `pass_rate_low` and `pass_rate_high`;
    or an import path."""
    pass_rate_low: float = 0.1
    """pass_rate: lowest mean reward of a group to keep."""
    pass_rate_high: float = 0.95
    """pass_rate: highest mean reward of a group to keep."""
    over_sampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Start this many times the prompts of a step, and use as many groups as the step needs (see
    `selection`)."""
    selection: str = "first"
    """Which groups to train on with over-sampling. first: those that finish first; the others are
    aborted. Stragglers then delay nothing, but short responses are favoured, and a resumed run is
    not bit-identical to an uninterrupted one. variance: wait for all groups, and use those whose
    rewards differ most. Or an import path."""
    shaping: str = "none"
    """How to modify rewards before training. none; overlong: reduce the reward of responses near
    `max_response_tokens` (DAPO); or an import path."""
    overlong_buffer: Positive | None = None
    """overlong: number of tokens before the limit over which the penalty rises; null: a fifth of
    the limit."""
    overlong_penalty: NonNegativeFloat = 1.0
    """overlong: penalty at the limit."""
    sample_filter: str = "none"
    """Which samples to exclude from training; their rewards still count for the other samples of
    their group. none; truncated: responses that were cut off (overlong filtering of DAPO); or an
    import path."""
    max_filter_rounds: Positive = 8
    """Limit on the prompts that a step may start, as a multiple of its prompts; beyond it, the run
    stops with an error."""
    max_staleness: NonNegative = 0
    """0: strictly on-policy. N: rollout may run up to N weight versions ahead of the trainer."""
    order: Literal["prompts", "done"] = "prompts"
    """Which groups a step trains on when rollout runs ahead. prompts: the groups of the next
    prompts, so it waits for stragglers; done: the groups that finish first
    (docs/asynchronous.md)."""
    stale_groups: Literal["wait", "retry", "drop"] = "wait"
    """With `order: done`: what to do with a group that would exceed `max_staleness`. wait: the last
    step that can use the group waits for it; retry: abort the group and restart its prompt, up to
    three times; drop: continue without it."""
    on_update: OnUpdate = "continue"
    """What to do with running responses when new weights arrive. continue: they continue with the
    new weights, and each token records its version; drain: the weights wait until the responses
    end; abort: the responses are aborted and restarted with the new weights and the same seeds."""
    format: FormatSettings = FormatSettings()
    match: MatchSettings = MatchSettings()
    length: LengthSettings = LengthSettings()
    instructions: InstructionSettings = InstructionSettings()
    judge: JudgeSettings = JudgeSettings()
    remote_reward: RemoteSettings = RemoteSettings()
    reward_model: RewardModelSettings = RewardModelSettings()
    code: CodeSettings = CodeSettings()

    @property
    def is_scored_by_agent(self) -> bool:
        """Return True if episodes of the built-in agent provide their own reward."""
        return self.plays_environment or self.agent in PACKAGE_AGENTS

    @property
    def plays_environment(self) -> bool:
        """Return True if the agent plays in `environment`."""
        return self.agent == "environment"

    @property
    def may_send_stop(self) -> bool:
        """Return True if requests to engines may contain stop strings: the recipe's, or those of
        code that writes its own requests."""
        own = self.agent not in AGENTS.builtin or self.generation not in GENERATIONS.builtin
        return bool(self.stop) or own or self.agent in PACKAGE_AGENTS

    @property
    def role_turns(self) -> list[str]:
        """Return the speaker of each turn in an episode with several roles."""
        turns = list(self.roles) * self.rounds
        while self.final_role in turns and turns[-1] != self.final_role:
            turns.pop()
        return turns

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the weights of `reward` by name; empty if the environment provides it."""
        if self.is_scored_by_agent:
            return {"none": 1.0}
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward

    @property
    def policies(self) -> list[str]:
        """Return the models that play roles, each on its own engine."""
        played = [role.policy for role in self.roles.values() if role.policy is not None]
        return list(dict.fromkeys(played)) if self.agent == "multi_agent" else []

    @property
    def reward_names(self) -> list[str]:
        """Return the names of all rewards, including roles' own."""
        own = [name for role in self.roles.values() for name in role.reward_weights]
        return [*self.reward_weights, *own]

    @property
    def reward_name(self) -> str:
        """Format `reward`: `math`, or `math + 0.1 x format`."""
        if self.is_scored_by_agent:
            if self.agent in PACKAGE_AGENTS:
                return f"of an environment of {self.agent}"
            return f"of the environment {self.environment.name}"
        return " + ".join(
            name if weight == 1.0 else f"{weight:g} x {name}"
            for name, weight in self.reward_weights.items()
        )

    @property
    def length_bounds(self) -> tuple[int, int]:
        """Return the limits of `length` with defaults resolved: the lengths at which its penalty
        starts, and at which it is complete."""
        limit = self.length.limit_tokens or self.max_response_tokens
        return self.length.target_tokens or max(1, self.max_response_tokens // 2), limit


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for sampling responses, for their number, and for their rewards."""
    rollout, updates = recipe.rollout, recipe.train.updates_per_step
    prompts = rollout.prompts_per_step
    is_punished = rollout.shaping == "overlong" and rollout.overlong_penalty > 0
    yield Rule(
        is_punished and recipe.train.advantage == "max_rl" and not recipe.learns_from_rows,
        "`max_rl` does not support `rollout.shaping=overlong`",
        why="the shaping makes the reward of a long wrong response negative, and `max_rl` divides "
        "by the mean reward as a success rate",
        fix=["--set rollout.shaping=none", "--set train.advantage=grpo"],
    )
    yield Rule(
        rollout.top_k == 0 or rollout.top_k < -1,
        f"`rollout.top_k` cannot be {rollout.top_k}",
        why="it is the number of tokens to choose from: 1 or more, or -1 for the whole vocabulary",
        fix="--set rollout.top_k=-1",
    )
    trainer, engines = recipe.train.precision, rollout.precision
    is_quantised = trainer not in ("auto", "bf16", "fp32")
    yield Rule(
        is_quantised and engines not in ("same", "bf16", trainer.removesuffix("_qat")),
        f"`rollout.precision={engines}` does not work with `train.precision={trainer}`",
        why="engines would round weights that training rounds differently",
        fix=["--set rollout.precision=same", "--set train.precision=auto"],
    )
    yield Rule(
        engines not in ("same", "bf16") and recipe.weights.format != "hf",
        f"`rollout.precision={engines}` does not work with "
        f"`weights.format={recipe.weights.format}`",
        why="both keys set the format of the weights that engines receive",
        fix=["--set weights.format=hf", "--set rollout.precision=same"],
    )
    yield Rule(
        "" in rollout.stop,
        "`rollout.stop` contains an empty string",
        why="every response would end immediately",
        fix="--set rollout.stop=[]",
    )
    yield Rule(
        prompts % updates,
        f"{prompts} prompts cannot be split into {updates} equal updates",
        why=f"rollout.prompts_per_step is {prompts}, train.updates_per_step is {updates}, and an "
        "update must contain all samples of a prompt",
        fix=[
            f"--set train.updates_per_step={divisor_below(prompts, updates)}",
            f"--set rollout.prompts_per_step={-(-prompts // updates) * updates}",
        ],
    )


def order_rules(rollout: Rollout) -> Iterator[Rule]:
    """Yield the rules for `rollout.order: done`."""
    if rollout.order != "done":
        return
    yield Rule(
        rollout.max_staleness == 0,
        "`rollout.order=done` needs groups to choose from",
        why="with `rollout.max_staleness` 0, a step can only use the groups that are sampled "
        "right before it",
        fix=["--set rollout.max_staleness=2", "--set rollout.order=prompts"],
    )
    yield Rule(
        rollout.over_sampling > 1.0,
        f"`rollout.over_sampling={rollout.over_sampling:g}` would waste samples",
        why="with `rollout.order=done`, further prompts are always running, and the next step "
        "uses what this one does not: stragglers delay nothing, and no sample is wasted; "
        f"`rollout.max_staleness` {rollout.max_staleness} limits how many there are",
        fix=["--set rollout.over_sampling=1", "--set rollout.order=prompts"],
    )


def order_warnings(rollout: Rollout) -> list[str]:
    """Return warnings about settings that have no effect because nothing is sampled while the
    trainer works."""
    doubts = list[str]()
    if rollout.on_update != "continue" and rollout.max_staleness == 0:
        doubts.append(
            f"`rollout.on_update={rollout.on_update}` has no effect: at `rollout.max_staleness` 0 "
            "nothing is running when new weights come"
        )
    if rollout.stale_groups != "wait" and rollout.order != "done":
        doubts.append(
            f"`rollout.stale_groups={rollout.stale_groups}` has no effect: in the order of the "
            "prompts no group becomes too old"
        )
    return doubts
