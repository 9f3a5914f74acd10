"""What a run takes in, before any process starts: model folder, tokenizer, prompts,
demonstrations. Bad input is refused here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
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
from milescli.recipe.schema import Data, Model, Recipe, Rollout
from milescli.recipe.templates import shipped_shape
from milescli.rollout.labels import MAX_LABELS, check_labels
from milescli.rollout.leaks import exact_leaks
from milescli.rollout.mapped import by_file
from milescli.rollout.rewards import REWARDS, in_processes, load_reward, needs_label
from milescli.rollout.scoring import Scorer
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.source import FilePrompts, SourceReport, load_source
from milescli.rollout.tables import check_file, open_table
from milescli.rollout.tables.base import LINE_SUFFIXES
from milescli.rollout.tasks import is_task, write_task
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer
from milescli.rollout.trajectories import demonstration

if TYPE_CHECKING:
    from milescli.console.output import Output

DATA_FIELDS = ("prompts", "eval", "demonstrations")
SCRATCH_BYTES = 64 * 2**20
SCRATCH_ROWS = 100_000
"""What the vocabulary of a model made from scratch is made of, at most."""


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
    load_reward(recipe.rollout)
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
            needs_label=field != "demonstrations" and needs_label(recipe.rollout.reward),
            say=output.note if output else None,
        )
        return source

    prompts = load("prompts")
    heldout_source = load("eval") if data.eval else None
    heldout = heldout_source.first(recipe.eval.num_prompts) if heldout_source else []
    demonstrations = (
        _demonstrations(recipe, load("demonstrations"), tokenizer) if recipe.warmup.steps else []
    )
    if heldout_source:
        _refuse_leak(heldout_source, prompts, data, num_heldout=recipe.eval.num_prompts)
    _check_labels(recipe.rollout, prompts, None, output=output)
    if heldout_source:
        _check_labels(recipe.rollout, heldout_source, heldout, output=output)
    return RunInputs(
        model_dir=model_dir,
        facts=facts,
        tokenizer=tokenizer,
        prompts=prompts,
        heldout=heldout,
        demonstrations=demonstrations,
        reports=reports,
    )


def _check_labels(
    rollout: Rollout, source: FilePrompts, graded: list[Prompt] | None, *, output: Output | None
) -> None:
    """`graded`: which prompts of the source are; None: all, of large files some labels."""
    reward = REWARDS.resolve_isolated(rollout.reward, key="rollout.reward")
    say = output.note if output else None
    if graded is None and source.is_large:
        for file in source.files:
            rows, num_labels = file.different_labels(MAX_LABELS)
            check_labels(
                reward, rows, name=rollout.reward, path=file.path, say=say, num_labels=num_labels
            )
        return
    for file, prompts in by_file(source.prompts if graded is None else graded, source.files):
        check_labels(reward, prompts, name=rollout.reward, path=file.path, say=say)


def scorer_of(rollout: Rollout) -> Scorer:
    """The recipe's reward, bounded and retried as the recipe says; one of the user's runs in
    processes of its own."""
    return Scorer(
        in_processes(rollout) or load_reward(rollout),
        name=rollout.reward,
        timeout_s=rollout.reward_timeout_s,
        retries=rollout.reward_retries,
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
        texts = _texts_of(Path(data.demonstrations or data.prompts or ""))
        make_scratch_tokenizer(texts, model.scratch.vocab_size, run.own_model_dir)
        scratch.make_model(model.scratch, run.own_model_dir, recipe.run.seed)
    return run.own_model_dir


def _texts_of(path: Path) -> list[str]:
    """What a scratch model's vocabulary is made of: the lines of the file, those of a large one up
    to SCRATCH_BYTES; of a file that is not text, its rows."""
    if path.suffix in LINE_SUFFIXES:
        with path.open("rb") as file:
            text = file.read(SCRATCH_BYTES).decode("utf-8", errors="replace")
        return text.splitlines()
    rows = islice(open_table(path).records(), SCRATCH_ROWS)
    return [json.dumps(row, ensure_ascii=False, default=str) for _, row in rows]


def _demonstrations(
    recipe: Recipe, source: FilePrompts, tokenizer: ChatTokenizer
) -> list[Trajectory]:
    most = recipe.warmup.steps * recipe.warmup.batch_size
    trajectories = [
        demonstration(prompt.token_ids, tokenizer.encode_response(prompt.demonstration))
        for prompt in source.some(most)
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


def _refuse_leak(
    heldout: FilePrompts, prompts: FilePrompts, data: Data, *, num_heldout: int | None
) -> None:
    leaks = exact_leaks(heldout, prompts, num_heldout=num_heldout)
    if leaks:
        raise DataError(
            f"{len(leaks)} held-out prompts are training prompts too",
            why=f"row {leaks[0].heldout + 1} of {data.eval} is also row {leaks[0].prompts + 1} of "
            f"{data.prompts}: the evaluation would measure memory",
            fix="--set data.eval=FILE with other prompts",
        )
