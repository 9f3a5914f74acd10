"""Rules that bind several keys of a recipe. Pure: no file, no machine. The first broken one is
raised.

What is legal but odd is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from milescli.core.errors import RecipeError
from milescli.recipe.check_agents import check_agents, doubt_about_agents
from milescli.recipe.check_algorithm import check_algorithm, doubts_about_algorithm
from milescli.recipe.check_distill import check_distill
from milescli.recipe.check_draft import check_draft
from milescli.recipe.check_flight import check_flight, doubts_about_flight
from milescli.recipe.check_keys import doubts_about_keys
from milescli.recipe.check_lora import check_lora, doubt_about_lora
from milescli.recipe.check_mix import check_mix
from milescli.recipe.check_mtp import check_mtp
from milescli.recipe.check_rewards import check_rewards
from milescli.recipe.check_rows import check_rows
from milescli.recipe.check_speculative import check_speculative
from milescli.recipe.check_trackers import check_trackers
from milescli.recipe.data_files import FIELDS, check_names
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.recipe.train import OF_ROWS

MIN_VOCAB_SIZE = 272
"""256 bytes and the special tokens of a chat template."""

Origins = Mapping[str, object]


def check(recipe: Recipe, origins: Origins) -> list[str]:
    """Warnings. Raises RecipeError; its message takes from `origins` who set what."""
    for rule in _RULES:
        rule(recipe, origins)
    check_rewards(recipe)
    check_agents(recipe)
    check_rows(recipe)
    check_distill(recipe)
    check_speculative(recipe)
    check_algorithm(recipe)
    check_flight(recipe)
    check_lora(recipe)
    check_mtp(recipe)
    check_draft(recipe)
    check_trackers(recipe.run)
    doubts = [text for doubt in _DOUBTS if (text := doubt(recipe))]
    doubts += [*doubts_about_keys(recipe), *doubts_about_algorithm(recipe)]
    return [*doubts, *doubts_about_flight(recipe)]


def _one_model(recipe: Recipe, origins: Origins) -> None:
    model = recipe.model
    if model.path is None and model.scratch is None:
        raise RecipeError(
            "the recipe names no model",
            why="it needs `model.path` (a Hugging Face folder or hub name) or `model.scratch` (a "
            "small model made here)",
            fix=["--set model.path=Qwen/Qwen3-0.6B", "--set model.scratch={}"],
        )
    if model.path is not None and model.scratch is not None:
        raise RecipeError(
            "the recipe names two models",
            why=f"`model.path` is `{model.path}` ({origins['model.path']}) and `model.scratch` is "
            f"given too ({origins['model.scratch.hidden_size']}); one of them can be trained",
            fix=[
                f"--set model.path={model.path} --set model.scratch=null --set warmup.steps=0 "
                f"--set train.optimizer.lr=1e-6   # {recipe.train.optimizer.lr:g} suits a model "
                "that was made from a seed",
                "--set model.path=null",
            ],
        )
    if model.path is not None and not model.path.strip():
        raise RecipeError(
            "`model.path` is empty",
            why=f"{origins['model.path']} sets it",
            fix="--set model.path=Qwen/Qwen3-0.6B",
        )
    if model.revision is not None and model.path is None:
        raise RecipeError(
            f"`model.revision` is `{model.revision}`, but nothing is downloaded",
            why="a revision belongs to `model.path`; this recipe makes its model from scratch",
            fix="--set model.revision=null",
        )


def _scratch_shape(recipe: Recipe, origins: Origins) -> None:
    scratch = recipe.model.scratch
    if scratch is None:
        return
    if scratch.num_heads % scratch.num_kv_heads:
        raise _indivisible(
            "num_heads",
            scratch.num_heads,
            "num_kv_heads",
            scratch.num_kv_heads,
            "each KV head serves equally many heads",
        )
    if scratch.head_dim % 2:
        raise RecipeError(
            f"`model.scratch.head_dim` cannot be {scratch.head_dim}",
            why="rotary embedding turns pairs of channels: it must be even",
            fix=f"--set model.scratch.head_dim={scratch.head_dim + 1}",
        )
    if scratch.vocab_size < MIN_VOCAB_SIZE:
        raise RecipeError(
            f"`model.scratch.vocab_size` cannot be {scratch.vocab_size}",
            why="a byte-level vocabulary holds 256 bytes and the chat template's special tokens: "
            f"{MIN_VOCAB_SIZE} at least",
            fix="--set model.scratch.vocab_size=512",
        )
    longest = recipe.longest_sequence
    if recipe.learns_from_rows and longest > scratch.max_position_embeddings:
        raise RecipeError(
            "a row does not fit into the model's positions",
            why=f"`data.max_row_tokens` is {longest}; the model has "
            f"{scratch.max_position_embeddings} positions",
            fix=[
                f"--set data.max_row_tokens={scratch.max_position_embeddings}",
                f"--set model.scratch.max_position_embeddings={longest}",
            ],
        )
    if longest > scratch.max_position_embeddings:
        raise RecipeError(
            "prompt and response do not fit into the model's positions",
            why=f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens {recipe.rollout.max_response_tokens} = {longest}; the "
            "model has "
            f"{scratch.max_position_embeddings} positions",
            fix=f"--set model.scratch.max_position_embeddings={longest}",
        )
    _scratch_experts(scratch)


def _scratch_experts(scratch: ScratchModel) -> None:
    is_moe = scratch.family == "qwen3_moe"
    if is_moe and scratch.num_experts < 2:
        raise RecipeError(
            "a mixture of experts needs experts",
            why=f"`model.scratch.family` is qwen3_moe and `num_experts` is {scratch.num_experts}",
            fix=["--set model.scratch.num_experts=8", "--set model.scratch.family=qwen3"],
        )
    if not is_moe and scratch.num_experts:
        raise RecipeError(
            "a dense model has no experts",
            why=f"`model.scratch.family` is {scratch.family} and `num_experts` is "
            f"{scratch.num_experts}",
            fix=["--set model.scratch.family=qwen3_moe", "--set model.scratch.num_experts=0"],
        )
    if is_moe and scratch.tie_embeddings:
        raise RecipeError(
            "a mixture of experts cannot share its embeddings here",
            why="SGLang leaves the output layer of a `qwen3_moe` model with tied embeddings empty, "
            "and would sample at random",
            fix="--set model.scratch.tie_embeddings=false",
        )
    if is_moe and scratch.topk > scratch.num_experts:
        raise RecipeError(
            f"a token cannot go to {scratch.topk} of {scratch.num_experts} experts",
            why="`model.scratch.topk` is larger than `model.scratch.num_experts`",
            fix=f"--set model.scratch.topk={scratch.num_experts}",
        )


def _data(recipe: Recipe, origins: Origins) -> None:
    wants_rows = recipe.learns_from_rows or recipe.train.objective in OF_ROWS
    if not recipe.data.prompts and not recipe.data.mix and not wants_rows:
        raise RecipeError(
            "the recipe has no prompts",
            why="`data.prompts` is not set: there is nothing to respond to",
            fix=["--set data.prompts=train.jsonl", "--set data.prompts=task:sums"],
        )
    if recipe.warmup.steps and not recipe.data.demonstrations:
        raise RecipeError(
            f"{recipe.warmup.steps} warm-up steps have nothing to imitate",
            why="`warmup.steps` needs worked answers in `data.demonstrations`",
            fix=[
                f"--set data.demonstrations={recipe.data.prompts or 'FILE.jsonl'}",
                "--set warmup.steps=0",
            ],
        )
    if recipe.eval.every and not recipe.data.eval and not wants_rows:
        raise RecipeError(
            f"an evaluation every {recipe.eval.every} steps has nothing to evaluate on",
            why="`eval.every` needs held-out prompts in `data.eval`",
            fix=["--set data.eval=test.jsonl", "--set eval.every=0"],
        )
    check_mix(recipe.data)
    for name in FIELDS:
        check_names(getattr(recipe.data, name), key=f"data.{name}")


def _sampling(recipe: Recipe, origins: Origins) -> None:
    rollout = recipe.rollout
    if rollout.top_k == 0 or rollout.top_k < -1:
        raise RecipeError(
            f"`rollout.top_k` cannot be {rollout.top_k}",
            why="it counts the tokens to choose from: 1 or more, or -1 for the whole vocabulary",
            fix="--set rollout.top_k=-1",
        )
    if "" in rollout.stop:
        raise RecipeError(
            "`rollout.stop` has an empty string",
            why="every response would end at once",
            fix="--set rollout.stop=[]",
        )
    prompts, updates = rollout.prompts_per_step, recipe.train.updates_per_step
    if prompts % updates:
        raise RecipeError(
            f"{prompts} prompts cannot be split into {updates} equal updates",
            why=f"rollout.prompts_per_step is {prompts}, train.updates_per_step is {updates}, and "
            "an update takes the samples of a prompt together",
            fix=[
                f"--set train.updates_per_step={_divisor_below(prompts, updates)}",
                f"--set rollout.prompts_per_step={-(-prompts // updates) * updates}",
            ],
        )


def _evaluation(recipe: Recipe, origins: Origins) -> None:
    if not recipe.engines_apart:
        return
    is_own = recipe.eval.engines == "own"
    fix = ["--set eval.engines=shared"] if is_own else []
    if recipe.learns_from_rows:
        raise RecipeError(
            "evaluations cannot have engines of their own here"
            if is_own
            else "no role can be played by a model of its own here",
            why="a run that learns from rows has engines for nothing else than evaluations",
            fix=fix or "take `policy` out of `rollout.roles`",
        )
    if recipe.engines.num is not None and recipe.engines.num <= recipe.engines_apart:
        kept = ["`eval.engines` own keeps one for evaluations"] if is_own else []
        kept += [f"{name} plays roles on one of its own" for name in recipe.rollout.policies]
        raise RecipeError(
            "no engine would be left to sample",
            why=f"`engines.num` is {recipe.engines.num} ({origins['engines.num']}), and "
            + ", ".join(kept),
            fix=[f"--set engines.num={recipe.engines_apart + 1}", *fix],
        )


def _training(recipe: Recipe, origins: Origins) -> None:
    train, optimizer = recipe.train, recipe.train.optimizer
    if optimizer.warmup_steps >= train.steps:
        raise RecipeError(
            "the learning rate would never reach its value",
            why=f"train.optimizer.warmup_steps {optimizer.warmup_steps}, train.steps {train.steps}",
            fix=f"--set train.optimizer.warmup_steps={train.steps // 10}",
        )
    if optimizer.min_lr > optimizer.lr:
        raise RecipeError(
            "the learning rate would rise instead of fall",
            why=f"train.optimizer.min_lr {optimizer.min_lr:g} is above train.optimizer.lr "
            f"{optimizer.lr:g}",
            fix="--set train.optimizer.min_lr=0",
        )
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) == 1.0:
            raise RecipeError(
                f"`train.optimizer.{name}` cannot be 1",
                why="a moving average with no room for the new value never moves",
                fix=f"--set train.optimizer.{name}={type(optimizer).model_fields[name].default}",
            )
    if (
        train.routing_replay
        and recipe.model.scratch is not None
        and recipe.model.scratch.family == "qwen3"
    ):
        raise RecipeError(
            "there is no routing to replay",
            why="`train.routing_replay` is for mixtures of experts, and `model.scratch.family` is "
            "qwen3",
            fix=[
                "--set train.routing_replay=false",
                "--set model.scratch.family=qwen3_moe --set model.scratch.num_experts=8",
            ],
        )


def _settings(recipe: Recipe, origins: Origins) -> None:
    for key, name in (("name", recipe.name), ("run.name", recipe.run.name)):
        if name is not None and not _is_folder_name(name):
            raise _no_folder_name(key, name, origins)
    if not recipe.run.dir.strip():
        raise RecipeError(
            "`run.dir` is empty", why=f"{origins['run.dir']} sets it", fix="--set run.dir=runs"
        )
    address = recipe.machine.address
    if address is not None and address != "auto" and not _is_address(address):
        raise RecipeError(
            f"`machine.address` cannot be `{address}`",
            why="a Ray cluster is named HOST:PORT, or auto for the one on this machine "
            f"({origins['machine.address']})",
            fix="--set "
            f"machine.address={address.rpartition('//')[2].partition(':')[0] or '127.0.0.1'}:6379",
        )


def _is_folder_name(name: str) -> bool:
    return (
        bool(name)
        and "/" not in name
        and name[0] not in ".-"
        and name.strip() == name
        and name.isprintable()
    )


def _no_folder_name(key: str, name: str, origins: Origins) -> RecipeError:
    return RecipeError(
        f"`{key}` cannot be `{name}`",
        why=f"it becomes the name of a directory ({origins[key]}): no slash, no leading dot or "
        "dash, no blank at an end",
        fix=f"--set {key}=my-{key.partition('.')[0] if '.' in key else 'recipe'}",
    )


def _is_address(address: str) -> bool:
    """HOST:PORT of the cluster itself; http:// is its dashboard, and ray:// its door for programs
    that run elsewhere."""
    host, _, port = address.rpartition(":")
    return (
        bool(host)
        and "/" not in host
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 65536
    )


def _indivisible(larger: str, large: int, smaller: str, small: int, reason: str) -> RecipeError:
    return RecipeError(
        f"{large} heads cannot share {small} KV heads",
        why=f"`model.scratch.{larger}` must be a multiple of `model.scratch.{smaller}`: {reason}",
        fix=f"--set model.scratch.{smaller}={_divisor_below(large, small)}",
    )


def _divisor_below(number: int, bound: int) -> int:
    return next(
        candidate for candidate in range(min(number, bound), 0, -1) if number % candidate == 0
    )


_RULES: tuple[Callable[[Recipe, Origins], None], ...] = (
    _one_model,
    _scratch_shape,
    _data,
    _sampling,
    _evaluation,
    _training,
    _settings,
)


def _doubt_eval_on_training_prompts(recipe: Recipe) -> str | None:
    same = recipe.data.eval is not None and recipe.data.eval == recipe.data.prompts
    return (
        "`data.eval` is `data.prompts`: the accuracy is of prompts that were trained on"
        if same
        else None
    )


def _doubt_min_lr(recipe: Recipe) -> str | None:
    optimizer = recipe.train.optimizer
    unused = optimizer.min_lr > 0 and optimizer.schedule == "constant"
    return "`train.optimizer.min_lr` has no effect: the schedule is constant" if unused else None


_DOUBTS: tuple[Callable[[Recipe], str | None], ...] = (
    _doubt_eval_on_training_prompts,
    _doubt_min_lr,
    doubt_about_agents,
    doubt_about_lora,
)
