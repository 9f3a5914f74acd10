"""What a run takes in, before any process starts: model folder, tokenizer, prompts,
demonstrations. Bad input is refused here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.datasets import fetch_data
from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.checkpoint.base import CARRIED, CHECKPOINT, is_converted
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError
from milescli.core.types import Prompt, Trajectory
from milescli.models import ModelFacts, load_facts, parse_facts, scratch
from milescli.models.base import CONFIG_NAME
from milescli.recipe.hub_name import is_hub, parse_hub
from milescli.recipe.schema import Data, Model, Recipe
from milescli.recipe.templates import shipped_shape
from milescli.rollout.labels import check_labels
from milescli.rollout.rewards import label_checks, load_rewards, needs_label
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.source import FilePrompts, SourceReport, check_file, load_source
from milescli.rollout.tasks import is_task, write_task
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer
from milescli.rollout.trajectories import demonstration

if TYPE_CHECKING:
    from milescli.console.output import Output

DATA_FIELDS = ("prompts", "eval", "demonstrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Checked and tokenised."""

    model_dir: Path
    """A Hugging Face folder with config.json, safetensors and a tokenizer."""
    facts: ModelFacts
    tokenizer: ChatTokenizer
    prompts: FilePrompts
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


def require_files(data: Data) -> None:
    """Raises DataError where a file of this computer cannot be opened. `prepare` finds the same;
    this takes no time."""
    for field in DATA_FIELDS:
        value = getattr(data, field)
        if value is not None and not is_hub(value) and not is_task(value):
            check_file(Path(value).expanduser().absolute(), field=field)


def prepare(recipe: Recipe, run: RunDir, *, output: Output | None = None) -> RunInputs:
    """Make, find or fetch everything; raises DataError, RecipeError, RewardError, MachineError or
    CheckpointError before any device is taken.

    `output`: where a download says how much it is, and how far; None: nowhere.
    """
    load_rewards(recipe.rollout)
    data = _absolute(recipe.data, run, recipe.run.seed, output=output)
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
            needs_label=field != "demonstrations" and needs_label(recipe.rollout),
        )
        return source

    prompts = load("prompts")
    heldout = load("eval").prompts[: recipe.eval.num_prompts] if data.eval else []
    demonstrations = (
        _demonstrations(recipe, load("demonstrations"), tokenizer) if recipe.warmup.steps else []
    )
    _refuse_leak(heldout, prompts.prompts, data)
    for field, graded in (("prompts", prompts.prompts), ("eval", heldout)):
        for name, reward in label_checks(recipe.rollout).items() if graded else ():
            check_labels(
                reward,
                graded,
                name=name,
                path=Path(reports[field].path),
                say=output.note if output else None,
            )
    return RunInputs(
        model_dir=model_dir,
        facts=facts,
        tokenizer=tokenizer,
        prompts=prompts,
        heldout=heldout,
        demonstrations=demonstrations,
        reports=reports,
    )


def _absolute(data: Data, run: RunDir, seed: int, *, output: Output | None) -> Data:
    """Tasks become files of the run, data sets of the hub files of its cache; other paths are as
    the user gave them."""
    changes: dict[str, str] = {}
    for field in DATA_FIELDS:
        value = getattr(data, field)
        if value is None:
            continue
        if is_hub(value):
            path = fetch_data(
                parse_hub(value, key=f"data.{field}"), key=field, into=run.data_dir, output=output
            )
        else:
            path = (
                write_task(value, run.data_dir, seed)
                if is_task(value)
                else Path(value).expanduser().absolute()
            )
        changes[field] = str(path)
    return data.model_copy(update=changes)


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
        text = Path(data.demonstrations or data.prompts or "").read_text(
            encoding="utf-8", errors="replace"
        )
        make_scratch_tokenizer(text.splitlines(), model.scratch.vocab_size, run.own_model_dir)
        scratch.make_model(model.scratch, run.own_model_dir, recipe.run.seed)
    return run.own_model_dir


def _demonstrations(
    recipe: Recipe, source: FilePrompts, tokenizer: ChatTokenizer
) -> list[Trajectory]:
    trajectories = [
        demonstration(prompt.token_ids, tokenizer.encode_response(prompt.demonstration))
        for prompt in source.prompts
        if prompt.demonstration is not None
    ]
    if not trajectories:
        raise DataError(
            f"`{recipe.data.demonstrations}` has no worked responses",
            why="the warm-up imitates them: it needs a column `demonstration`, or responses that "
            "end in `#### label`",
            fix=["--set data.demonstrations=FILE", "--set warmup.steps=0"],
        )
    longest = max(trajectory.num_tokens for trajectory in trajectories)
    if longest > recipe.warmup.max_loss_tokens:
        raise DataError(
            f"a demonstration is {longest} tokens long",
            why=f"`warmup.max_loss_tokens` is {recipe.warmup.max_loss_tokens}",
            fix=f"--set warmup.max_loss_tokens={longest}",
        )
    return trajectories


def _refuse_leak(heldout: list[Prompt], prompts: list[Prompt], data: Data) -> None:
    seen = {tuple(prompt.token_ids) for prompt in prompts}
    leaked = [prompt.index for prompt in heldout if tuple(prompt.token_ids) in seen]
    if leaked:
        raise DataError(
            f"{len(leaked)} held-out prompts are training prompts too",
            why=f"row {leaked[0] + 1} of {data.eval} is also in {data.prompts}: the evaluation "
            "would measure memory",
            fix="--set data.eval=FILE with other prompts",
        )
