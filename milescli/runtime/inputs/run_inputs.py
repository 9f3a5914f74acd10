"""Prepares the inputs of a run, before any process starts: model folder, tokenizer, prompts,
demonstrations. Refuses bad input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milescli.agents.foreign.playing import require_foreign_environment
from milescli.agents.tool_kit import offered_tools
from milescli.backends.hub.models import fetch_model
from milescli.checkpoint.matching import require_mtp_layer
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.score_model import score_model
from milescli.console.output import Output
from milescli.core.errors import RecipeError
from milescli.core.types import Prompt, Trajectory
from milescli.data.chat_masks import turn_end_ids
from milescli.data.examples import ExampleReport, Examples
from milescli.data.file_prompts import FilePrompts
from milescli.data.mixed_prompts import MixedPrompts
from milescli.data.prompt_encoder import PromptEncoder
from milescli.data.prompt_source import SourceReport, load_source
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer, engine_stop_ids, load_tokenizer
from milescli.models import ModelFacts, load_facts, scratch
from milescli.models.base import CONFIG_NAME
from milescli.recipe.data import Data
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe
from milescli.rollout.environments import require_environment
from milescli.rollout.episode.agents import require_agent
from milescli.rollout.rewards import load_all_rewards, needs_label
from milescli.runtime.inputs.auxiliary_models import (
    check_served_teachers,
    checkpoint_of,
    draft_folder,
    is_checkpoint,
    policy_folders,
    reward_model_folder,
    teacher_folders,
)
from milescli.runtime.inputs.checks import HELD_OUT, INPUTS, CheckSubject, Outcome, require_checks
from milescli.runtime.inputs.data_files import (
    check_labels_of,
    rollouts_of,
    texts_for_vocabulary,
    with_foreign_tasks,
    with_local_files,
)
from milescli.runtime.inputs.run_data import load_data


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Holds the inputs of a run, checked and tokenised."""

    model_dir: Path
    """A Hugging Face folder with config.json, safetensors and a tokenizer."""
    facts: ModelFacts
    tokenizer: ChatTokenizer
    prompts: FilePrompts | MixedPrompts | None
    """None if the run learns from rows."""
    heldout: list[Prompt]
    """Empty without `data.eval`."""
    demonstrations: list[Trajectory]
    """For the warm-up, the worked responses on their loss masks; empty without one."""
    reports: dict[str, SourceReport | ExampleReport]
    """Reports by data field."""
    rows: Examples[Any] | None = None
    """Trajectories or pairs of `data.train`; None if the run learns from samples."""
    critic_dir: Path | None = None
    """A Hugging Face folder of a model with a score head; None: the run trains no critic."""
    reward_model_dir: Path | None = None
    """A Hugging Face folder of a model with a score head; None if no reward model is used."""
    draft_dir: Path | None = None
    """A Hugging Face folder of the draft model; None if there is none."""
    teacher_dirs: tuple[Path, ...] = ()
    """Hugging Face folders of `train.distill.teachers` that the ranks hold, in order."""
    policy_dirs: tuple[Path, ...] = ()
    """Hugging Face folders of `rollout.policies`, which play roles, in order: engines of their own,
    the last ones of the plan, are started on them."""
    served: tuple[str, ...] = ()
    """Served teachers of the run: URL and name of the model that it serves."""
    validation: list[Any] = dataclasses.field(default_factory=list)
    """Held-out rows; empty without `data.validation`."""
    checked: list[Outcome] = dataclasses.field(default_factory=list)
    """Outcomes of the checks."""

    def model_dir_of(self, engine: int, *, num_engines: int) -> Path:
        """Return the folder that one of `num_engines` engines is started on."""
        place = engine - (num_engines - len(self.policy_dirs))
        return self.policy_dirs[place] if place >= 0 else self.model_dir

    @property
    def own_stop_ids(self) -> list[int]:
        """Return the token that ends a turn of the chat template, if config.json and
        generation_config.json do not have it: the run teaches it, so engines must stop at it. Also
        return the tokens of images, because an engine would expect an image after one."""
        images = self.tokenizer.images
        ends = stop_ids_of_turns(self.tokenizer, self.model_dir)
        return ends if images is None else [*ends, *images.reserved_ids]

    @property
    def data_sha256(self) -> str:
        """Return the SHA-256 of the file from which the run learns."""
        return self.reports["train" if self.rows is not None else "prompts"].sha256

    def as_manifest(self) -> dict[str, object]:
        """Return the inputs for manifest.json."""
        return {name: asdict(report) for name, report in self.reports.items()}


def require_episode_parts(recipe: Recipe) -> None:
    """Raise MilesError if this machine, which plays and scores episodes, cannot run the recipe's
    agent or rewards."""
    for rollout in rollouts_of(recipe):
        load_all_rewards(rollout)
    require_agent(recipe.rollout)
    require_foreign_environment(recipe.rollout)
    if recipe.rollout.plays_environment:
        require_environment(recipe.rollout.environment)


def prepare_inputs(
    recipe: Recipe, run: RunDir, *, output: Output | None = None, rewards_tried: bool = False
) -> RunInputs:
    """Create, find or download all inputs. Raises DataError, RecipeError, RewardError, MachineError
    or CheckpointError before any device is taken. `output`: shows size and progress of downloads;
    None: they are not shown. `rewards_tried`: True if the user's rewards were called already."""
    require_episode_parts(recipe)
    tools = offered_tools(recipe.rollout)
    data = with_foreign_tasks(recipe.data, recipe.rollout, run)
    data = with_local_files(data, run, recipe.run.seed, output=output)
    model_dir = _model_folder(recipe, run, data, output=output)
    tokenizer = load_tokenizer(model_dir, chat_template=data.chat_template, tools=tools)
    if recipe.trains_scores:
        model_dir = score_model(
            model_dir, run.score_model_dir, pad_id=tokenizer.pad_id, seed=recipe.run.seed
        )
    facts = load_facts(model_dir)
    tokenizer.num_embeddings = facts.vocab_size
    teachers = teacher_folders(recipe, run, tokenizer=tokenizer, facts=facts, output=output)
    loaded = load_data(recipe, data, run, tokenizer, output=output)
    made = require_checks(
        INPUTS,
        CheckSubject(
            recipe=recipe,
            facts=facts,
            tokenizer=tokenizer,
            own_stop_ids=stop_ids_of_turns(tokenizer, model_dir),
            trained=loaded.trained,
            heldout=loaded.heldout,
            rows=loaded.rows.items if loaded.rows is not None else (),
            rewards_tried=rewards_tried,
            output=output,
        ),
    )
    graded = loaded.heldout.first(recipe.eval.num_prompts) if loaded.heldout is not None else []
    return RunInputs(
        model_dir=model_dir,
        facts=facts,
        tokenizer=tokenizer,
        prompts=loaded.prompts,
        heldout=graded,
        demonstrations=loaded.demonstrations,
        reports=loaded.reports,
        rows=loaded.rows,
        validation=loaded.validation,
        teacher_dirs=tuple(teachers),
        served=tuple(check_served_teachers(recipe, tokenizer, facts)),
        critic_dir=_critic_folder(recipe, run, model_dir, facts, tokenizer, output=output),
        reward_model_dir=reward_model_folder(recipe, run, tokenizer, output=output),
        draft_dir=draft_folder(recipe, run, tokenizer=tokenizer, facts=facts, output=output),
        policy_dirs=policy_folders(recipe, run, tokenizer=tokenizer, facts=facts, output=output),
        checked=made,
    )


def stop_ids_of_turns(tokenizer: ChatTokenizer, model_dir: Path) -> list[int]:
    """Return the tokens that end a turn of the chat template and that the model's own files do not
    list."""
    return sorted(turn_end_ids(tokenizer) - engine_stop_ids(model_dir))


def inputs_of_model(recipe: Recipe, run: RunDir, *, output: Output | None = None) -> RunInputs:
    """Return the inputs of a model that is only evaluated; its prompts are loaded separately.
    Raises as `prepare_inputs`."""
    model_dir = model_dir_of(recipe.model, run, output=output)
    return RunInputs(
        model_dir=model_dir,
        facts=load_facts(model_dir),
        tokenizer=load_tokenizer(
            model_dir,
            chat_template=recipe.data.chat_template,
            tools=offered_tools(recipe.rollout),
        ),
        prompts=None,
        heldout=[],
        demonstrations=[],
        reports={},
    )


def with_reward_model(
    inputs: RunInputs, recipe: Recipe, run: RunDir, *, output: Output | None
) -> RunInputs:
    """Return the inputs with the reward model of `recipe`, if it uses one. Raises as
    `prepare_inputs`."""
    folder = reward_model_folder(recipe, run, inputs.tokenizer, output=output)
    return dataclasses.replace(inputs, reward_model_dir=folder)


def with_policies(
    inputs: RunInputs, recipe: Recipe, run: RunDir, *, output: Output | None
) -> RunInputs:
    """Return the inputs with the models that play roles of `recipe`. Raises as `prepare_inputs`."""
    folders = policy_folders(
        recipe, run, tokenizer=inputs.tokenizer, facts=inputs.facts, output=output
    )
    return dataclasses.replace(inputs, policy_dirs=folders)


def load_heldout(
    recipe: Recipe,
    data: Data,
    tokenizer: PromptEncoder,
    *,
    trained: Sequence[FilePrompts],
    base_dir: Path,
    output: Output | None,
) -> tuple[FilePrompts, SourceReport]:
    """Return the prompts of `data.eval`, whose files are local. Of the first `eval.num_prompts`,
    which are evaluated, the reward must be able to grade the labels, and none may be in `trained`.
    Raises DataError, or warns of a prompt that nearly equals a training prompt."""
    loaded = load_source(
        data,
        "eval",
        tokenizer=tokenizer,
        seed=recipe.run.seed,
        base_dir=base_dir,
        needs_label=needs_label(recipe.rollout),
        report_progress=output.note if output else None,
    )
    source = loaded.source
    subject = CheckSubject(
        recipe=recipe,
        trained=[(part, recipe.rollout) for part in trained],
        heldout=source,
        output=output,
    )
    require_checks([HELD_OUT], subject)
    prompts = source.first(recipe.eval.num_prompts)
    check_labels_of(recipe.rollout, source, prompts, output=output)
    return source, loaded.report


def _critic_folder(
    recipe: Recipe,
    run: RunDir,
    model_dir: Path,
    facts: ModelFacts,
    tokenizer: ChatTokenizer,
    *,
    output: Output | None,
) -> Path | None:
    """Return the folder of the critic's model, made from the policy's folder or from
    `train.critic.path`. Raises RecipeError if its tokenizer differs from the policy's."""
    if not recipe.has_critic:
        return None
    source = model_dir
    if (path := recipe.train.critic.path) is not None:
        source = model_dir_of(Model(path=path), run, output=output)
        theirs = load_facts(source)
        if theirs.vocab_size != facts.vocab_size:
            raise RecipeError(
                "the critic uses other tokens than the policy",
                why=f"`train.critic.path` {path} has a vocabulary of {theirs.vocab_size}, and "
                f"the policy has one of {facts.vocab_size}",
                fix="--set train.critic.path=null   # the policy's own weights with a new head",
            )
    return score_model(source, run.critic_model_dir, pad_id=tokenizer.pad_id, seed=recipe.run.seed)


def model_dir_of(model: Model, run: RunDir, *, output: Output | None = None) -> Path:
    """Return the Hugging Face folder of a run's model; download it if it is on the hub. The trainer
    and the engines read it as it is: nothing is converted."""
    if model.scratch is not None:
        return run.own_model_dir
    folder = Path(model.path or "").expanduser()
    if is_checkpoint(folder):
        return _unpacked(folder, run, output=output)
    return (
        folder.absolute()
        if folder.is_dir()
        else fetch_model(str(model.path), revision=model.revision, output=output)
    )


def _unpacked(folder: Path, run: RunDir, *, output: Output | None) -> Path:
    """Write another run, or a converted model, as a Hugging Face folder within the run, once:
    engines read nothing else."""
    if not (run.own_model_dir / CONFIG_NAME).exists():
        from milescli.conversion.unpack import unpack

        checkpoint = checkpoint_of(folder)
        model_dir = checkpoint.model_dir
        unpack(checkpoint.tensors, run.own_model_dir, model_dir=model_dir, output=output)
    return run.own_model_dir


def _model_folder(recipe: Recipe, run: RunDir, data: Data, *, output: Output | None) -> Path:
    model = recipe.model
    if model.scratch is None:
        folder = model_dir_of(model, run, output=output)
        if recipe.train.mtp.is_on:
            require_mtp_layer(folder)
        return folder
    if not (run.own_model_dir / "model.safetensors").exists():
        texts = texts_for_vocabulary(recipe, data, run)
        make_scratch_tokenizer(
            texts,
            model.scratch.vocab_size,
            run.own_model_dir,
            sees_images=model.scratch.family == "qwen2_5_vl",
        )
        scratch.make_model(model.scratch, run.own_model_dir, recipe.run.seed)
    return run.own_model_dir
