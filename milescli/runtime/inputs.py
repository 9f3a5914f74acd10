"""What a run takes in, before any process starts: model folder, tokenizer, prompts,
demonstrations. Bad input is refused here."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.backends.hub.datasets import fetch_data
from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.checkpoint.base import CARRIED, CHECKPOINT, is_converted
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.score_model import score_model
from milescli.core.errors import DataError, RecipeError
from milescli.core.types import Prompt, Trajectory
from milescli.models import ModelFacts, load_facts, parse_facts, scratch
from milescli.models.base import CONFIG_NAME
from milescli.models.score_head import with_score_head
from milescli.recipe.data import Data
from milescli.recipe.hub_name import is_hub, parse_hub
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape
from milescli.recipe.train import OF_PAIRS, OF_ROWS
from milescli.rollout.example_rows import Kind, RowField
from milescli.rollout.examples import ExampleReport, Examples, load_examples
from milescli.rollout.labels import check_labels
from milescli.rollout.rewards import label_checks, load_rewards, needs_label
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.source import FilePrompts, SourceReport, check_file, load_source
from milescli.rollout.tasks import is_task, write_task
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer
from milescli.rollout.trajectories import demonstration
from milescli.train.objectives import load_objective

if TYPE_CHECKING:
    from milescli.console.output import Output

DATA_FIELDS = ("prompts", "eval", "demonstrations", "train", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Checked and tokenised."""

    model_dir: Path
    """A Hugging Face folder with config.json, safetensors and a tokenizer."""
    facts: ModelFacts
    tokenizer: ChatTokenizer
    prompts: FilePrompts | None
    """None where the run learns from rows."""
    heldout: list[Prompt]
    """Empty without `data.eval`."""
    demonstrations: list[Trajectory]
    """For the warm-up, the worked responses on their loss masks; empty without one."""
    reports: dict[str, SourceReport | ExampleReport]
    """By data field."""
    rows: Examples[Any] | None = None
    """Trajectories or pairs of `data.train`; None where the run learns from what is sampled."""
    critic_dir: Path | None = None
    """A Hugging Face folder that gives scores; None: the run trains no critic."""
    validation: list[Any] = dataclasses.field(default_factory=list)
    """Held-out ones; empty without `data.validation`."""

    @property
    def data_sha256(self) -> str:
        """Of the file that the run learns from."""
        return self.reports["train" if self.rows is not None else "prompts"].sha256

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


def planned_facts(recipe: Recipe) -> ModelFacts:
    """As `facts_of_recipe`, of the model that is trained: with a score head where the objective
    wants one."""
    facts = facts_of_recipe(recipe.model)
    return with_score_head(facts) if recipe.trains_scores else facts


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
    tokenizer = load_tokenizer(model_dir, chat_template=data.chat_template)
    if recipe.trains_scores:
        model_dir = score_model(
            model_dir, run.score_model_dir, pad_id=tokenizer.pad_id, seed=recipe.run.seed
        )
    facts = load_facts(model_dir)
    reports: dict[str, SourceReport | ExampleReport] = {}
    rows, validation = _rows(recipe, data, tokenizer, reports, output=output)

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

    prompts = load("prompts") if rows is None else None
    heldout = load("eval").prompts[: recipe.eval.num_prompts] if data.eval else []
    demonstrations = (
        _demonstrations(recipe, load("demonstrations"), tokenizer) if recipe.warmup.steps else []
    )
    learned = prompts.prompts if prompts else []
    _refuse_leak(heldout, learned, data)
    for field, graded in (("prompts", learned), ("eval", heldout)):
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
        rows=rows,
        validation=validation,
        critic_dir=_critic_folder(recipe, run, model_dir, facts, tokenizer, output=output),
    )


def _critic_folder(
    recipe: Recipe,
    run: RunDir,
    model_dir: Path,
    facts: ModelFacts,
    tokenizer: ChatTokenizer,
    *,
    output: Output | None,
) -> Path | None:
    """The critic's model, made of the policy's folder or of `train.critic.path`. Raises RecipeError
    where it reads other tokens than the policy."""
    if not recipe.has_critic:
        return None
    source = model_dir
    if (path := recipe.train.critic.path) is not None:
        source = model_dir_of(Model(path=path), run, output=output)
        theirs = load_facts(source)
        if theirs.vocab_size != facts.vocab_size:
            raise RecipeError(
                "the critic reads other tokens than the policy",
                why=f"`train.critic.path` {path} has a vocabulary of {theirs.vocab_size}, the "
                f"policy one of {facts.vocab_size}",
                fix="--set train.critic.path=null   # the policy's own weights, with a new head",
            )
    return score_model(source, run.critic_model_dir, pad_id=tokenizer.pad_id, seed=recipe.run.seed)


def _rows(
    recipe: Recipe,
    data: Data,
    tokenizer: ChatTokenizer,
    reports: dict[str, SourceReport | ExampleReport],
    *,
    output: Output | None,
) -> tuple[Examples[Any] | None, list[Any]]:
    """What `data.train` and `data.validation` hold."""
    if data.train is None:
        return None, []
    kind: Kind = kind_of_rows(recipe)
    loaded: dict[RowField, list[Any]] = {"train": [], "validation": []}
    for key in loaded:
        if getattr(data, key) is not None:
            loaded[key], report = load_examples(
                data, key, kind=kind, tokenizer=tokenizer, ends_at_turn=recipe.trains_scores
            )
            reports[key] = report
            if report.note and output is not None:
                output.warn(report.note)
    rows = Examples(loaded["train"], seed=recipe.run.seed, shuffle=data.shuffle)
    return rows, loaded["validation"][: recipe.eval.num_prompts]


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
        text = Path(data.demonstrations or data.prompts or data.train or "").read_text(
            encoding="utf-8", errors="replace"
        )
        make_scratch_tokenizer(text.splitlines(), model.scratch.vocab_size, run.own_model_dir)
        scratch.make_model(model.scratch, run.own_model_dir, recipe.run.seed)
    return run.own_model_dir


def kind_of_rows(recipe: Recipe) -> Kind:
    """What the recipe's objective takes of a file. Raises RecipeError where it takes groups."""
    name = recipe.train.objective
    if name in OF_ROWS:
        return "pairs" if name in OF_PAIRS else "chats"
    takes = getattr(load_objective(name, recipe), "takes", "groups")
    if takes not in ("chats", "pairs"):
        raise RecipeError(
            f"the objective `{name}` does not learn from rows",
            why=f"its `takes` is {takes!r}, and `data.train` is {recipe.data.train}",
            fix='give it `takes = "chats"` or `takes = "pairs"`',
        )
    return takes


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
