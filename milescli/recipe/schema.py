"""What a recipe can say. Strict (unknown keys are refused), frozen, with every default in one
place.

It knows nothing of the machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from milescli.recipe.agents import Role, UserSettings
from milescli.recipe.data import Data
from milescli.recipe.environments import EnvironmentSettings
from milescli.recipe.evaluation import Evaluation
from milescli.recipe.fault import Fault
from milescli.recipe.foreign import FOREIGN, HarborSettings, VerifiersSettings
from milescli.recipe.layout import EngineSettings, Parallel
from milescli.recipe.machine import MachineSettings, RunSettings
from milescli.recipe.mcp import McpServer
from milescli.recipe.model import Model
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
from milescli.recipe.search import SearchSettings
from milescli.recipe.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from milescli.recipe.speculative import SpeculativeSettings
from milescli.recipe.train import OF_PAIRS, OF_SCORES, REFERENCE_FREE, Teacher, Train

OnUpdate = Literal["continue", "drain", "abort"]


class Rollout(Section):
    """How answers are made and scored."""

    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8
    max_response_tokens: Positive = 256
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
        """Whether the episodes of the built-in agent say their own reward."""
        return self.plays_environment or self.agent in FOREIGN

    @property
    def plays_environment(self) -> bool:
        """Whether the agent plays in `environment`."""
        return self.agent == "environment"

    @property
    def role_turns(self) -> list[str]:
        """Who speaks in an episode of several roles, turn by turn."""
        turns = list(self.roles) * self.rounds
        while self.final_role in turns and turns[-1] != self.final_role:
            turns.pop()
        return turns

    @property
    def reward_weights(self) -> dict[str, float]:
        """`reward`, by name; none where the environment says it."""
        if self.is_scored_by_agent:
            return {"none": 1.0}
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward

    @property
    def policies(self) -> list[str]:
        """Models that play roles, each on an engine of its own."""
        played = [role.policy for role in self.roles.values() if role.policy is not None]
        return list(dict.fromkeys(played)) if self.agent == "multi_agent" else []

    @property
    def reward_names(self) -> list[str]:
        """All that are asked, roles' own included."""
        own = [name for role in self.roles.values() for name in role.reward_weights]
        return [*self.reward_weights, *own]

    @property
    def reward_name(self) -> str:
        """`reward` in words: `math`, or `math + 0.1 x format`."""
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
        """`length` resolved: where its penalty begins, and where it is whole."""
        limit = self.length.limit_tokens or self.max_response_tokens
        return self.length.target_tokens or max(1, self.max_response_tokens // 2), limit


class Warmup(Section):
    """Supervised steps on `data.demonstrations` before anything else; 0 steps: none."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    """Demonstrations in one step."""
    lr: PositiveFloat = 1e-3
    max_loss_tokens: Positive = 4096
    """Demonstrations longer than this are refused."""


class Weights(Section):
    """How weights reach the engines."""

    channel: str = "auto"
    """tensor: shared memory, where trainer and engines share devices; distributed: broadcast to
    engines on other devices; auto: chosen by the plan; or an import path to a class."""
    format: str = "hf"
    """How a tensor of the model becomes what engines are sent: hf (as a Hugging Face folder has
    it), or an import path."""
    bucket_mib: Positive | None = None
    """Weights that are sent at once, in MiB. null: 512; on a CPU, whose caches are small, 64."""
    verify: bool = False
    """After each publish, compare what the engines hold with what the trainer sent, bit for bit."""


class Checkpoint(Section):
    """What is kept on disk."""

    every: NonNegative = 20
    """Steps between checkpoints; 0: only at the end. A stopped run is saved in any case."""
    keep: Positive = 2
    """How many of the newest are kept."""
    async_save: bool = True
    """Write in the background while training goes on."""


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
    fault: Fault = Fault()
    run: RunSettings = RunSettings()
    adapters: dict[str, dict[str, Any]] = Field(default={})
    """Several adapters over one model, trained and served at once: {sums: {data: {prompts:
    a.jsonl}}, words: {train: {steps: 80}}}. Each has a name, and says what it has other than this
    recipe: of data, rollout, train, eval, checkpoint, warmup, model.adapter and run.seed."""

    @property
    def learns_from_rows(self) -> bool:
        """Whether the rows of `data.train` are what is learned from; else it is what engines
        sample."""
        return self.data.train is not None

    @property
    def has_engines(self) -> bool:
        """Whether anything is sampled: to learn from, or to evaluate on."""
        return not self.learns_from_rows or self.data.eval is not None

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        if self.learns_from_rows:
            return self.data.max_row_tokens + self.trains_scores
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def trains_scores(self) -> bool:
        """Whether the model gives a score instead of a next token."""
        return self.train.objective in OF_SCORES

    @property
    def has_mtp(self) -> bool:
        """Whether the model's MTP layer guesses or learns."""
        return self.rollout.speculative.kind == "mtp" or self.train.mtp.is_on

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.train.credit == "gae" and not self.learns_from_rows

    @property
    def teachers(self) -> list[Teacher]:
        """Those of `train.distill`."""
        return self.train.distill.teachers

    @property
    def held_teachers(self) -> list[Teacher]:
        """Those that the trainer's ranks hold."""
        return [teacher for teacher in self.teachers if teacher.url is None]

    @property
    def caches_teacher(self) -> bool:
        """Whether what teachers say of the rows is computed once and kept."""
        return self.train.objective == "distillation" and self.train.distill.cache

    @property
    def asks_reward_model(self) -> bool:
        """Whether the reward `reward_model` scores what is sampled."""
        rewards = [*self.rollout.reward_names, *(each.reward for each in self.data.mix or [])]
        return "reward_model" in rewards

    @property
    def runs_code(self) -> bool:
        """Whether code of the model is run on this machine."""
        rewards = [*self.rollout.reward_names, *(each.reward for each in self.data.mix or [])]
        asked = "code" in rewards or "python" in self.rollout.tools
        return asked and not self.rollout.code.url

    @property
    def engines_apart(self) -> int:
        """Of the plan's engines, so many sample nothing to learn from: see `plan.apart`."""
        return int(self.eval.engines == "own") + len(self.rollout.policies)

    @property
    def sequences_per_row(self) -> int:
        """2: a chosen and a rejected response."""
        return 2 if self.train.objective in OF_PAIRS else 1

    @property
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on."""
        if self.learns_from_rows:
            return self.train.batch_size * self.sequences_per_row
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

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
        return self.train.kl_coef > 0 or (self._compares and not self.caches_reference)

    @property
    def caches_reference(self) -> bool:
        """Whether log-probs of the rows by the weights at the start are computed once and kept, so
        that these weights need not be."""
        settings = self.train.preference
        return self._compares and settings.reference == "cached" and settings.loss != "kto"

    @property
    def _compares(self) -> bool:
        """Whether the objective is a preference that a reference is part of."""
        return (
            self.train.objective == "preference"
            and self.train.preference.loss not in REFERENCE_FREE
        )

    def reference_step(self, step: int) -> int:
        """After which step the weights were what the reference is after `step`."""
        every = self.train.reference_every
        return step // every * every if every else 0
