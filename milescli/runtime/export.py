"""Implements `miles export`: writes a run, a checkpoint, a converted model, a Hugging Face folder
or a LoRA adapter as a Hugging Face folder. Needs no device and no port. Finds the weights and
reports what was written; the package `export` does the work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from milescli.backends.hub.push import Hub
from milescli.checkpoint.base import CRITIC_PART, METADATA_NAME, TRACKER_NAME, is_converted
from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.checkpoint.source import open_source
from milescli.checkpoint.store import PREFIX
from milescli.checkpoint.torch_dist.weights import read_hf_tensors
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.conversion.source import find_checkpoint, find_model
from milescli.core.errors import CheckpointError, DataError
from milescli.core.files import read_json
from milescli.data.chat_masks import turn_end_ids
from milescli.data.tokenizer import (
    GENERATION_CONFIG,
    configured_template,
    engine_stop_ids,
    load_tokenizer,
)
from milescli.export.adapter import (
    PLAIN_OF,
    Adapter,
    merged,
    named_as_first,
    read_adapter,
    read_merged,
    read_trained_adapter,
    unties_embeddings,
)
from milescli.export.adapter_folder import write_adapter_folder
from milescli.export.card import model_card
from milescli.export.folder import (
    Choose,
    Deliver,
    ReadTensors,
    WrittenFolder,
    refuse_existing,
    write_folder,
)
from milescli.export.peft import is_adapter
from milescli.export.provenance import Provenance, hub_name, read_provenance
from milescli.export.stored import read_folder
from milescli.models import load_facts
from milescli.models import table as table_of
from milescli.models.base import CONFIG_NAME, WeightTable
from milescli.models.layers import EMBEDDING
from milescli.models.precision import Choice, Quantised, choose
from milescli.plan.precision import quantised
from milescli.plan.types import Plan
from milescli.recipe.model import Model
from milescli.recipe.resolved import load_resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """Holds the result of an export."""

    path: str
    format: str
    step: int | None
    """RL steps of the run that trained the weights; None if no run did."""
    num_parameters: int
    size_bytes: int
    num_quantised: int | None
    """Number of matrices in the quantised format; None if nothing is quantised."""
    relative_error: float | None
    """Error of the quantised weights, read back: root mean square of the differences to bfloat16,
    relative to the weights'."""
    worst_share_of_bound: float | None
    """The largest difference, as a fraction of the bound of the format's rounding."""
    copied: list[str]
    """Parts of the base model that were not trained."""
    notes: list[str]
    pushed: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Describes the weights that are exported."""

    base: Path
    """Folder with config, tokenizer and untrained parts."""
    open: Callable[[ExitStack], ReadTensors]
    """Opens its files, which the stack closes, and returns a reader of its tensors."""
    what: str
    """Name for people."""
    checkpoint: Path | None = None
    """Folder of its tensors, if it is a checkpoint."""
    provenance: Provenance | None = None
    base_model: str | None = None
    """Name on the hub of the original model, if `provenance` is None."""
    adapter: Adapter | None = None
    """Adapter that a run trained over `base`; `open` returns both merged."""
    is_untied: bool = False
    """True if the output layer is tied in `base` and not in these weights."""


def export_weights(
    subject: Path,
    *,
    to: Path,
    format: str | None,
    step: int | None,
    role: Literal["policy", "critic"] = "policy",
    base: Path | None,
    merge: bool,
    push: str | None,
    private: bool,
    output: Output,
    deliver: Deliver | None = None,
) -> ExportSummary:
    """Write `subject` to the folder `to`, which must not exist or must be empty. `format`: None: as
    the base model's config.json says. `role`: which of a run's models. `base`: the model of an
    adapter, or of a checkpoint that has no config. `push`: ORG/NAME on the hub. `deliver` receives
    the files of weights one by one (`write_folder`); with `push`, all are written first."""
    began = time.monotonic()
    refuse_existing(to)
    hub = Hub(push) if push else None
    if is_adapter(subject) and not merge:
        summary = _export_adapter(read_adapter(subject), to=to, base=base, format=format)
    else:
        weights = _find(subject, step=step, base=base, output=output)
        if merge and not is_adapter(subject) and weights.adapter is None:
            raise CheckpointError(
                f"`{subject}` is not an adapter",
                why="--merge merges a LoRA adapter into its base model",
                fix="remove --merge",
            )
        if role == "critic":
            weights = _critic_weights(weights, subject)
        if weights.adapter is not None and not merge:
            output.note(f"reading {weights.what}")
            summary = _export_adapter(weights.adapter, to=to, base=base, format=format)
            summary = replace(summary, step=weights.provenance.step if weights.provenance else None)
        else:
            own = deliver if hub is None else None
            summary = _export_model(weights, to=to, format=format, output=output, deliver=own)
    url = None
    if hub is not None:
        output.note(
            f"uploading to {hub.repo} as {hub.user}, creating it as "
            f"{'private' if private else 'public'} if it does not exist"
        )
        url = hub.push(
            to,
            private=private,
            message=f"Exported by miles as {summary.format}",
            show_progress=output.is_interactive,
        )
    return replace(summary, pushed=url, seconds=time.monotonic() - began)


def _export_model(
    weights: _Weights, *, to: Path, format: str | None, output: Output, deliver: Deliver | None
) -> ExportSummary:
    facts = load_facts(weights.base)
    if weights.is_untied:
        facts = replace(facts, tied_embeddings=False)
    table = table_of(facts)
    output.note(f"reading {weights.what}")

    def card(folder: WrittenFolder) -> dict[str, str]:
        name = to.resolve().name
        made = model_card(
            folder,
            table=table,
            base=weights.base,
            name=name,
            provenance=weights.provenance,
            base_model=weights.base_model,
        )
        ends = _own_generation_config(weights.base, weights.provenance)
        return {**made, **_own_template(weights.provenance, output), **ends}

    def watch(total_bytes: int) -> Transfer:
        doing = f"writing {to.name} and reading it back"
        doing += ", and uploading each file" if deliver is not None else ""
        return Transfer(output, label=doing, total=total_bytes)

    with ExitStack() as open_files:
        chosen = format or PLAIN_OF[facts.dtype]
        done = write_folder(
            to,
            table=table,
            read=weights.open(open_files),
            base=weights.base,
            format=chosen,
            card=card,
            watch=watch,
            choose=_choices_of(weights),
            deliver=deliver,
        )
    notes = [*done.notes]
    if not any(file for pattern in _VOCABULARIES for file in weights.base.glob(pattern)):
        notes.append(
            f"the export has no tokenizer, because {weights.base} has none; to serve it, copy the "
            f"model's tokenizer files into {to}"
        )
    for note in notes:
        output.warn(note)
    if done.copied:
        output.note(
            f"these weights were not trained and come from the base model: {'; '.join(done.copied)}"
        )
    measured = done.measured
    return ExportSummary(
        path=str(to),
        format=done.format,
        step=weights.provenance.step if weights.provenance else None,
        num_parameters=table.num_parameters,
        size_bytes=sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
        + (done.size_bytes if deliver is not None else 0),
        num_quantised=measured.num_quantised or None,
        relative_error=measured.relative_error if measured.num_quantised else None,
        worst_share_of_bound=measured.worst_share_of_bound if measured.num_quantised else None,
        copied=list(done.copied),
        notes=notes,
        pushed=None,
        seconds=0.0,
    )


_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""Files of which a tokenizer has at least one."""


def _choices_of(weights: _Weights) -> Choose:
    """Return the function that chooses which tensors are quantised: for the format of a run, the
    choices of its trainer and engines."""
    provenance = weights.provenance
    if provenance is None or weights.checkpoint is None:
        return choose
    run = RunDir(weights.checkpoint.absolute().parents[1])
    if not run.plan_file.is_file():
        return choose
    plan = Plan.read(run.plan_file)

    def choose_as_trained(table: WeightTable, form: Quantised) -> Mapping[str, Choice]:
        if form not in (plan.trainer_format, plan.engine_format):
            return choose(table, form)
        exempt = provenance.recipe.train.exempt
        return quantised(table, form, (plan.trainer, plan.engines), exempt)

    return choose_as_trained


def _own_template(provenance: Provenance | None, output: Output) -> dict[str, str]:
    """Return file name -> text of the chat template that a run used instead of its model's: users
    of the export must prompt as the run did. Empty if there is none."""
    if provenance is None:
        return {}
    try:
        template = configured_template(provenance.recipe.data.chat_template)
    except DataError as error:
        output.warn(
            f"the export does not contain the run's chat template: {error.what}: {error.why}"
        )
        return {}
    return {} if template is None else {"chat_template.jinja": template}


def _own_generation_config(base: Path, provenance: Provenance | None) -> dict[str, str]:
    """Return generation_config.json with the tokens that a run taught to end a turn, if the base
    model's does not name them: servers of the export must stop there, as the run did."""
    if provenance is None:
        return {}
    try:
        tokenizer = load_tokenizer(base, chat_template=provenance.recipe.data.chat_template)
    except DataError:
        return {}
    stops = engine_stop_ids(base)
    own = turn_end_ids(tokenizer) - stops
    if not own:
        return {}
    file = base / GENERATION_CONFIG
    config = read_json(file) if file.is_file() else {}
    config["eos_token_id"] = [*sorted(stops), *sorted(own)]
    return {GENERATION_CONFIG: json.dumps(config, indent=2) + "\n"}


def _export_adapter(
    adapter: Adapter, *, to: Path, base: Path | None, format: str | None
) -> ExportSummary:
    if format is not None:
        raise CheckpointError(
            f"an adapter cannot be written as {format}",
            why="miles does not change the number format of an adapter's matrices",
            fix="--merge   # to merge it into its base model",
        )
    notes = write_adapter_folder(
        to, replace(adapter, base_model=str(base) if base else adapter.base_model)
    )
    return ExportSummary(
        path=str(to),
        format="adapter",
        step=None,
        num_parameters=adapter.num_parameters,
        size_bytes=sum(file.stat().st_size for file in to.iterdir()),
        num_quantised=None,
        relative_error=None,
        worst_share_of_bound=None,
        copied=[],
        notes=list(notes),
        pushed=None,
        seconds=0.0,
    )


def _find(path: Path, *, step: int | None, base: Path | None, output: Output) -> _Weights:
    """Find the weights at `path`. Raises CheckpointError if it has no weights."""
    marks = (RECIPE_FILE, METADATA_NAME, TRACKER_NAME)
    is_checkpoint = any((path / mark).is_file() for mark in marks)
    if not is_checkpoint and step is not None:
        raise CheckpointError(
            f"`{path}` has no steps",
            why="--step selects a checkpoint of a run",
            fix="remove --step",
        )
    if is_adapter(path):
        return _adapter_weights(path, base=base, output=output)
    if not is_checkpoint and (path / CONFIG_NAME).is_file():
        return _folder_weights(path)
    return _checkpoint_weights(path, step=step, base=base, output=output)


def _checkpoint_weights(
    path: Path, *, step: int | None, base: Path | None, output: Output
) -> _Weights:
    checkpoint = find_checkpoint(path, model=base, step=step, model_option="--base", output=output)
    weights = _Weights(
        base=checkpoint.model_dir,
        open=lambda _: lambda table: read_hf_tensors(checkpoint.tensors, table),
        checkpoint=checkpoint.tensors,
        provenance=_provenance(checkpoint.tensors),
        what=checkpoint.what,
    )
    adapter = read_trained_adapter(checkpoint.tensors, base=weights.base)
    if adapter is None:
        return weights
    return replace(
        weights,
        open=lambda _: lambda table: read_merged(weights.base, adapter, table),
        adapter=adapter,
        what=f"adapter of {weights.what}",
    )


def _critic_weights(weights: _Weights, subject: Path) -> _Weights:
    """Return the critic that was saved beside a policy."""
    tensors = weights.checkpoint / CRITIC_PART if weights.checkpoint else None
    if tensors is None or not tensors.is_dir():
        raise CheckpointError(
            f"`{subject}` has no critic",
            why="a run trains a critic if its recipe sets train.credit=gae (train.algorithm=ppo)",
            fix="remove --role",
        )
    run = RunDir(tensors.absolute().parents[2])
    return replace(
        weights,
        base=run.critic_model_dir,
        open=lambda _: lambda table: read_hf_tensors(tensors, table),
        adapter=None,
        what=f"critic of {weights.what}",
    )


def _folder_weights(folder: Path) -> _Weights:
    def opened(open_files: ExitStack) -> ReadTensors:
        source = open_files.enter_context(open_source(folder))
        on_disk = table_of(load_facts(folder)).as_on_disk(source.names(), source.shape)
        return lambda table: read_folder(source, table, on_disk=on_disk)

    return _Weights(base=folder, open=opened, what=f"Hugging Face folder {folder}")


def _adapter_weights(path: Path, *, base: Path | None, output: Output) -> _Weights:
    adapter = read_adapter(path)
    if base is None and adapter.base_model is None:
        raise CheckpointError(
            f"`{path}` does not name its base model",
            why="`base_model_name_or_path` is empty",
            fix="--base DIR",
        )
    name = str(base or adapter.base_model)
    folder = Path(name).expanduser()
    if is_converted(folder):
        below = _checkpoint_weights(folder, step=None, base=None, output=output)
    else:
        below = _folder_weights(find_model(name, revision=None, output=output).absolute())

    facts = load_facts(below.base)
    adapter = named_as_first(adapter, table_of(facts))
    embedding = table_of(facts).by_megatron[EMBEDDING.megatron].hf[0]
    tied_to = embedding if facts.tied_embeddings else None
    is_untied = tied_to is not None and unties_embeddings(adapter, tied_to)
    first = table_of(replace(facts, tied_embeddings=False) if is_untied else facts)

    def opened(open_files: ExitStack) -> ReadTensors:
        read = below.open(open_files)
        return lambda table: merged(read, adapter, first=first, wanted=table, tied_to=tied_to)

    return _Weights(
        base=below.base,
        open=opened,
        is_untied=is_untied,
        base_model=hub_name(Model(path=name)),
        what=f"adapter {path} over {folder if folder.is_dir() else below.base}",
    )


def _provenance(tensors: Path) -> Provenance | None:
    """Return the provenance of a checkpoint that lies in a run, for its model card."""
    run = RunDir(tensors.absolute().parents[1])
    if not run.recipe_file.is_file() or not tensors.name.startswith(PREFIX):
        return None
    recipe = load_resolved(run.recipe_file).recipe
    step = int(tensors.name.removeprefix(PREFIX))
    return read_provenance(
        recipe=recipe, step=step, manifest=run.manifest_file, events=run.events_file
    )
