"""Implements `miles data check`: shows how a run would read its data. Leaves no files; called by
the command."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.agents.tool_kit import offered_tools
from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError, MilesError
from milescli.core.types import Pair, Prompt, Trajectory
from milescli.data.chat_masks import unsampled_trajectory
from milescli.data.example_rows import CHOSEN, REJECTED, Kind, RowField
from milescli.data.examples import ExampleReport, load_examples
from milescli.data.file_rows import FileRows, describe_row, evenly_spread_places
from milescli.data.images import ANY_MODEL_IMAGES, PromptImages
from milescli.data.layouts import use_of
from milescli.data.mixed_prompts import data_of_source
from milescli.data.prompt_source import (
    LoadedPrompts,
    load_files,
    parse_file_name,
    prompt_row_parser,
)
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tables import Table, check_file
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models import ModelFacts, load_facts, scratch
from milescli.models.base import CONFIG_NAME
from milescli.recipe.agents import Role
from milescli.recipe.data import Data
from milescli.recipe.data_files import FIELDS, names_in
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.episode.roles import conversation_of, roles_of
from milescli.rollout.rewards import needs_label
from milescli.runtime.inputs.auxiliary_models import checkpoint_of, is_checkpoint
from milescli.runtime.inputs.checks import INPUTS, CheckSubject, Outcome, run_checks
from milescli.runtime.inputs.data_files import (
    check_labels_of,
    kind_of_rows,
    require_files,
    rollouts_of,
    texts_for_vocabulary,
    with_foreign_tasks,
    with_local_files,
    worked_trajectories,
)
from milescli.runtime.inputs.file_reports import (
    NUM_MEASURED,
    NUM_SHOWN,
    FileReport,
    ImageReport,
    find_duplicates,
    first_row,
    gap_words,
    read_rows,
    report_example_files,
    report_file,
    report_images,
    report_unread_file,
)
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.inputs.run_data import prompts_need_label, require_hinted
from milescli.runtime.inputs.run_inputs import stop_ids_of_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Holds one prompt as the model sees it, token by token."""

    place: str
    """Location of its row: `row 3 of train.jsonl`."""
    tokens: list[str]
    loss_mask: list[int]
    """[num_tokens] 1 for tokens that are learned, as in a demonstration's response. A prompt has no
    response yet."""
    side: str = ""
    """chosen or rejected, for a pair; the name of the role, in an episode of several."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Describes the files that one key of the recipe, or one source of its mix, names."""

    name: str
    """prompts, eval, demonstrations, train, validation; or the name of a source of the mix."""
    data: Data
    named: list[str]
    """The files as the user names them."""
    field: str
    rollout: Rollout | None
    """How the prompts are scored; None if that is not known."""
    needs_label: bool | None = None
    """None: not known; a label that could be either of two columns is then a problem."""
    num_graded: int | None = None
    """So many of the prompts are scored; None: all."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The roles of its episodes, if there are several."""
    files: list[FileReport] = field(default_factory=list)
    kind: Kind | None = None
    """Kind of the training rows; None for prompts."""
    loaded: LoadedPrompts | None = None
    """The prompts; None without a tokenizer, or if rows are bad."""
    examples: Sequence[Trajectory | Pair] = ()
    """Rows to train on."""
    report: ExampleReport | None = None
    """The report on `examples`."""
    images: ImageReport | None = None
    """The images of its rows; None if there are none, or without a tokenizer."""
    rendered: list[Rendered] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class DataCheck:
    """Holds the findings of a check."""

    parts: list[Part]
    problems: list[MilesError] = field(default_factory=list)
    """Errors with which a run would be refused."""
    warnings: list[str] = field(default_factory=list)
    checked: list[Outcome] = field(default_factory=list)
    """Results of the table of comparisons; empty for a file alone."""


def check_file_alone(
    name: str,
    *,
    prompt_key: str | None,
    label_key: str | None,
    model: Path | None,
    output: Output,
    settings: Mapping[str, Any] | None = None,
) -> DataCheck:
    """Check a file, data set or task that no recipe names. `model`: a folder with a tokenizer;
    None: lengths are in characters; `settings`: further keys of `data`."""
    keys = {"prompt_key": prompt_key, "label_key": label_key, **(settings or {})}
    data = Data(prompts=name, **keys)
    with _scratch_run() as run:
        data = with_local_files(data, run, 0, output=output)
        tokenizer = load_tokenizer(model, chat_template=data.chat_template) if model else None
        part = Part(name="prompts", data=data, named=[name], field="prompts", rollout=None)
        if (kind := _kind_of(data)) is not None:
            learned = data.model_copy(update={"train": data.prompts, "prompts": None})
            part = Part(
                name="train", data=learned, named=[name], field="train", rollout=None, kind=kind
            )
        return _check_parts([part], tokenizer, run=run, seed=0, output=output)


def _kind_of(data: Data) -> Kind | None:
    """Guess by the first row what a file of unknown use holds: pairs, chats and answered prompts
    are learned from; None: its rows are prompts."""
    if data.label_key is not None:
        return None
    file = parse_file_name(names_in(data.prompts)[0], key="data.prompts")
    check_file(Path(file.name), field="prompts")
    use = use_of(first_row(Table(Path(file.name))))
    return None if use == "prompts" else use


def check_recipe(recipe: Recipe, *, model: Path | None, output: Output) -> DataCheck:
    """Check all data of a recipe, with its reward and its model's tokenizer, or the tokenizer in
    `model`."""
    require_files(recipe.data)
    facts = _facts(recipe, model)
    with _scratch_run() as run:
        data = with_foreign_tasks(recipe.data, recipe.rollout, run)
        data = with_local_files(data, run, recipe.run.seed, output=output)
        folder = model or _tokenizer_folder(recipe, data, run)
        tokenizer = load_tokenizer(
            folder,
            chat_template=recipe.data.chat_template,
            tools=offered_tools(recipe.rollout),
        )
        tokenizer.num_embeddings = facts.vocab_size if facts is not None else None
        checked = _check_parts(
            list(_parts(recipe, data)),
            tokenizer,
            run=run,
            seed=recipe.run.seed,
            output=output,
        )
        _compare(checked, recipe, tokenizer, facts, output=output)
        return checked


def _facts(recipe: Recipe, model: Path | None) -> ModelFacts | None:
    """Return the facts of the recipe's model, or of the folder `model`, which may be a tokenizer
    alone."""
    if model is None:
        return planned_facts(recipe)
    return load_facts(model) if (model / CONFIG_NAME).is_file() else None


_PART_BY_PART = ("labels",)
"""Checks of the table that are made for each part, so that all problems are shown."""


def _compare(
    check: DataCheck,
    recipe: Recipe,
    tokenizer: ChatTokenizer,
    facts: ModelFacts | None,
    *,
    output: Output,
) -> None:
    """Make the checks of a run, and add the outcomes to `check`."""
    loaded = [(part, part.loaded.source) for part in check.parts if part.loaded]
    for part in check.parts:
        if part.field == "prompts" and part.loaded is not None and not recipe.data.mix:
            try:
                require_hinted(recipe, part.loaded.report)
            except DataError as error:
                check.problems.append(error)
    subject = CheckSubject(
        recipe=recipe,
        facts=facts,
        tokenizer=tokenizer,
        own_stop_ids=stop_ids_of_turns(tokenizer, tokenizer.folder)
        if recipe.model.scratch is None and facts is not None
        else (),
        trained=[
            (source, part.rollout)
            for part, source in loaded
            if part.field == "prompts" and part.rollout is not None
        ],
        heldout=next((source for part, source in loaded if part.field == "eval"), None),
        rows=[row for part in check.parts if part.field == "train" for row in part.examples],
        output=output,
        missing={} if facts else {"facts": f"{tokenizer.folder} has no {CONFIG_NAME}"},
    )
    for made in run_checks([one for one in INPUTS if one.name not in _PART_BY_PART], subject):
        check.checked.append(made)
        check.warnings += made.doubts
        check.problems += [made.refusal] if made.refusal else []


@contextmanager
def _scratch_run() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory(prefix="miles-data-") as folder:
        yield RunDir(path=Path(folder))


def _tokenizer_folder(recipe: Recipe, data: Data, run: RunDir) -> Path:
    model = recipe.model
    if model.scratch is not None:
        texts = texts_for_vocabulary(recipe, data, run)
        sees_images = model.scratch.family == "qwen2_5_vl"
        if sees_images:
            scratch.write_config(model.scratch, run.own_model_dir)
        return make_scratch_tokenizer(
            texts, model.scratch.vocab_size, run.own_model_dir, sees_images=sees_images
        )
    folder = Path(model.path or "").expanduser()
    if is_checkpoint(folder):
        return checkpoint_of(folder).model_dir
    if folder.is_dir():
        return folder
    from milescli.backends.hub.models import fetch_tokenizer

    return fetch_tokenizer(str(model.path), revision=model.revision)


def _parts(recipe: Recipe, data: Data) -> Iterator[Part]:
    mixes = zip(recipe.data.mix or [], data.mix or [], rollouts_of(recipe)[1:], strict=True)
    for named, source, rollout in mixes:
        yield Part(
            name=source.called,
            data=data_of_source(data, source),
            named=names_in(named.path),
            field="prompts",
            rollout=rollout,
            needs_label=prompts_need_label(recipe, rollout, source=source.called),
            roles=roles_of(rollout),
        )
    for name in FIELDS:
        if getattr(data, name) is not None:
            yield Part(
                name=name,
                data=data,
                named=names_in(getattr(recipe.data, name)),
                field=name,
                rollout=None if name == "demonstrations" else recipe.rollout,
                needs_label=name != "demonstrations"
                and (
                    prompts_need_label(recipe, recipe.rollout)
                    if name == "prompts"
                    else needs_label(recipe.rollout)
                ),
                num_graded=recipe.eval.num_prompts if name == "eval" else None,
                roles=roles_of(recipe.rollout),
                kind=kind_of_rows(recipe) if name in ("train", "validation") else None,
            )


def _check_parts(
    parts: list[Part],
    tokenizer: ChatTokenizer | None,
    *,
    run: RunDir,
    seed: int,
    output: Output,
) -> DataCheck:
    check = DataCheck(parts=parts)
    for part in parts:
        if part.kind is not None:
            _check_rows(part, part.kind, tokenizer, check, folder=run.path)
            continue
        try:
            part.files, files = report_prompt_files(
                part.data,
                part.field,
                needs_label=part.needs_label,
                with_lengths=tokenizer is None,
                folder=run.path,
                output=output,
                images=tokenizer.images if tokenizer is not None else ANY_MODEL_IMAGES,
            )
            check.problems += [look.problem for look in part.files if look.problem]
            check.warnings += [
                f"labels of {look.path} are read as text: {', '.join(look.words)}; a row without "
                "a label has an empty one"
                for look in part.files
                if look.words
            ]
            check.warnings += _unknown_without_model(part) if tokenizer is None else []
            if tokenizer is None or any(look.problem for look in part.files):
                continue
            part.loaded = load_files(
                files, part.data, tokenizer=tokenizer, seed=seed, report_progress=output.note
            )
        except DataError as error:
            check.problems.append(error)
            continue
        measured = part.loaded.source.evenly_spread(NUM_MEASURED)
        part.images = report_images([*each.images, *each.worked_images] for each in measured)
        try:
            if part.field == "demonstrations":
                worked_trajectories(measured, tokenizer, roles=part.roles, files=files)
            for prompt in measured[:NUM_SHOWN]:
                part.rendered += render_prompt(
                    prompt, tokenizer, field=part.field, roles=part.roles, files=files
                )
        except DataError as error:
            check.problems.append(error)
        if part.rollout is not None:
            source = part.loaded.source
            graded = None if part.num_graded is None else source.first(part.num_graded)
            try:
                check_labels_of(part.rollout, source, graded, output=output)
            except MilesError as error:
                check.problems.append(error)
    return check


def _unknown_without_model(part: Part) -> list[str]:
    """Return warnings that list what cannot be checked without a model."""
    return [
        f"{look.path} has images: only models that accept images can use it, and `--model "
        "FOLDER` counts their tokens"
        for look in part.files
        if look.has_images
    ]


def _check_rows(
    part: Part,
    kind: Kind,
    tokenizer: ChatTokenizer | None,
    check: DataCheck,
    *,
    folder: Path,
) -> None:
    """Read the rows of `data.train` or `data.validation` as a run does, and add the findings to
    `check`."""
    key: RowField = part.field  # type: ignore[assignment]
    try:
        sees = tokenizer.images if tokenizer is not None else ANY_MODEL_IMAGES
        part.files = report_example_files(part.data, key, kind=kind, folder=folder, images=sees)
        check.problems += [look.problem for look in part.files if look.problem]
        check.warnings += _unknown_without_model(part) if tokenizer is None else []
        if tokenizer is None or any(look.problem for look in part.files):
            return
        part.examples, part.report = load_examples(
            part.data,
            key,
            kind=kind,
            tokenizer=tokenizer,
            folder=folder,
        )
    except DataError as error:
        check.problems.append(error)
        return
    part.images = report_images(
        side.images
        for row in part.examples[:NUM_MEASURED]
        for side in ((row,) if isinstance(row, Trajectory) else row.sides[:1])
    )
    part.rendered = list(render_rows(part.examples, tokenizer, places=part.report.first))


def report_prompt_files(
    data: Data,
    field: str,
    *,
    needs_label: bool | None,
    with_lengths: bool,
    folder: Path,
    output: Output,
    images: PromptImages | None = None,
) -> tuple[list[FileReport], list[FileRows]]:
    """Read each file that `data.<field>` names, and report bad rows. `folder`: where Arrow files
    are written; `images`: how the model sees them. Raises DataError if a file has no rows, or lacks
    the columns."""
    form = prompt_row_parser(data, field, needs_label=needs_label, images=images)  # type: ignore[arg-type]
    reports, files, first_index = list[FileReport](), list[FileRows](), 0
    for name in names_in(getattr(data, field)):
        file = parse_file_name(name, key=f"data.{field}")
        check_file(Path(file.name), field=field)
        table = Table(Path(file.name))
        first = first_row(table)
        try:
            rows = read_rows(
                table, file, form, folder=folder, first_index=first_index, output=output
            )
        except DataError as error:
            reports.append(report_unread_file(file, first, error))
            continue
        look = report_file(rows, first)
        if look.problem is None:
            look.num_duplicates, look.duplicates = find_duplicates(rows)
            if with_lengths:
                sample = rows.read(evenly_spread_places(len(rows), NUM_MEASURED))
                look.lengths = sorted(len(row.text) for row in sample if row.messages)
            look.words = gap_words(rows)
        reports.append(look)
        files.append(rows)
        first_index += rows.last_line
    return reports, files


def render_prompt(
    prompt: Prompt,
    tokenizer: ChatTokenizer,
    *,
    field: str,
    roles: Mapping[str, Role],
    files: Sequence[FileRows],
) -> list[Rendered]:
    """Render a prompt as text, token by token; a demonstration with its response. In an episode of
    several `roles`, render the conversation of each role of a worked episode, and a prompt as the
    first role sees it. Raises as `worked_trajectories`."""
    lines = {"": unsampled_trajectory(prompt.token_ids, bytes(len(prompt.token_ids)))}
    worked = field == "demonstrations" and prompt.demonstration is not None
    if worked:
        lines = worked_trajectories([prompt], tokenizer, roles=roles, files=files)[prompt.index]
    elif roles:
        first = next(iter(roles))
        text = tokenizer.render(conversation_of(first, roles, prompt=prompt, turns=()))
        ids = tokenizer.encode_text(text)
        lines = {first: unsampled_trajectory(ids, bytes(len(ids)))}
    return [
        Rendered(
            place=describe_row(prompt.index, files),
            tokens=tokenizer.pieces(line.token_ids.tolist()),
            loss_mask=list(line.loss_mask),
            side=side,
        )
        for side, line in lines.items()
    ]


def histogram(lengths: Sequence[int], *, most: int = 8) -> list[tuple[int, int, int]]:
    """Return (from, up to, how many) of at most `most` ranges of equal width. `lengths` must be in
    ascending order."""
    least = lengths[0]
    width = (lengths[-1] - least) // most + 1
    counts = Counter((length - least) // width for length in lengths)
    return [
        (least + n * width, least + (n + 1) * width - 1, counts[n]) for n in range(max(counts) + 1)
    ]


def render_rows(
    rows: Sequence[Trajectory | Pair], tokenizer: ChatTokenizer, *, places: Sequence[str]
) -> Iterator[Rendered]:
    """Yield the first sequences that are trained on, rendered token by token; both sides of a pair.
    `places`: the locations of their rows."""
    for place, row in zip(places, rows, strict=False):
        sides = {"": row} if isinstance(row, Trajectory) else _sides(row)
        for name, side in sides.items():
            yield Rendered(
                place=place,
                side=name,
                tokens=tokenizer.pieces(list(side.token_ids)),
                loss_mask=list(side.loss_mask),
            )


def _sides(pair: Pair) -> dict[str, Trajectory]:
    both = {CHOSEN: pair.chosen, REJECTED: pair.rejected}
    return {name: side for name, side in both.items() if side is not None}
