"""What a recipe can say of rollout: how prompts become scored samples; and the rules of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.agents import (
    FOREIGN,
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
    """How answers are made and scored."""

    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8
    max_response_tokens: Positive = 256
    precision: Literal["same", "bf16", "fp8_block", "mxfp8", "int4", "nvfp4"] = "same"
    """Format of the weights that engines hold. same: the numbers that the trainer multiplies by;
    bf16: those numbers, stored plain."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    stop: list[str] = Field(default=[])
    """Strings that end a response, beside the end-of-sequence token."""
    speculative: SpeculativeSettings = SpeculativeSettings()
    agent: str = "single_turn"
    """How a prompt becomes a sample: single_turn (one response); tools (turns of the model and of
    `tools`, until it calls none); environment (turns in `environment`, which says the reward);
    multi_agent (turns of `roles`); chat (turns of the model and of `user`); verifiers, harbor
    (episodes of these packages, which say the reward); or an import path `mypkg.agents:solve`."""
    environment: EnvironmentSettings = EnvironmentSettings()
    verifiers: VerifiersSettings = VerifiersSettings()
    harbor: HarborSettings = HarborSettings()
    tools: list[str] = Field(default=[])
    """What the model may call, and is told of by its chat template: calculator; python (in a
    sandbox, within `code`'s memory); search (in `search`); or import paths `mypkg.tools:lookup`."""
    search: SearchSettings = SearchSettings()
    mcp: dict[str, McpServer] = Field(default={})
    """Servers that speak MCP, by a name of yours; their tools are called as `tools` are: `{files:
    {command: [python, server.py]}, web: {url: http://127.0.0.1:8000/mcp, tools: [search]}}`."""
    max_turns: Positive = 8
    """Of the model, in one episode with tools, a user or an environment; of all roles together."""
    max_turn_tokens: Positive | None = None
    """Of one turn; null: as many as `max_response_tokens`, which bounds the whole conversation."""
    tool_timeout_s: PositiveFloat = 30.0
    """Of one call."""
    tool_output_characters: Positive = 4096
    """What a call gives beyond is cut off."""
    tool_parser: str = "auto"
    """How the model writes calls, as SGLang names it (qwen25, llama3, ...); auto: by the chat
    template; none: it calls nothing."""
    reasoning_parser: str = "auto"
    """How it writes its reasoning, likewise."""
    episode_retries: NonNegative = 2
    """How often an episode whose agent, tool or environment fails is played anew before the run
    stops; those that were are counted in the figure `failed_episodes`."""
    roles: dict[str, Role] = Field(default={})
    """multi_agent: who speaks, in the order of their turns: {solver: {prompt: Solve it.}, verifier:
    {prompt: Find the mistake.}}."""
    rounds: Positive = 1
    """multi_agent: how often that order is gone through."""
    final_role: str | None = None
    """multi_agent: whose last turn the reward scores, with which the episode ends; null: that of
    the last of `roles`."""
    user: UserSettings = UserSettings()
    generation: str = "once"
    """How a response is made of calls of the engine, whoever asks: once, or an import path."""
    reward: str | dict[str, float] = "math"
    """The name of a reward (docs/rewards.md): math, gsm8k, multiple_choice, exact_match, f1, ...;
    an import path `mypkg.rewards:strict`; or several with their weights, `{math: 1.0, format:
    0.1}`: the reward is the weighted sum, and each part a figure of each step."""
    reward_timeout_s: PositiveFloat = 30.0
    reward_memory_gib: PositiveFloat = 8.0
    """Of each process that a reward or an agent of your own runs in; what it asks for beyond is
    refused."""
    reward_retries: NonNegative = 0
    """How often a reward that raises is tried again before the run stops."""
    filter: str = "none"
    """Groups that are replaced by further prompts. none; zero_variance: those whose rewards are all
    equal; pass_rate: those whose mean reward is outside of the bounds below; or an import path."""
    pass_rate_low: float = 0.1
    pass_rate_high: float = 0.95
    over_sampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Begin so many times the prompts of a step, and take as many groups as it needs, see
    `selection`."""
    selection: str = "first"
    """Which of the groups that over-sampling began are trained on. first: those that are done
    first, and the rest is given up: stragglers hold nobody up, but short answers come first, and a
    resumed run is not bit for bit the one that was not stopped; variance: those whose rewards
    differ most, when all are done; or an import path."""
    shaping: str = "none"
    """How scored rewards become those that are trained on. none; overlong: less for responses near
    `max_response_tokens` (DAPO); or an import path."""
    overlong_buffer: Positive | None = None
    """overlong: tokens before the bound over which the penalty rises; null: a fifth of it."""
    overlong_penalty: NonNegativeFloat = 1.0
    """overlong: at the bound."""
    sample_filter: str = "none"
    """Samples that nothing is learned from; their rewards still count for the others of their
    group. none; truncated: responses that were cut off (overlong filtering of DAPO); or an import
    path."""
    max_filter_rounds: Positive = 8
    """Bound on what a step may begin: so many times its prompts. Then the run stops and says so."""
    max_staleness: NonNegative = 0
    """0: strictly on-policy. N: rollout may run up to N weight versions ahead of the trainer."""
    order: Literal["prompts", "done"] = "prompts"
    """Which groups a step trains on, where rollout runs ahead. prompts: those of the next prompts,
    so that a straggler is waited for; done: those that are done first (docs/asynchronous.md)."""
    stale_groups: Literal["wait", "retry", "drop"] = "wait"
    """With `order` done, of a group that is about to be older than `max_staleness`: wait has the
    last step that can take it wait for it; retry gives it up and begins its prompt anew, up to
    three times; drop goes on without it."""
    on_update: OnUpdate = "continue"
    """What becomes of responses that are running when new weights come. continue: they go on under
    them, and each token has its version; drain: the weights wait until they have ended; abort: they
    are given up, and begun anew under the new weights by the same seeds."""
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
        return self.plays_environment or self.agent in FOREIGN

    @property
    def plays_environment(self) -> bool:
        """Return True if the agent plays in `environment`."""
        return self.agent == "environment"

    @property
    def role_turns(self) -> list[str]:
        """Return the speakers of an episode of several roles, turn by turn."""
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
            if self.agent in FOREIGN:
                return f"of an environment of {self.agent}"
            return f"of the environment {self.environment.name}"
        return " + ".join(
            name if weight == 1.0 else f"{weight:g} x {name}"
            for name, weight in self.reward_weights.items()
        )

    @property
    def length_bounds(self) -> tuple[int, int]:
        """Return `length` resolved: the lengths at which its penalty starts, and is complete."""
        limit = self.length.limit_tokens or self.max_response_tokens
        return self.length.target_tokens or max(1, self.max_response_tokens // 2), limit


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for sampling responses, and for their number."""
    rollout, updates = recipe.rollout, recipe.train.updates_per_step
    prompts = rollout.prompts_per_step
    yield Rule(
        rollout.top_k == 0 or rollout.top_k < -1,
        f"`rollout.top_k` cannot be {rollout.top_k}",
        why="it counts the tokens to choose from: 1 or more, or -1 for the whole vocabulary",
        fix="--set rollout.top_k=-1",
    )
    trainer, engines = recipe.train.precision, rollout.precision
    is_quantised = trainer not in ("auto", "bf16", "fp32")
    yield Rule(
        is_quantised and engines not in ("same", "bf16", trainer.removesuffix("_qat")),
        f"`rollout.precision={engines}` with `train.precision={trainer}`",
        why="engines would round weights that are rounded otherwise in training",
        fix=["--set rollout.precision=same", "--set train.precision=auto"],
    )
    yield Rule(
        engines not in ("same", "bf16") and recipe.weights.format != "hf",
        f"`rollout.precision={engines}` with `weights.format={recipe.weights.format}`",
        why="both say in which form engines are sent weights",
        fix=["--set weights.format=hf", "--set rollout.precision=same"],
    )
    yield Rule(
        "" in rollout.stop,
        "`rollout.stop` has an empty string",
        why="every response would end at once",
        fix="--set rollout.stop=[]",
    )
    yield Rule(
        prompts % updates,
        f"{prompts} prompts cannot be split into {updates} equal updates",
        why=f"rollout.prompts_per_step is {prompts}, train.updates_per_step is {updates}, and an "
        "update takes the samples of a prompt together",
        fix=[
            f"--set train.updates_per_step={divisor_below(prompts, updates)}",
            f"--set rollout.prompts_per_step={-(-prompts // updates) * updates}",
        ],
    )


def order_rules(rollout: Rollout) -> Iterator[Rule]:
    """Yield the rules for rollout that runs while the trainer works."""
    if rollout.order != "done":
        return
    yield Rule(
        rollout.max_staleness == 0,
        "`rollout.order=done` has no other groups to take",
        why="at `rollout.max_staleness` 0 a step's groups are all that is sampled before it",
        fix=["--set rollout.max_staleness=2", "--set rollout.order=prompts"],
    )
    yield Rule(
        rollout.over_sampling > 1.0,
        f"`rollout.over_sampling={rollout.over_sampling:g}` would sample for nothing",
        why="with `rollout.order=done` further prompts are always in flight, and what a step does "
        "not take the next one does: stragglers hold nobody up, and nothing is given up for it; "
        f"`rollout.max_staleness` {rollout.max_staleness} says how many there are",
        fix=["--set rollout.over_sampling=1", "--set rollout.order=prompts"],
    )


def order_doubts(rollout: Rollout) -> list[str]:
    """Return warnings about settings without effect, when nothing runs while the trainer works."""
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
