"""The model card of an exported folder: README.md with the hub's front matter, and the reward curve
beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from milescli import __version__
from milescli.core.files import parse_yaml, read_regular_text
from milescli.core.private import without_private
from milescli.core.units import format_bytes, format_count
from milescli.export.folder import WrittenFolder
from milescli.export.provenance import Provenance
from milescli.export.reward_curve import reward_curve
from milescli.models.base import WeightTable, read_config
from milescli.recipe.schema import Recipe

CARD_NAME, CURVE_NAME = "README.md", "reward.svg"
_FORMATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "FP8 (e4m3) with a float32 scale for each 128 x 128 block",
    "mxfp8": "MXFP8: e4m3 with an E8M0 scale for each 32 numbers of a row",
    "int4": "INT4 (compressed-tensors W4A16), symmetric, a bfloat16 scale for each 32 numbers of a "
    "row",
    "nvfp4": "NVFP4 (weights alone): e2m1 with an e4m3 scale for each 16 numbers of a row and a "
    "float32 scale for each tensor",
    "mxfp4": "MXFP4: e2m1 with an E8M0 scale for each 32 numbers of a row",
}


def model_card(
    folder: WrittenFolder,
    *,
    table: WeightTable,
    base: Path,
    name: str,
    provenance: Provenance | None,
    base_model: str | None = None,
) -> dict[str, str]:
    """Return file name -> text: the card, and the curve if there is one. `base` is the folder of
    config and tokenizer. `provenance` None means that the weights come from no run of miles;
    `base_model` is then their origin on the hub."""
    files = {}
    if provenance is not None and (provenance.rewards or provenance.evals):
        accuracies = [(point.step, point.accuracy) for point in provenance.evals]
        files[CURVE_NAME] = reward_curve(
            provenance.rewards, accuracies, title=f"{name}: reward by step"
        )
    parts = [
        _front_matter(folder, base=base, provenance=provenance, base_model=base_model),
        *_body(folder, table=table, name=name, provenance=provenance, files=files),
    ]
    files[CARD_NAME] = without_private("\n\n".join(parts) + "\n")
    return files


def _front_matter(
    folder: WrittenFolder, *, base: Path, provenance: Provenance | None, base_model: str | None
) -> str:
    config = read_config(base)
    fields: dict[str, object] = {}
    if made_from := provenance.base_model if provenance is not None else base_model:
        fields["base_model"] = made_from
        fields["base_model_relation"] = "finetune"
    if license := base_license(base):
        fields["license"] = license
    fields |= {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if "vision_config" in config else "text-generation",
    }
    tags = ["miles", "sglang"]
    if provenance is not None and provenance.step:
        tags += ["reinforcement-learning", _algorithm(provenance.recipe)]
    fields["tags"] = [
        *tags,
        *([folder.format] if folder.format not in ("bf16", "fp16", "fp32") else []),
    ]
    return "---\n" + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True) + "---"


def base_license(base: Path) -> str | None:
    """Return the license in the base model's own card, or None if it names none or there is no
    card."""
    try:
        text = read_regular_text(base / CARD_NAME)
        head = parse_yaml(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    license = head.get("license") if isinstance(head, dict) else None
    return str(license) if license else None


def _body(
    folder: WrittenFolder,
    *,
    table: WeightTable,
    name: str,
    provenance: Provenance | None,
    files: dict[str, str],
) -> Iterator[str]:
    facts = table.facts
    yield f"# {name}"
    size = f"{format_count(table.num_parameters)} parameters"
    if facts.num_experts:
        size += f" ({format_count(table.num_active_parameters)} active)"
    kind = f"A {facts.family} model of {size}, stored as {_FORMATS[folder.format]}."
    if provenance is not None and provenance.step:
        origin = (
            f"[{provenance.base_model}](https://huggingface.co/{provenance.base_model})"
            if provenance.base_model
            else "a model that is not on the hub"
        )
        if provenance.recipe.model.scratch is not None:
            origin = "a small model made from a seed"
        kind += (
            f" Trained from {origin} with reinforcement learning by miles {__version__}, "
            f"{provenance.step} steps."
        )
    yield kind
    if provenance is not None and provenance.step:
        yield from _training(provenance, has_curve=CURVE_NAME in files)
    yield from _weights(folder)
    yield _use(name, sees_images=facts.vision is not None)


def _training(provenance: Provenance, *, has_curve: bool) -> Iterator[str]:
    recipe = provenance.recipe
    yield "## Training"
    if recipe.description:
        yield recipe.description
    yield _table(
        {
            "recipe": f"`{recipe.name}`",
            "algorithm": f"{_algorithm(recipe)}: advantages by {recipe.train.advantage}, divided "
            f"by the std of: {recipe.train.normalize_std}",
            "loss": f"{recipe.train.surrogate}, clipped to [{1 - recipe.train.clip_low:g}, "
            f"{1 + recipe.train.clip_high:g}], {recipe.train.aggregation}, "
            f"KL weight {recipe.train.kl_coef:g}, entropy weight {recipe.train.entropy_coef:g}",
            "reward": f"`{recipe.rollout.reward_name}`",
            "steps": f"{provenance.step} of {recipe.rollout.prompts_per_step} prompts x "
            f"{recipe.rollout.samples_per_prompt} answers"
            + (f", after {recipe.warmup.steps} supervised steps" if recipe.warmup.steps else ""),
            "answers": f"up to {recipe.rollout.max_response_tokens} tokens at temperature "
            f"{recipe.rollout.temperature:g}",
            "learning rate": f"{recipe.train.optimizer.lr:g} ({recipe.train.optimizer.schedule})",
            **{f"data: {name}": words for name, words in provenance.data.items()},
            "seed": str(provenance.seed),
        },
        head=("", ""),
    )
    if has_curve:
        yield f"![mean reward by step]({CURVE_NAME})"
    if provenance.evals:
        yield "## Evaluation"
        first, last = provenance.evals[0], provenance.evals[-1]
        rows = {
            (
                "before reinforcement learning" if point.step == 0 else f"step {point.step}"
            ): f"{point.accuracy:.1%}"
            for point in (first, last)
        }
        yield f"Mean reward on {last.num_prompts} held-out prompts, measured by the run itself:"
        yield _table(rows, head=("", "accuracy"))
    if provenance.versions:
        yield (
            "Made with "
            + ", ".join(f"{package} {version}" for package, version in provenance.versions.items())
            + "."
        )


def _weights(folder: WrittenFolder) -> Iterator[str]:
    measured = folder.measured
    yield "## Weights"
    sentences = [f"{format_bytes(folder.size_bytes)} in safetensors."]
    if measured.num_quantised:
        sentences.append(
            f"{measured.num_quantised:,} matrices are quantised, {measured.num_plain:,} tensors "
            "are not. Every tensor was read back from disk: "
            "the plain ones are equal to the bit; the quantised ones differ from the bfloat16 "
            f"weights by {measured.relative_error:.2%} "
            f"(root mean square, relative), and no number by more than the format's own rounding "
            f"(at most {measured.worst_share_of_bound:.3f} of its bound)."
        )
    else:
        sentences.append(
            f"All {measured.num_plain:,} tensors were read back from disk and are equal to the bit."
        )
    yield " ".join(sentences)
    if folder.copied:
        yield "Not trained, taken from the base model: " + "; ".join(folder.copied) + "."
    if folder.notes:
        yield "\n".join(f"- {note}" for note in folder.notes)


def _use(name: str, *, sees_images: bool) -> str:
    words, model = "AutoTokenizer", "AutoModelForCausalLM"
    if sees_images:
        words, model = "AutoProcessor", "AutoModelForImageTextToText"
    return f"""## Use

```bash
python -m sglang.launch_server --model-path {name}
```

```python
from transformers import {model}, {words}

{words.removeprefix("Auto").lower()} = {words}.from_pretrained({json.dumps(name)})
model = {model}.from_pretrained({json.dumps(name)}, dtype="auto")
```"""


def _table(rows: dict[str, str], *, head: tuple[str, str]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {_cell(value)} |" for key, value in rows.items())])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _algorithm(recipe: Recipe) -> str:
    """Return the algorithm as the recipe names it, or else its estimator's name."""
    return recipe.train.algorithm or recipe.train.advantage.rpartition(":")[2]
