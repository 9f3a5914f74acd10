"""Reads the outline of a LoRA adapter's PEFT folder: adapter_config.json and the header of
adapter_model.safetensors. Loads no torch; checks before a run use it, and `adapter` reads the
numbers by it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from milescli.checkpoint.safetensors_file import SafetensorsFile, TensorLocation, num_non_finite
from milescli.core.errors import CheckpointError
from milescli.core.files import read_json
from milescli.models.adapter import PEFT_PREFIX, PEFT_WEIGHTS, A, B, Place, of_expert

CONFIG_FILE = "adapter_config.json"
_A, _B = (f".{which}.weight" for which in (A, B))
_WRAPPERS = re.compile(r"\.modules_to_save(?:\.default)?|\.base_layer")
"""Parts that PEFT adds to names of whole tensors: of a module that is trained as a whole, and of
the base's weight below a pair (it saves those of embedding and output layers)."""
_UNKNOWN_FORMS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "target_parameters",
    "megatron_config",
    "alora_invocation_tokens",
)
"""Settings of PEFT under which the plain formula does not hold."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOutline:
    """Describes a LoRA adapter in a folder, without its numbers."""

    pairs: Mapping[str, tuple[Place, Place]]
    """Module, as the base model names it -> places of A [r, in] and B [out, r]."""
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Module -> shapes of A and B."""
    alpha: float
    rank: int
    use_rslora: bool
    alphas: Mapping[str, float]
    """Alphas of modules that differ from `alpha`."""
    shared: Mapping[str, str]
    """As in `Adapter`."""
    saved: Mapping[str, str]
    """Whole tensors that were trained beside the pairs, by name in the base model's folder -> their
    names in the file."""
    base_model: str | None
    """`base_model_name_or_path`: a hub name or a folder."""

    def scaling(self, module: str) -> float:
        """Return the factor of B A."""
        alpha = self.alphas.get(module, self.alpha)
        return scaling_of(alpha, self.shapes[module][0][0], use_rslora=self.use_rslora)


def scaling_of(alpha: float, rank: int, *, use_rslora: bool) -> float:
    """Return the factor of B A for a module; `rank` is that of its matrices."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def is_adapter(folder: Path) -> bool:
    """Return True if the folder is a PEFT folder."""
    return (folder / CONFIG_FILE).is_file()


def read_outline(folder: Path) -> AdapterOutline:
    """Read the outline of a PEFT folder; reads safetensors only. Raises CheckpointError if it is
    not a plain LoRA, if its parts do not fit together, or if a number is NaN or infinite."""
    config, tensors = _read_config(folder), _read_tensors(folder)
    names: dict[str, dict[str, str]] = {_A: {}, _B: {}}
    saved = {}
    for name in tensors:
        plain = name.removeprefix(PEFT_PREFIX)
        end = next((end for end in names if name.endswith(end)), None)
        if end is not None:
            names[end][plain.removesuffix(end)] = name
        elif "lora_" in name:
            raise _unusable_error(folder, why=f"`{name}` is not a matrix of a plain LoRA")
        else:
            saved[_WRAPPERS.sub("", plain)] = name
    if odd := sorted(names[_A].keys() ^ names[_B].keys()):
        raise _unusable_error(folder, why=f"`{odd[0]}` has only one of lora_A and lora_B")
    pairs, shapes, shared = _pairs_by_expert(names, tensors)
    for module, (first, second) in shapes.items():
        if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
            raise _unusable_error(
                folder, why=f"`{module}` has A {list(first)} and B {list(second)}"
            )
    try:
        alphas = _alphas(config, pairs)
    except ValueError as error:
        raise _unusable_error(folder, why=str(error)) from None
    return AdapterOutline(
        pairs=pairs,
        shapes=shapes,
        alpha=float(config["lora_alpha"]),  # type: ignore[arg-type]
        rank=int(config["r"]),  # type: ignore[call-overload]
        use_rslora=bool(config.get("use_rslora")),
        alphas=alphas,
        shared=shared,
        saved=saved,
        base_model=str(config.get("base_model_name_or_path") or "") or None,
    )


def _pairs_by_expert(
    names: Mapping[str, Mapping[str, str]], tensors: Mapping[str, TensorLocation]
) -> tuple[dict[str, tuple[Place, Place]], dict[str, tuple[Shape, Shape]], dict[str, str]]:
    """Return (pairs, shapes, shared) of an outline. A pair may hold all experts of a layer:
    [experts, ...] and [1, ...], as in SGLang."""
    pairs: dict[str, tuple[Place, Place]] = {}
    shapes: dict[str, tuple[Shape, Shape]] = {}
    shared: dict[str, str] = {}
    for module, own in names[_A].items():
        both = (own, names[_B][module])
        first, second = (tensors[name].shape for name in both)
        lengths = [shape[0] if len(shape) == 3 else 0 for shape in (first, second)]
        if min(lengths) != 1 or max(lengths) < 1:
            pairs[module] = Place(both[0], None), Place(both[1], None)
            shapes[module] = first, second
            continue
        shared[module] = A if lengths[0] == 1 else B
        for number in range(max(lengths)):
            rows = [number if length > 1 else 0 for length in lengths]
            expert = of_expert(module, number)
            pairs[expert] = Place(both[0], rows[0]), Place(both[1], rows[1])
            shapes[expert] = first[1:], second[1:]
    return pairs, shapes, shared


def _alphas(config: Mapping[str, object], modules: Iterable[str]) -> dict[str, float]:
    """Return the alphas of modules that `alpha_pattern` matches, as PEFT does: its keys are regular
    expressions for the end of a module's name, and the first match wins. Raises ValueError for an
    invalid pattern."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"`alpha_pattern: {patterns}` is not an object")
    try:
        compiled = [
            (re.compile(rf"(.*\.)?({pattern})$"), float(alpha))
            for pattern, alpha in patterns.items()
        ]
    except (re.error, TypeError, ValueError) as error:
        raise ValueError(f"`alpha_pattern: {patterns}` cannot be read: {error}") from None
    alphas = {}
    for module in modules:
        alpha = next((alpha for pattern, alpha in compiled if pattern.match(module)), None)
        if alpha is not None:
            alphas[module] = alpha
    return alphas


def _read_config(folder: Path) -> dict[str, object]:
    try:
        config = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise _unusable_error(folder, why=f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _unusable_error(folder, why=f"{CONFIG_FILE} does not contain a JSON object")
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(config.get(name), kind) or config[name] <= 0:
            raise _unusable_error(folder, why=f"{CONFIG_FILE} has `{name}: {config.get(name)}`")
    if str(config.get("peft_type")).upper() != "LORA":
        raise _unusable_error(
            folder, why=f"its type is {config.get('peft_type')}, but miles supports only LORA"
        )
    if odd := [name for name in _UNKNOWN_FORMS if config.get(name)]:
        raise _unusable_error(
            folder, why=f"`{odd[0]}: {config[odd[0]]}` makes it more than W + scaling * B A"
        )
    if config.get("bias") not in (None, "none"):
        raise _unusable_error(folder, why=f"`bias: {config['bias']}` also trains biases")
    return config


def _read_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Return the header of the folder's weights. Raises CheckpointError if a number is not
    finite."""
    path = folder / PEFT_WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = (
            "it holds a pickle (adapter_model.bin), and reading one could run foreign code"
            if pickled
            else f"it has no {PEFT_WEIGHTS}"
        )
        raise _unusable_error(folder, why=why)
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        raise _unusable_error(folder, why=f"{PEFT_WEIGHTS}: {error.why}") from error
    file.close()
    for name, stored in file.tensors.items():
        if number := num_non_finite(path, stored):
            raise _unusable_error(
                folder, why=f"{number} numbers of `{name}` in {PEFT_WEIGHTS} are NaN or infinite"
            )
    return file.tensors


def _unusable_error(folder: Path, *, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{folder}` is not a supported adapter",
        why=why,
        fix="save the adapter again with PEFT, as plain LoRA in safetensors",
    )
