"""All tiny models, made once; Megatron's logits of all, computed once; all layouts, run once per
size of world."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.backends.megatron.world import run_world
from tests.conversion.making import to_hf, to_megatron
from tests.families import record
from tests.families.cases import ALL, ROWS
from tests.forked import run_module


def wanted() -> list[str]:
    """All cases, or those that MILES_FAMILIES names (comma-separated beginnings), for work on one
    family."""
    chosen = os.environ.get("MILES_FAMILIES", "").split(",")
    return [name for name in ALL if any(name.startswith(start) for start in chosen)]


class Families:
    """Folders and figures, by name of the case."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        """Of the cases with these names."""
        self.root, self.names = root, names
        self._megatron: dict[str, Path] | None = None
        self._layouts: dict | None = None
        self._converted: dict[str, Path] | None = None
        self.notes: dict[str, dict] = {name: {} for name in names}
        """What tests saw, for `record`."""
        run_module("tests.families.making", str(root / "models"), *names)
        self.counted = json.loads((root / "models" / "counted.json").read_text())

    def folder(self, name: str) -> Path:
        """Hugging Face folder."""
        return self.root / "models" / name

    def logits_of_transformers(self, name: str) -> dict:
        """By number of the row."""
        return load_file(self.folder(name) / "logits.witness")

    def logits_of_megatron(self, name: str) -> dict:
        """By number of the row."""
        if self._megatron is None:
            self._megatron = {
                case: self.root / f"{case}.safetensors" for case in self.names if ALL[case].logits
            }
            jobs = [
                {
                    "folder": str(self.folder(case)),
                    "rows": ROWS,
                    "dtype": "float32",
                    "out": str(out),
                }
                for case, out in self._megatron.items()
            ]
            jobs += [
                {
                    **job,
                    "checkpoint": str(self.converted(case) / "release"),
                    "out": str(self._loaded(case)),
                }
                for case, job in zip(self._megatron, jobs, strict=True)
            ]
            (self.root / "request.json").write_text(json.dumps({"threads": 1, "jobs": jobs}))
            run_module("milescli.backends.megatron.logits", str(self.root / "request.json"))
        return load_file(self._megatron[name])

    def logits_of_converted(self, name: str) -> dict:
        """By number of the row: Megatron's, of weights that stock dist_checkpointing loaded from
        the converted checkpoint."""
        self.logits_of_megatron(name)
        return load_file(self._loaded(name))

    def _loaded(self, name: str) -> Path:
        return self.root / f"{name}.loaded.safetensors"

    def converted(self, name: str) -> Path:
        """What `miles convert hf-to-megatron` made of the folder."""
        if self._converted is None:
            self._converted = {}
        if name not in self._converted:
            target = self.root / "converted" / name
            to_megatron(self.folder(name), target, file_bytes=50_000)
            self._converted[name] = target
        return self._converted[name]

    def converted_back(self, name: str) -> Path:
        """What `miles convert megatron-to-hf` made of that."""
        target = self.root / "back" / name
        to_hf(self.converted(name), target)
        return target

    def came_back(self, name: str, number: int) -> list[str]:
        """Names of tensors that came out of layout `number` of the case otherwise than they went
        in."""
        if self._layouts is None:
            cases = [
                {
                    "name": f"{case} {index}",
                    "call": "published_differs",
                    "model": str(self.folder(case)),
                    "layout": layout,
                }
                for case in self.names
                for index, layout in enumerate(ALL[case].layouts)
            ]
            self._layouts = run_world(2, cases, self.root / "two")
        return self._layouts[f"{name} {number}"]


@pytest.fixture(scope="session")
def families(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Families]:
    """Shared by all tests of this folder, and made for the families that they ask for. Where
    MILES_EVIDENCE is set, what they saw is recorded at the end."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {call.params.get("name") for call in calls if call is not None}
    names = [name for name in wanted() if name in asked]
    made = Families(tmp_path_factory.mktemp("families"), names)
    yield made
    if os.environ.get("MILES_EVIDENCE"):
        record.write(made.notes)
