"""Every plug point, on one page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from milescli.backends.megatron.layer_specs import LAYER_SPECS
from milescli.core.registry import Registry
from milescli.data.tasks import ROWS, TASK_PREFIX
from milescli.recipe.schema import Rollout
from milescli.rollout.collect.curriculum import CURRICULA
from milescli.rollout.collect.filters import FILTERS
from milescli.rollout.collect.sample_filters import SAMPLE_FILTERS
from milescli.rollout.collect.selection import SELECTIONS
from milescli.rollout.collect.shaping import SHAPINGS
from milescli.rollout.contract import EXAMPLES, check_agent, check_reward
from milescli.rollout.environments import ENVIRONMENTS
from milescli.rollout.episode.agents import AGENTS, TOOLS
from milescli.rollout.episode.episode import load_agent
from milescli.rollout.episode.generations import GENERATIONS
from milescli.rollout.evaluation.functions import EVALUATIONS
from milescli.rollout.evaluation.metrics import METRICS
from milescli.rollout.rewards import REWARDS, in_processes
from milescli.runtime.recording.user_hooks import HOOKS
from milescli.trackers.base import TRACKERS
from milescli.train.advantages import ADVANTAGES
from milescli.train.aggregation import AGGREGATIONS
from milescli.train.corrections import CORRECTIONS
from milescli.train.credits import CREDITS
from milescli.train.objectives import OBJECTIVES
from milescli.train.optimizers import RULES, SCHEDULES
from milescli.train.rank_hooks import BEFORE_LOG_PROBS
from milescli.train.surrogates import SURROGATES
from milescli.weights.channels import CHANNELS
from milescli.weights.formats import FORMATS
from milescli.workers.isolated import Isolated


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugPoint:
    """One thing that a user can bring."""

    key: str
    """Of the recipe."""
    registry: Registry
    gives: str
    """What a call returns."""
    about: str
    contract: str
    """Import path of the test that it must pass."""
    body: str
    """Of a working one."""
    imports: str = ""
    """What the body needs."""
    base: str = ""
    """What a class derives from; empty for a function."""
    is_async: bool = False
    parameters: str = ""
    """Of a written one, where each takes what it likes."""

    @property
    def kind(self) -> str:
        """As the user calls it."""
        return self.registry.kind

    def command_part(self, path: str) -> str:
        """What follows `--set` where a run is to use it."""
        also = "rollout.agent=environment --set " if self.registry is ENVIRONMENTS else ""
        return f"{also}{self.setting(path)}"

    def setting(self, path: str) -> str:
        """As `--set` takes it."""
        if self.registry.in_list:
            return f"{self.key}=[{path}]"
        return f"{self.key}={TASK_PREFIX if self.registry is ROWS else ''}{path}"

    @property
    def arguments(self) -> str:
        """Between the parentheses of a function."""
        if not self.registry.signature:
            return self.parameters
        named = "" if self.kind == "agent" else "*, "
        return f"{named}{', '.join(self.registry.signature)}"

    @property
    def signature(self) -> str:
        """`(*, prompt, response, label) -> float`"""
        return f"({self.arguments}) -> {self.gives}"

    def check(self, path: str) -> None:
        """Raises a MilesError where what `path` names does not bear its contract. It may do
        anything: it is called as in a run, in a process of its own."""
        plugin = self.registry.resolve(path, key=self.key)
        if self.registry is REWARDS:
            reward: Any = in_processes(path, Rollout()) or plugin
            check_reward(reward, examples=getattr(plugin, "examples", EXAMPLES))
        elif self.registry is AGENTS:
            self.contract_test(load_agent(Rollout(agent=path)))
        elif self.registry is GENERATIONS:
            check_agent(load_agent(Rollout(generation=path)))
        else:
            what = f"the {self.kind} `{path}`"
            there = Isolated("milescli.listings.plugins:checked_there", what=what, plugin=plugin)
            there(self.kind, path)

    @property
    def contract_test(self) -> Callable[[Any], object]:
        """What raises where a plug-in does not bear its contract."""
        module, _, name = self.contract.partition(":")
        return cast("Callable[[Any], object]", getattr(import_module(module), name))


_ROLLOUT, _TRAIN = "milescli.rollout.contract", "milescli.train.contract"
_HOOKS = "milescli.runtime.recording.user_hooks"

POINTS = (
    PlugPoint(
        key="rollout.reward",
        registry=REWARDS,
        gives="float",
        about="scores a response; or (prompt, responses, label): a group, or (prompts, responses, "
        "labels): a batch -> floats; plain or async",
        contract=f"{_ROLLOUT}:check_reward",
        body='"""1.0 where the response ends in the label."""\n'
        "return float(label is not None and response.strip().endswith(label))",
    ),
    PlugPoint(
        key="rollout.agent",
        registry=AGENTS,
        gives="Outcome",
        about="plays an episode: turns, tools, sub-agents; async",
        is_async=True,
        contract=f"{_ROLLOUT}:check_agent",
        imports="from milescli.rollout.base import Outcome\n",
        body='"""One response, as it comes."""\n'
        "turn = await session.generate(prompt.token_ids)\n"
        "return Outcome(text=turn.text)",
    ),
    PlugPoint(
        key="rollout.tools",
        registry=TOOLS,
        gives="text, or what JSON can say",
        about="what a model may call; its types and docstring are what the model is told; or a "
        "class, of which each episode has one of its own; plain or async",
        contract=f"{_ROLLOUT}:check_tool",
        parameters="text: str",
        body='"""Count the words of a text.\n\nArgs:\n    text: any\n"""\nreturn len(text.split())',
    ),
    PlugPoint(
        key="rollout.environment.name",
        registry=ENVIRONMENTS,
        gives="an Environment",
        about="what a policy acts in: a class with `reset` and `step`, made with "
        "`rollout.environment.settings`; lives in processes of its own",
        contract="milescli.rollout.environment_contract:check_environment",
        imports="from milescli.rollout.environments import Environment, Step\n",
        base="Environment",
        parameters="**settings",
        body='"""Guess a number between 1 and 8."""\n\n'
        "def reset(self, *, prompt, label, seed):\n"
        "    self.number = seed % 8 + 1\n"
        '    return "Guess a number between 1 and 8."\n\n'
        "def step(self, action):\n"
        "    if action.strip() == str(self.number):\n"
        "        return Step(reward=1.0, ended=True)\n"
        '    return Step(observation="No. Guess again.")',
    ),
    PlugPoint(
        key="rollout.generation",
        registry=GENERATIONS,
        gives="Turn",
        about="makes a response of calls of the engine, for any agent; async",
        contract=f"{_ROLLOUT}:check_generation",
        body='"""Once more where a response was cut off."""\n'
        "turn = await generate(token_ids)\n"
        'if turn.stop_reason.value == "length":\n'
        "    turn = await generate(token_ids)\n"
        "return turn",
        is_async=True,
    ),
    PlugPoint(
        key="data.prompts",
        registry=ROWS,
        gives="rows of prompt, label, ...",
        about="makes prompts: data.prompts=task:mypkg.tasks:rows",
        contract=f"{_ROLLOUT}:check_task",
        body='"""Products of two digits."""\n'
        "rng = random.Random(seed)\n"
        "for _ in range(1000):\n"
        "    a, b = rng.randint(2, 9), rng.randint(2, 9)\n"
        '    yield {"prompt": f"What is {a} * {b}?", "label": str(a * b)}',
        imports="import random\n",
    ),
    PlugPoint(
        key="data.curriculum",
        registry=CURRICULA,
        gives="[count] places",
        about="chooses a step's prompts among the next ones, by what came of them before",
        contract=f"{_ROLLOUT}:check_curriculum",
        body='"""The shortest first."""\n'
        "lengths = [len(prompt.token_ids) for prompt in candidates]\n"
        "return sorted(range(len(candidates)), key=lengths.__getitem__)[:count]",
    ),
    PlugPoint(
        key="rollout.filter",
        registry=FILTERS,
        gives="bool",
        about="keeps a group, or has it replaced by another prompt's",
        contract=f"{_ROLLOUT}:check_filter",
        body='"""Keeps groups of which some sample was right."""\nreturn max(group.rewards) > 0',
    ),
    PlugPoint(
        key="rollout.sample_filter",
        registry=SAMPLE_FILTERS,
        gives="bool",
        about="learns from a sample, or lets it count for its group alone",
        contract=f"{_ROLLOUT}:check_sample_filter",
        body='"""Leaves out what is very short."""\nreturn sample.num_loss_tokens > 1',
    ),
    PlugPoint(
        key="rollout.selection",
        registry=SELECTIONS,
        gives="[count] places",
        about="chooses the groups to train on, where over-sampling began more",
        contract=f"{_ROLLOUT}:check_selection",
        body='"""Those with the highest rewards."""\n'
        "best = sorted(range(len(groups)), key=lambda place: -max(groups[place].rewards))\n"
        "return best[:count]",
    ),
    PlugPoint(
        key="rollout.shaping",
        registry=SHAPINGS,
        gives="[samples] floats",
        about="makes trained rewards of scored ones, a group at a time",
        contract=f"{_ROLLOUT}:check_shaping",
        body='"""A little less for longer responses."""\n'
        "return [\n"
        "    reward - 0.1 * sample.num_loss_tokens / settings.max_response_tokens\n"
        "    for sample, reward in zip(group.samples, group.rewards, strict=True)\n"
        "]",
    ),
    PlugPoint(
        key="train.objective",
        registry=OBJECTIVES,
        gives="Objective",
        about="all that a step minimises",
        contract=f"{_TRAIN}:check_objective",
        imports="from milescli.train.objectives.policy import Policy\n",
        body='"""The policy objective, of the recipe\'s pieces."""\nreturn Policy(recipe=recipe)',
    ),
    PlugPoint(
        key="train.advantage",
        registry=ADVANTAGES,
        gives="[groups][samples] floats, or arrays of tokens",
        about="how much better a sample is than others",
        contract=f"{_TRAIN}:check_advantage",
        body='"""The reward less the mean of its group."""\n'
        "means = [sum(group.rewards) / len(group.rewards) for group in groups]\n"
        "return [\n"
        "    [reward - mean for reward in group.rewards]\n"
        "    for group, mean in zip(groups, means, strict=True)\n"
        "]",
    ),
    PlugPoint(
        key="train.credit",
        registry=CREDITS,
        gives="[S]",
        about="spreads an advantage over the tokens of a sample",
        contract=f"{_TRAIN}:check_credit",
        body='"""Each token has that of its sample, less what it costs."""\n'
        "return advantages - penalty",
    ),
    PlugPoint(
        key="train.surrogate",
        registry=SURROGATES,
        gives="SurrogateTerms",
        about="the term of the loss that advantages drive",
        contract=f"{_TRAIN}:check_surrogate",
        imports="from milescli.train.surrogates import SurrogateTerms\n",
        body='"""-r A, unclipped."""\nreturn SurrogateTerms(loss=-log_ratio.exp() * advantages)',
    ),
    PlugPoint(
        key="train.correction.kind",
        registry=CORRECTIONS,
        gives="Correction",
        about="weighs what trainer and engine do not agree on",
        contract=f"{_TRAIN}:check_correction",
        imports="from milescli.train.corrections import Correction\n",
        body='"""At most 2."""\nreturn Correction(weights=log_ratio.exp().clamp(max=2.0))',
    ),
    PlugPoint(
        key="train.aggregation",
        registry=AGGREGATIONS,
        gives="LossShare",
        about="what a token weighs in the mean",
        contract=f"{_TRAIN}:check_aggregation",
        imports="from milescli.train.aggregation import LossShare\n",
        body='"""Longer samples count more, by the root of their length."""\n'
        "return LossShare(token_weight=num_tokens**-0.5, count=1.0)",
    ),
    PlugPoint(
        key="train.optimizer.rule",
        registry=RULES,
        gives="None",
        about="changes a weight by its gradient, on each rank",
        contract=f"{_TRAIN}:check_rule",
        body='"""By the gradient\'s sign."""\nweight.sub_(lr * grad.sign())',
    ),
    PlugPoint(
        key="train.optimizer.schedule",
        registry=SCHEDULES,
        gives="float",
        about="the learning rate after its warm-up",
        contract=f"{_TRAIN}:check_schedule",
        body='"""Down to half of it."""\nreturn settings.lr * (1.0 - 0.5 * progress)',
    ),
    PlugPoint(
        key="train.before_log_probs",
        registry=BEFORE_LOG_PROBS,
        gives="None",
        about="is called on each rank before it computes log-probs",
        contract="milescli.train.contract:check_before_log_probs",
        body='"""Says how large the weights are."""\n'
        "squares = sum(float(weight.square().sum()) for weight in model.parameters())\n"
        'print(f"{stream}: the weights have a norm of {squares**0.5:.3f}")',
    ),
    PlugPoint(
        key="model.layer_spec",
        registry=LAYER_SPECS,
        gives="ModuleSpec",
        about="changes what Megatron builds a layer of",
        contract="milescli.backends.megatron.contract:check_layer_spec",
        body='"""As it is; its modules are in spec.submodules."""\nreturn spec',
    ),
    PlugPoint(
        key="eval.function",
        registry=EVALUATIONS,
        gives="[prompts][] Samples",
        about="takes the samples of an evaluation; async",
        contract="milescli.rollout.contract:check_evaluation",
        body='"""A second attempt where the first was wrong."""\n'
        "rows = []\n"
        "for place in range(len(prompts)):\n"
        "    sample = await play(place)\n"
        "    rows.append([sample] if sample.reward else [sample, await play(place, 1)])\n"
        "return rows",
        is_async=True,
    ),
    PlugPoint(
        key="eval.metrics",
        registry=METRICS,
        gives="{name: float}",
        about="figures of an evaluation, beside its accuracy",
        contract=f"{_ROLLOUT}:check_metrics",
        body='"""The share of prompts of which some sample was right."""\n'
        "solved = [max(group.rewards) > 0 for group in groups]\n"
        'return {"solved": sum(solved) / len(solved)}',
    ),
    PlugPoint(
        key="weights.channel",
        registry=CHANNELS,
        gives="WeightChannel",
        about="sends the trainer's weights to the engines; a class",
        contract="milescli.weights.channels:check_channel",
        imports="from milescli.backends.sglang.weights.channels import TensorChannel\n",
        base="TensorChannel",
        body='"""Shared memory, as the built-in one does it."""',
    ),
    PlugPoint(
        key="weights.format",
        registry=FORMATS,
        gives="[(name, tensor)]",
        about="makes what engines are sent of a tensor of the model",
        contract="milescli.weights.formats:check_format",
        body='"""As it is."""\nreturn [(name, tensor)]',
    ),
    PlugPoint(
        key="run.trackers",
        registry=TRACKERS,
        gives="Tracker",
        about="is told of every step, evaluation and event, in a thread of its own; a class with "
        "`log`, `event` and `close`",
        contract="milescli.trackers.contract:check_tracker",
        base="object",
        body='"""Prints the reward."""\n\n'
        "def __init__(self, *, run):\n"
        "    self.name = run.name\n\n"
        "def log(self, step, scalars):\n"
        "    if (reward := scalars.get('rollout/reward_mean')) is not None:\n"
        "        print(f'{self.name} step {step}: {reward:.3f}')\n\n"
        "def event(self, record):\n"
        '    """Says nothing of what has no numbers."""\n\n'
        "def close(self, outcome):\n"
        "    print(f'{self.name}: {outcome}')",
    ),
    PlugPoint(
        key="run.hooks.all_samples",
        registry=HOOKS["all_samples"],
        gives="None",
        about="sees all that was sampled, what the filter refused too",
        contract=f"{_HOOKS}:check_all_samples",
        body='"""Says what the filter leaves."""\n'
        'print(f"step {step}: {len(groups)} of {len(groups) + len(refused)} groups")',
    ),
    PlugPoint(
        key="run.hooks.before_step",
        registry=HOOKS["before_step"],
        gives="None",
        about="sees the groups of a step, before they are trained on",
        contract=f"{_HOOKS}:check_before_step",
        body='"""Says how often the policy was right."""\n'
        "rewards = [reward for group in groups for reward in group.rewards]\n"
        'print(f"step {step}: {sum(rewards) / len(rewards):.3f}")',
    ),
    PlugPoint(
        key="run.hooks.after_step",
        registry=HOOKS["after_step"],
        gives="None",
        about="sees what a step did, and all of its samples",
        contract=f"{_HOOKS}:check_after_step",
        body='"""Says what was learned from."""\n'
        'print(f"step {step}: loss {report.loss:.4f} over {len(groups)} groups")',
    ),
    PlugPoint(
        key="run.hooks.after_save",
        registry=HOOKS["after_save"],
        gives="None",
        about="gets the folder of a complete checkpoint, to upload it",
        contract=f"{_HOOKS}:check_after_save",
        body='"""Says how many files there are."""\n'
        "print(f\"step {step}: {sum(path.is_file() for path in folder.rglob('*'))} files\")",
    ),
    PlugPoint(
        key="run.hooks.tracker",
        registry=HOOKS["tracker"],
        gives="None",
        about="logs the scalars of steps and evaluations",
        contract=f"{_HOOKS}:check_tracker",
        body='"""Says them."""\n'
        "for name, value in scalars.items():\n"
        "    print(f'step {step} {name} {value:g}')",
    ),
)
