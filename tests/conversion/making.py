"""Tiny models and conversions of them, for the tests of this folder and others."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint.journal import FinishedFile, PartFolder
from milescli.console.output import Mode, Output
from milescli.conversion.base import Direction
from milescli.conversion.convert import convert
from milescli.conversion.report import Conversion
from milescli.conversion.to_hf import ToHf
from milescli.conversion.to_megatron import ToMegatron
from milescli.conversion.verify import Verify
from milescli.models import parse_facts, table
from tests.families.cases import ALL

ROOT = Path(__file__).resolve().parents[2]
SMALL = 20_000
"""Bytes of a file of the checkpoint: even a tiny model has several."""


def quiet() -> Output:
    """That nobody sees."""
    return Output(Mode.QUIET, stdout=io.StringIO(), stderr=io.StringIO())


def make(
    folder: Path, case: str = "qwen3", *, dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """A tiny model from the table, without transformers."""
    config = {**ALL[case].config, **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    generator = torch.Generator().manual_seed(0)
    shapes = table(parse_facts(config)).hf_shapes()
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **fields: object) -> None:
    """Rewrite config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def to_megatron(
    source: Path | str,
    target: Path,
    *,
    verify: Verify | None = Verify.TENSORS,
    output: Output | None = None,
    **options: object,
) -> Conversion:
    """`miles convert hf-to-megatron` with small files."""
    direction = ToMegatron(source=str(source), **{"file_bytes": SMALL, **options})
    words = _words(direction, target, options)
    return convert(direction, target, command=words, verify=verify, output=output or quiet())


def to_hf(
    source: Path, target: Path, *, verify: Verify = Verify.TENSORS, **options: object
) -> Conversion:
    """`miles convert megatron-to-hf`."""
    direction = ToHf(source=str(source), **options)
    words = _words(direction, target, options)
    return convert(direction, target, command=words, verify=verify, output=quiet())


def _words(direction: Direction, target: Path, options: dict[str, object]) -> list[str]:
    """As if they had been typed."""
    typed = [f"--{name}={value}" for name, value in options.items()]
    return ["miles", "convert", direction.name, direction.source, str(target), *typed]


def nothing_but(folder: Path, *names: str) -> None:
    """Only these lie in the folder."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def same_bytes(first: Path, second: Path, *names: str) -> bool:
    """Whether files of two folders are equal; the weights, where none is named."""
    return all(
        (first / name).read_bytes() == (second / name).read_bytes()
        for name in names or ("model.safetensors",)
    )


@contextmanager
def interrupted_after(num_files: int) -> Iterator[None]:
    """Ctrl-C as soon as so many files are finished."""
    plain = PartFolder.record_finished

    def finish(self: PartFolder, file: FinishedFile) -> None:
        plain(self, file)
        if len(self.finished) == num_files:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFolder, "record_finished", finish)
        yield
