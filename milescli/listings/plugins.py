"""`miles plugins`: every plug point, what ships for it, whether something of the user's fits, and a
file to begin with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from milescli.core.apart import Apart
from milescli.core.errors import RecipeError
from milescli.core.registry import Registry, nearest
from milescli.recipe.schema import Rollout
from milescli.rollout.episode import AGENTS, load_agent
from milescli.rollout.filters import FILTERS
from milescli.rollout.metrics import METRICS
from milescli.rollout.rewards import REWARDS, in_processes
from milescli.rollout.sample_filters import SAMPLE_FILTERS
from milescli.rollout.shaping import SHAPINGS
from milescli.rollout.tasks import ROWS, TASK_PREFIX
from milescli.runtime.user_hooks import HOOKS
from milescli.train.advantages import ADVANTAGES
from milescli.train.aggregation import AGGREGATIONS
from milescli.train.corrections import CORRECTIONS
from milescli.train.credits import CREDITS
from milescli.train.objectives import OBJECTIVES
from milescli.train.schedule import SCHEDULES
from milescli.train.surrogates import SURROGATES
from milescli.weights.channels import CHANNELS

_ROLLOUT, _TRAIN = "milescli.rollout.contract", "milescli.train.contract"
_HOOKS = "milescli.runtime.user_hooks"


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

    @property
    def kind(self) -> str:
        """As the user calls it."""
        return self.registry.kind

    def setting(self, path: str) -> str:
        """As `--set` takes it."""
        return f"{self.key}={TASK_PREFIX if self.registry is ROWS else ''}{path}"

    @property
    def signature(self) -> str:
        """`(*, prompt, response, label) -> float`"""
        named = "" if self.kind == "agent" else "*, "
        return f"({named}{', '.join(self.registry.signature)}) -> {self.gives}"

    def check(self, path: str) -> None:
        """Raises a MilesError where what `path` names does not bear its contract. It may do
        anything: it is called as in a run, in a process of its own."""
        plugin = self.registry.resolve(path, key=self.key)
        if self.registry is REWARDS:
            self.contract_test(in_processes(Rollout(reward=path)) or plugin)
        elif self.registry is AGENTS:
            self.contract_test(load_agent(Rollout(agent=path)))
        else:
            what = f"the {self.kind} `{path}`"
            Apart(f"{__name__}:checked_there", what=what, plugin=plugin)(self.kind, path)

    @property
    def contract_test(self) -> Callable[[Any], object]:
        """What raises where a plug-in does not bear its contract."""
        module, _, name = self.contract.partition(":")
        return cast("Callable[[Any], object]", getattr(import_module(module), name))


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
        contract=f"{_ROLLOUT}:check_agent",
        imports="from milescli.rollout.base import Outcome\n",
        body='"""One response, as it comes."""\n'
        "turn = await session.generate(prompt.token_ids)\n"
        "return Outcome(text=turn.text)",
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
        key="train.optimizer.schedule",
        registry=SCHEDULES,
        gives="float",
        about="the learning rate after its warm-up",
        contract=f"{_TRAIN}:check_schedule",
        body='"""Down to half of it."""\nreturn settings.lr * (1.0 - 0.5 * progress)',
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
        imports="from milescli.backends.sglang.channels import TensorChannel\n",
        base="TensorChannel",
        body='"""Shared memory, as the built-in one does it."""',
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
        body='"""Appends them to a file."""\n'
        'with open("scalars.txt", "a") as file:\n'
        "    print(step, scalars, file=file)",
    ),
)


def point_of(kind: str) -> PlugPoint:
    """Raises RecipeError where there is no such kind."""
    points = {point.kind: point for point in POINTS}
    if kind in points:
        return points[kind]
    raise RecipeError(
        f"no plug point is called `{kind}`",
        why=f"there are {', '.join(points)}",
        fix=["miles plugins new {0} my_{0}".format(nearest(kind, points) or "reward")],
    )


def checked_there(kind: str, path: str) -> None:
    """In the process of what `path` names."""
    point = point_of(kind)
    point.contract_test(point.registry.resolve(path, key=point.key))


def the_one_that_fits(path: str) -> PlugPoint:
    """Whose parameters are those of what `path` names. Raises RecipeError where it cannot be had,
    or fits none or several."""
    plugin: Any = Registry.resolve_any(path)
    target = plugin.__init__ if inspect.isclass(plugin) else plugin
    names = set(inspect.signature(target).parameters) - {"self"} if callable(plugin) else set()
    fitting = [
        point
        for point in POINTS
        if names in map(set, (point.registry.signature, *point.registry.others))
    ]
    if len(fitting) == 1:
        return fitting[0]
    kinds = [point.kind for point in fitting or POINTS]
    raise RecipeError(
        f"what kind of plug-in `{path}` is cannot be told",
        why=f"it takes ({', '.join(sorted(names))}), as {'several do' if fitting else 'none does'}",
        fix=[f"miles plugins check {path} {kind}" for kind in kinds[:3]]
        + ["miles plugins   # what each takes"] * (not fitting),
    )


def written(point: PlugPoint, name: str, folder: Path) -> list[Path]:
    """A working plug-in and its test, in files that were not there. Raises RecipeError where they
    are, or `name` is no name of a module."""
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if not name.isidentifier() or name != name.lower():
        raise RecipeError(
            f"`{name}` is no name of a Python module",
            why="it becomes a file and a function: small letters, digits and _",
            fix=f"miles plugins new {point.kind} my_{point.kind}",
        )
    if there := [file.name for file in files if file.exists()]:
        raise RecipeError(
            f"`{there[0]}` is there already",
            why="nothing is written over",
            fix=f"miles plugins new {point.kind} {name}_2",
        )
    for file, text in zip(files, (_source(point, name), _test(point, name)), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def _source(point: PlugPoint, name: str) -> str:
    prefix = "async def" if point.kind == "agent" else "def"
    named = "" if point.kind == "agent" else "*, "
    body = "\n".join(f"    {line}" for line in point.body.split("\n"))
    arguments = ", ".join(point.registry.signature)
    imports = f"{point.imports}\n\n" if point.imports else "\n"
    head = f"class {name}({point.base}):" if point.base else f"{prefix} {name}({named}{arguments}):"
    return (
        f'"""A plug-in of miles: {point.about}.\n\n'
        f"export PYTHONPATH=$PWD\n"
        f'miles launch --recipe quickstart --set {point.setting(f"{name}:{name}")}\n"""\n\n'
        f"{imports}{head}\n{body}\n"
    )


def _test(point: PlugPoint, name: str) -> str:
    module, _, check = point.contract.partition(":")
    return (
        f"from {module} import {check}\n\nfrom {name} import {name}\n\n\n"
        f"def test_it_bears_its_contract():\n    {check}({name})\n"
    )
