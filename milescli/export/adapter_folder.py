"""Writes an adapter as a PEFT folder with its card under a temporary name, and moves it into place
after reading it back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from milescli.core.errors import CheckpointError
from milescli.core.private import without_private
from milescli.core.units import format_count
from milescli.export.adapter import Adapter, read_adapter, write_adapter
from milescli.export.card import CARD_NAME
from milescli.export.folder import atomic_folder
from milescli.export.provenance import HUB_NAME

_PEFT = """
```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained({name})
```
"""
_TOLERANCE = 1e-5
"""Relative tolerance of B A if a scaling was rewritten."""


def write_adapter_folder(out: Path, adapter: Adapter) -> tuple[str, ...]:
    """Write `out`, which must not exist, and return notes for the user. Raises CheckpointError if
    reading back shows a difference."""
    with atomic_folder(out) as part:
        write_adapter(part, adapter)
        _require_same(read_adapter(part), adapter)
        notes = _notes(adapter)
        (part / CARD_NAME).write_text(
            without_private(_card(out.name, adapter, notes)), encoding="utf-8"
        )
    return notes


def _require_same(actual: Adapter, written: Adapter) -> None:
    """Check that each module's change of weight is the same as before."""
    assert (
        actual.pairs.keys() == written.pairs.keys() and actual.saved.keys() == written.saved.keys()
    )
    for module, (first, second) in written.pairs.items():
        other_first, other_second = actual.pairs[module]
        change = written.scaling(module) * (second.float() @ first.float())
        other = actual.scaling(module) * (other_second.float() @ other_first.float())
        if not bool((change - other).abs().max() <= _TOLERANCE * change.abs().max()):
            raise _changed(module)
    for name, tensor in written.saved.items():
        if not torch.equal(actual.saved[name], tensor):
            raise _changed(name)


def _changed(name: str) -> CheckpointError:
    return CheckpointError(
        f"`{name}` was exported incorrectly, and the folder was removed",
        why="the exported adapter changes the model differently from the original",
        fix="export again; if it fails again, report it: the disk or miles has a fault",
    )


def _notes(adapter: Adapter) -> tuple[str, ...]:
    notes = []
    if adapter.use_rslora or adapter.alphas:
        notes.append(
            "the scaling is written as alpha / r: SGLang 0.5.20 reads neither `use_rslora` nor "
            "`alpha_pattern`"
        )
    if adapter.shared:
        notes.append(
            "experts of a layer share a matrix, in the form that SGLang 0.5.20 reads "
            "(`--experts-shared-outer-loras`); PEFT has no such form"
        )
    if adapter.saved:
        notes.append(
            f"{len(adapter.saved)} whole tensors were trained beside the matrices: "
            f"{min(adapter.saved)}; engines may ignore them"
        )
    if adapter.base_model is not None and not HUB_NAME.match(adapter.base_model):
        notes.append(
            "its base model is a folder of this machine: set `base_model_name_or_path` before you "
            "share it"
        )
    return tuple(notes)


def _card(name: str, adapter: Adapter, notes: tuple[str, ...]) -> str:
    base = adapter.base_model if adapter.base_model and HUB_NAME.match(adapter.base_model) else None
    fields: dict[str, object] = (
        {"base_model": base, "base_model_relation": "adapter"} if base else {}
    )
    fields |= {} if adapter.shared else {"library_name": "peft"}
    fields |= {"pipeline_tag": "text-generation", "tags": ["miles", "lora"]}
    size = format_count(adapter.num_parameters)
    listed = "\n".join(f"- {note}" for note in notes)
    base_link = (
        f"[{base}](https://huggingface.co/{base})" if base else "a model without a public name"
    )
    serve = (
        f"python -m sglang.launch_server --model-path {base or 'BASE'} --enable-lora "
        f"--lora-paths adapter={name}"
    )
    return f"""---
{yaml.safe_dump(fields, sort_keys=False)}---

# {name}

A LoRA adapter of rank {adapter.rank} for {base_link}: \
{size} parameters in {len(adapter.pairs)} modules.

{listed}

## Use

```bash
{serve}
```
{_PEFT.format(name=json.dumps(name)) if not adapter.shared else ""}"""
