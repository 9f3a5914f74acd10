"""Implements `miles plugins`: checks whether a user's plug-in satisfies its protocol, and writes a
file to begin with."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError, nearest
from milescli.core.imports import import_object
from milescli.core.plug_points import AGENTS, GENERATIONS, POINTS, REWARDS
from milescli.core.registry import PlugPoint
from milescli.recipe.schema import Rollout
from milescli.workers.isolated import IsolatedPlugin

EXAMPLES: dict[str, str] = {
    "reward": '''def NAME(SIGNATURE):
    """1.0 where the response ends in the label."""
    return float(label is not None and response.strip().endswith(label))''',
    "agent": '''from milescli.rollout.base import Outcome


async def NAME(SIGNATURE):
    """One response, as it comes."""
    turn = await session.generate(prompt.token_ids)
    return Outcome(text=turn.text)''',
    "tool": '''def NAME(SIGNATURE):
    """Count the words of a text.

    Args:
        text: any
    """
    return len(text.split())''',
    "environment": '''from milescli.rollout.environments import Environment, Step


class NAME(Environment):
    """Guess a number between 1 and 8."""

    def reset(self, *, prompt, label, seed):
        self.number = seed % 8 + 1
        return "Guess a number between 1 and 8."

    def step(self, action):
        if action.strip() == str(self.number):
            return Step(reward=1.0, ended=True)
        return Step(observation="No. Guess again.")''',
    "generation": '''async def NAME(SIGNATURE):
    """Once more where a response was cut off."""
    turn = await generate(token_ids)
    if turn.stop_reason.value == "length":
        turn = await generate(token_ids)
    return turn''',
    "task": '''import random


def NAME(SIGNATURE):
    """Products of two digits."""
    rng = random.Random(seed)
    for _ in range(1000):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        yield {"prompt": f"What is {a} * {b}?", "label": str(a * b)}''',
    "curriculum": '''def NAME(SIGNATURE):
    """The shortest first."""
    lengths = [len(prompt.token_ids) for prompt in candidates]
    return sorted(range(len(candidates)), key=lengths.__getitem__)[:count]''',
    "filter": '''def NAME(SIGNATURE):
    """Keeps groups of which some sample was right."""
    return max(group.rewards) > 0''',
    "sample_filter": '''def NAME(SIGNATURE):
    """Leaves out what is very short."""
    return sample.num_loss_tokens > 1''',
    "selection": '''def NAME(SIGNATURE):
    """Those with the highest rewards."""
    best = sorted(range(len(groups)), key=lambda place: -max(groups[place].rewards))
    return best[:count]''',
    "shaping": '''def NAME(SIGNATURE):
    """A little less for longer responses."""
    return [
        reward - 0.1 * sample.num_loss_tokens / settings.max_response_tokens
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]''',
    "objective": '''from milescli.train.objectives.policy import Policy


def NAME(SIGNATURE):
    """The policy objective, of the recipe's pieces."""
    return Policy(recipe=recipe)''',
    "advantage": '''def NAME(SIGNATURE):
    """The reward less the mean of its group."""
    means = [sum(group.rewards) / len(group.rewards) for group in groups]
    return [
        [reward - mean for reward in group.rewards]
        for group, mean in zip(groups, means, strict=True)
    ]''',
    "credit": '''def NAME(SIGNATURE):
    """Each token has that of its sample, less what it costs."""
    return advantages - penalty''',
    "surrogate": '''from milescli.train.surrogates import SurrogateTerms


def NAME(SIGNATURE):
    """-r A, unclipped."""
    return SurrogateTerms(loss=-log_ratio.exp() * advantages)''',
    "correction": '''from milescli.train.corrections import Correction


def NAME(SIGNATURE):
    """At most 2."""
    return Correction(weights=log_ratio.exp().clamp(max=2.0))''',
    "aggregation": '''from milescli.train.aggregation import LossShare


def NAME(SIGNATURE):
    """Longer samples count more, by the root of their length."""
    return LossShare(token_weight=num_tokens**-0.5, count=1.0)''',
    "optimizer": '''def NAME(SIGNATURE):
    """By the gradient's sign."""
    weight.sub_(lr * grad.sign())''',
    "schedule": '''def NAME(SIGNATURE):
    """Down to half of it."""
    return settings.lr * (1.0 - 0.5 * progress)''',
    "before_log_probs": '''def NAME(SIGNATURE):
    """Says how large the weights are."""
    squares = sum(float(weight.square().sum()) for weight in model.parameters())
    print(f"{stream}: the weights have a norm of {squares**0.5:.3f}")''',
    "layer_spec": '''def NAME(SIGNATURE):
    """As it is; its modules are in spec.submodules."""
    return spec''',
    "evaluation": '''async def NAME(SIGNATURE):
    """A second attempt where the first was wrong."""
    rows = []
    for place in range(len(prompts)):
        sample = await play(place)
        rows.append([sample] if sample.reward else [sample, await play(place, 1)])
    return rows''',
    "metrics": '''def NAME(SIGNATURE):
    """The share of prompts of which some sample was right."""
    solved = [max(group.rewards) > 0 for group in groups]
    return {"solved": sum(solved) / len(solved)}''',
    "channel": '''from milescli.backends.sglang.weights.channels import TensorChannel


class NAME(TensorChannel):
    """Shared memory, as the built-in one does it."""''',
    "format": '''def NAME(SIGNATURE):
    """As it is."""
    return [(name, tensor)]''',
    "run_tracker": '''class NAME(object):
    """Prints the reward."""

    def __init__(self, *, run):
        self.name = run.name

    def log(self, step, scalars):
        if (reward := scalars.get('rollout/reward_mean')) is not None:
            print(f'{self.name} step {step}: {reward:.3f}')

    def event(self, record):
        """Says nothing of what has no numbers."""

    def close(self, outcome):
        print(f'{self.name}: {outcome}')''',
    "all_samples": '''def NAME(SIGNATURE):
    """Says what the filter leaves."""
    print(f"step {step}: {len(groups)} of {len(groups) + len(refused)} groups")''',
    "before_step": '''def NAME(SIGNATURE):
    """Says how often the policy was right."""
    rewards = [reward for group in groups for reward in group.rewards]
    print(f"step {step}: {sum(rewards) / len(rewards):.3f}")''',
    "after_step": '''def NAME(SIGNATURE):
    """Says what was learned from."""
    print(f"step {step}: loss {report.loss:.4f} over {len(groups)} groups")''',
    "after_save": '''def NAME(SIGNATURE):
    """Says how many files there are."""
    print(f"step {step}: {sum(path.is_file() for path in folder.rglob('*'))} files")''',
    "tracker": '''def NAME(SIGNATURE):
    """Says them."""
    for name, value in scalars.items():
        print(f'step {step} {name} {value:g}')''',
}
"""Kind -> a working plug-in, for `miles plugins new`."""


def point_of(kind: str) -> PlugPoint:
    """Return the plug point of a kind. Raises RecipeError if there is none."""
    points = {point.kind: point for point in POINTS}
    if kind in points:
        return points[kind]
    raise RecipeError(
        f"there is no plug point `{kind}`",
        why=f"the plug points are {', '.join(points)}",
        fix=["miles plugins new {0} my_{0}".format(nearest(kind, points) or "reward")],
    )


def check(point: PlugPoint, path: str) -> None:
    """Run the contract of a plug point on what `path` names, called as in a run, in a separate
    process: it may do anything. Raises a MilesError if it does not satisfy the protocol."""
    plugin = point.resolve(path)
    if point is REWARDS:
        from milescli.rollout.contract import EXAMPLES as RESPONSES
        from milescli.rollout.contract import check_reward
        from milescli.rollout.rewards import in_processes

        reward: Any = in_processes(path, Rollout()) or plugin
        check_reward(reward, examples=getattr(plugin, "examples", RESPONSES))
    elif point in (AGENTS, GENERATIONS):
        from milescli.rollout.contract import check_agent
        from milescli.rollout.episode.episode import load_agent

        check_agent(load_agent(Rollout(**{point.kind: path})))
    else:
        what = f"the {point.kind} `{path}`"
        there = IsolatedPlugin(f"{__name__}:check_in_process", what=what, plugin=plugin)
        there(point.kind, path)


def check_in_process(kind: str, path: str) -> None:
    """Run the contract of a plug point on what `path` names, in this process."""
    point = point_of(kind)
    module, _, name = point.contract.partition(":")
    getattr(import_module(module), name)(point.resolve(path))


def point_that_fits(path: str) -> PlugPoint:
    """Return the point whose parameters are those of what `path` names. Raises RecipeError if it
    cannot be imported, or fits none or several."""
    plugin: Any = import_object(path)
    target = plugin.__init__ if inspect.isclass(plugin) else plugin
    names = set(inspect.signature(target).parameters) - {"self"} if callable(plugin) else set()
    fitting = [
        point
        for point in POINTS
        if point.parameters and names in map(set, (point.parameters, *point.others))
    ]
    if len(fitting) == 1:
        return fitting[0]
    kinds = [point.kind for point in fitting or POINTS]
    raise RecipeError(
        f"the kind of the plug-in `{path}` is unclear",
        why=f"its parameters are ({', '.join(sorted(names))}), like those of "
        f"{'several plug points' if fitting else 'no plug point'}",
        fix=[f"miles plugins check {path} {kind}" for kind in kinds[:3]]
        + ["miles plugins   # lists the signature of each plug point"] * (not fitting),
    )


def write_plugin(point: PlugPoint, name: str, folder: Path) -> list[Path]:
    """Write a working plug-in and its test. Raises RecipeError if the files exist, or if `name` is
    not a valid module name."""
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if not name.isidentifier() or name != name.lower():
        raise RecipeError(
            f"`{name}` is not a valid name for a Python module",
            why="it becomes a file and a function, so use lower-case letters, digits and _",
            fix=f"miles plugins new {point.kind} my_{point.kind}",
        )
    if there := [file.name for file in files if file.exists()]:
        raise RecipeError(
            f"`{there[0]}` already exists",
            why="miles never overwrites a file",
            fix=f"miles plugins new {point.kind} {name}_2",
        )
    for file, text in zip(files, (_source(point, name), _test(point, name)), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def _source(point: PlugPoint, name: str) -> str:
    example = EXAMPLES[point.kind].replace("NAME", name).replace("SIGNATURE", point.arguments)
    gap = "" if example.startswith(("from", "import")) else "\n"
    return (
        f'"""A plug-in of miles: {point.about}.\n\n'
        f"export PYTHONPATH=$PWD\n"
        f'miles launch --recipe quickstart --set {point.command_part(f"{name}:{name}")}\n"""\n\n'
        f"{gap}{example}\n"
    )


def _test(point: PlugPoint, name: str) -> str:
    module, _, check = point.contract.partition(":")
    return (
        f"from {module} import {check}\n\nfrom {name} import {name}\n\n\n"
        f"def test_it_bears_its_contract():\n    {check}({name})\n"
    )
