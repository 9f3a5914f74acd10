"""`miles data check`: what a run would see of its data. Reads, and makes nothing that stays; called
by the command."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError, MilesError
from milescli.recipe.data import Data
from milescli.recipe.data_files import FIELDS, names_in
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.leaks import exact_leaks
from milescli.rollout.mapped import row_named
from milescli.rollout.rewards import needs_label
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.source import Loaded, load_part
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer
from milescli.runtime.data_inputs import (
    check_labels_of,
    near_leaks_told,
    require_files,
    rollouts_of,
    texts_for_vocabulary,
    with_local_files,
)
from milescli.runtime.data_look import NUM_SHOWN, FileLook, Rendered, look_at, rendered

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(slots=True, kw_only=True)
class Part:
    """What one key of the recipe, or one source of its mix, names."""

    name: str
    """prompts, eval, demonstrations; or how the source of the mix is called."""
    data: Data
    named: list[str]
    """Its files as the user says them."""
    field: str
    rollout: Rollout | None
    """How its prompts are scored; None: not known."""
    files: list[FileLook] = field(default_factory=list)
    loaded: Loaded | None = None
    """None without a tokenizer, and where rows are bad."""
    rendered: list[Rendered] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class DataCheck:
    """What was found."""

    parts: list[Part]
    problems: list[MilesError] = field(default_factory=list)
    """For which a run would be refused."""
    warnings: list[str] = field(default_factory=list)


def check_file_alone(
    name: str,
    *,
    prompt_key: str | None,
    label_key: str | None,
    model: Path | None,
    output: Output,
) -> DataCheck:
    """A file, data set or task that no recipe names. `model`: a folder with a tokenizer; None:
    lengths are in characters."""
    data = Data(prompts=name, prompt_key=prompt_key, label_key=label_key)
    with _made_here() as run:
        data = with_local_files(data, run, 0, output=output)
        tokenizer = load_tokenizer(model) if model else None
        part = Part(name="prompts", data=data, named=[name], field="prompts", rollout=None)
        return _checked([part], tokenizer, run=run, seed=0, num_heldout=None, output=output)


def check_recipe(recipe: Recipe, *, model: Path | None, output: Output) -> DataCheck:
    """All data of a recipe, with its reward and its model's tokenizer, or that in `model`."""
    require_files(recipe.data)
    with _made_here() as run:
        data = with_local_files(recipe.data, run, recipe.run.seed, output=output)
        folder = model or _tokenizer_folder(recipe, data, run)
        tokenizer = load_tokenizer(folder, chat_template=recipe.data.chat_template)
        return _checked(
            list(_parts(recipe, data)),
            tokenizer,
            run=run,
            seed=recipe.run.seed,
            num_heldout=recipe.eval.num_prompts,
            output=output,
        )


@contextmanager
def _made_here() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory(prefix="miles-data-") as folder:
        yield RunDir(path=Path(folder))


def _tokenizer_folder(recipe: Recipe, data: Data, run: RunDir) -> Path:
    model = recipe.model
    if model.scratch is not None:
        texts = texts_for_vocabulary(recipe, data, run)
        return make_scratch_tokenizer(texts, model.scratch.vocab_size, run.own_model_dir)
    folder = Path(model.path or "").expanduser()
    if folder.is_dir():
        return folder
    from milescli.backends.hub.models import fetch_tokenizer

    return fetch_tokenizer(str(model.path), revision=model.revision)


def _parts(recipe: Recipe, data: Data) -> Iterator[Part]:
    mixes = zip(recipe.data.mix or [], data.mix or [], rollouts_of(recipe)[1:], strict=True)
    for named, source, rollout in mixes:
        changes = {
            "prompts": source.path,
            "prompt_key": source.prompt_key or data.prompt_key,
            "label_key": source.label_key or data.label_key,
        }
        mixed = data.model_copy(update=changes)
        yield Part(
            name=source.called,
            data=mixed,
            named=names_in(named.path),
            field="prompts",
            rollout=rollout,
        )
    for name in FIELDS:
        if getattr(data, name) is not None:
            yield Part(
                name=name,
                data=data,
                named=names_in(getattr(recipe.data, name)),
                field=name,
                rollout=None if name == "demonstrations" else recipe.rollout,
            )


def _checked(
    parts: list[Part],
    tokenizer: ChatTokenizer | None,
    *,
    run: RunDir,
    seed: int,
    num_heldout: int | None,
    output: Output,
) -> DataCheck:
    check = DataCheck(parts=parts)
    for part in parts:
        wants = part.rollout is not None and needs_label(part.rollout)
        try:
            part.files = look_at(
                part.data,
                part.field,
                needs_label=wants,
                with_lengths=tokenizer is None,
                folder=run.path,
                output=output,
            )
            check.problems += [look.problem for look in part.files if look.problem]
            if tokenizer is None or any(look.problem for look in part.files):
                continue
            part.loaded = load_part(
                part.data,
                part.field,  # type: ignore[arg-type]
                tokenizer=tokenizer,
                seed=seed,
                base_dir=run.path,
                needs_label=wants,
                say=output.note,
            )
        except DataError as error:
            check.problems.append(error)
            continue
        shown = part.loaded.source.some(NUM_SHOWN)[:NUM_SHOWN]
        part.rendered = [rendered(prompt, tokenizer, field=part.field) for prompt in shown]
        if part.rollout is not None:
            try:
                check_labels_of(part.rollout, part.loaded.source, None, output=output)
            except MilesError as error:
                check.problems.append(error)
    _hold_against_each_other(check, num_heldout, output=output)
    return check


def _hold_against_each_other(check: DataCheck, num_heldout: int | None, *, output: Output) -> None:
    """Held-out prompts against all that is trained on."""
    loaded = [(part, part.loaded.source) for part in check.parts if part.loaded]
    heldout = next((source for part, source in loaded if part.field == "eval"), None)
    if heldout is None:
        return
    graded = heldout.first(num_heldout)
    for part, source in loaded:
        if part.field != "prompts":
            continue
        if leaks := exact_leaks(heldout, source, num_heldout=num_heldout):
            pairs = [
                f"{row_named(leak.heldout, heldout.files)} is "
                f"{row_named(leak.prompts, source.files)}"
                for leak in leaks
            ]
            more = f"; and {len(pairs) - NUM_SHOWN} more" if len(pairs) > NUM_SHOWN else ""
            check.problems.append(
                DataError(
                    f"{len(leaks)} held-out prompts are training prompts too",
                    why="; ".join(pairs[:NUM_SHOWN]) + more,
                    fix="--set data.eval=FILE with other prompts",
                )
            )
        elif told := near_leaks_told(heldout, graded, source, output=output):
            check.warnings.append(told)
