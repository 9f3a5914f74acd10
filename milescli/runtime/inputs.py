"""What a run takes in, before any process starts: model folder, tokenizer, prompts,
demonstrations. Bad input is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.checkpoint.base import CARRIED, CHECKPOINT, is_converted
from milescli.checkpoint.run_dir import RunDir
from milescli.core.types import Prompt, Trajectory
from milescli.models import ModelFacts, load_facts, parse_facts, scratch
from milescli.models.base import CONFIG_NAME
from milescli.recipe.schema import Data, Model, Recipe, Rollout
from milescli.recipe.templates import shipped_shape
from milescli.rollout.mix import MixedPrompts
from milescli.rollout.mix_source import load_mix
from milescli.rollout.rewards import in_processes, load_reward, needs_label
from milescli.rollout.scoring import Scorer
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.source import FilePrompts, SourceReport, load_source
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer
from milescli.runtime.data_inputs import (
    check_labels_of,
    demonstrations_of,
    near_leaks_told,
    refuse_leak,
    rollouts_of,
    sources_of,
    texts_for_vocabulary,
    with_local_files,
)

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Checked and tokenised."""

    model_dir: Path
    """A Hugging Face folder with config.json, safetensors and a tokenizer."""
    facts: ModelFacts
    tokenizer: ChatTokenizer
    prompts: FilePrompts | MixedPrompts
    heldout: list[Prompt]
    """Empty without `data.eval`."""
    demonstrations: list[Trajectory]
    """For the warm-up, the worked responses on their loss masks; empty without one."""
    reports: dict[str, SourceReport]
    """By data field."""

    @property
    def data_sha256(self) -> str:
        """Of the file of training prompts."""
        return self.reports["prompts"].sha256

    def as_manifest(self) -> dict[str, object]:
        """For manifest.json."""
        return {name: asdict(report) for name, report in self.reports.items()}


def facts_of_recipe(model: Model) -> ModelFacts:
    """The facts of the recipe's model without making or loading it: of a name on the hub, the shape
    that ships with the recipes, else config.json alone. `prepare` reads what was fetched in the
    end."""
    if model.scratch is not None:
        return parse_facts(scratch.config_of(model.scratch))
    assert model.path is not None, "recipe.check lets no recipe without a model pass"
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return load_facts(folder / CARRIED if is_converted(folder) else folder)
    if model.revision in (None, "main") and (shape := shipped_shape(model.path)):
        return parse_facts(shape)
    return load_facts(fetch_config(model.path, revision=model.revision))


def prepare(recipe: Recipe, run: RunDir, *, output: Output | None = None) -> RunInputs:
    """Make, find or fetch everything; raises DataError, RecipeError, RewardError, MachineError or
    CheckpointError before any device is taken.

    `output`: where a download says how much it is, and how far; None: nowhere.
    """
    for rollout in rollouts_of(recipe):
        load_reward(rollout)
    data = with_local_files(recipe.data, run, recipe.run.seed, output=output)
    model_dir = _model_folder(recipe, run, data, output=output)
    tokenizer = load_tokenizer(model_dir)
    facts = load_facts(model_dir)
    reports: dict[str, SourceReport] = {}

    def load(field: str) -> FilePrompts:
        source, reports[field] = load_source(
            data,
            field,
            tokenizer=tokenizer,
            seed=recipe.run.seed,
            base_dir=run.path,
            needs_label=field != "demonstrations" and needs_label(recipe.rollout.reward),
            say=output.note if output else None,
        )
        return source

    prompts: FilePrompts | MixedPrompts
    if data.mix:
        prompts, reports["prompts"] = load_mix(
            data,
            tokenizer=tokenizer,
            seed=recipe.run.seed,
            base_dir=run.path,
            needs_label=lambda source: needs_label(source.reward or recipe.rollout.reward),
            say=output.note if output else None,
        )
    else:
        prompts = load("prompts")
    heldout_source = load("eval") if data.eval else None
    heldout = heldout_source.first(recipe.eval.num_prompts) if heldout_source else []
    demonstrations = (
        demonstrations_of(recipe, load("demonstrations"), tokenizer) if recipe.warmup.steps else []
    )
    trained = sources_of(recipe, prompts)
    if heldout_source:
        refuse_leak(
            heldout_source, [part for part, _ in trained], num_heldout=recipe.eval.num_prompts
        )
        for part, _ in trained if output else []:
            if told := near_leaks_told(heldout_source, heldout, part, output=output):
                output.warn(told)
    for part, rollout in trained:
        check_labels_of(rollout, part, None, output=output)
    if heldout_source:
        check_labels_of(recipe.rollout, heldout_source, heldout, output=output)
    return RunInputs(
        model_dir=model_dir,
        facts=facts,
        tokenizer=tokenizer,
        prompts=prompts,
        heldout=heldout,
        demonstrations=demonstrations,
        reports=reports,
    )


def scorer_of(recipe: Recipe) -> Scorer:
    """The recipe's reward, bounded and retried as the recipe says; those of its mix, each for the
    prompts of its source. One of the user's runs in processes of its own."""
    scorers = {
        source.called: _scorer(rollout)
        for source, rollout in zip(recipe.data.mix or [], rollouts_of(recipe)[1:], strict=True)
        if source.reward is not None
    }
    return _scorer(recipe.rollout, by_source=scorers)


def _scorer(rollout: Rollout, by_source: Mapping[str, Scorer] | None = None) -> Scorer:
    return Scorer(
        in_processes(rollout) or load_reward(rollout),
        name=rollout.reward,
        timeout_s=rollout.reward_timeout_s,
        retries=rollout.reward_retries,
        by_source=by_source,
    )


def model_dir_of(model: Model, run: RunDir, *, output: Output | None = None) -> Path:
    """The Hugging Face folder of a run's model, fetched where it is on the hub. The trainer and the
    engines read it as it is: nothing is converted."""
    if model.scratch is not None:
        return run.own_model_dir
    folder = Path(model.path or "").expanduser()
    if is_converted(folder):
        return _unpacked(folder, run)
    return (
        folder.absolute()
        if folder.is_dir()
        else fetch_model(str(model.path), revision=model.revision, output=output)
    )


def _unpacked(folder: Path, run: RunDir) -> Path:
    """A converted model as a Hugging Face folder within the run, made once: the engines read no
    other."""
    if not (run.own_model_dir / CONFIG_NAME).exists():
        from milescli.conversion.unpack import unpack

        unpack(folder / CHECKPOINT, run.own_model_dir, model_dir=folder / CARRIED)
    return run.own_model_dir


def _model_folder(recipe: Recipe, run: RunDir, data: Data, *, output: Output | None) -> Path:
    model = recipe.model
    if model.scratch is None:
        return model_dir_of(model, run, output=output)
    if not (run.own_model_dir / "model.safetensors").exists():
        texts = texts_for_vocabulary(data)
        make_scratch_tokenizer(texts, model.scratch.vocab_size, run.own_model_dir)
        scratch.make_model(model.scratch, run.own_model_dir, recipe.run.seed)
    return run.own_model_dir
