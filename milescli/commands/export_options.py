"""Options of `miles export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """In which numbers the weights are written."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


class ExportDtype(StrEnum):
    """What --dtype took before --format was there."""

    BF16 = "bf16"
    FP32 = "fp32"


class ExportRole(StrEnum):
    """Which of a run's models is written."""

    POLICY = "policy"
    CRITIC = "critic"


RoleOption = Annotated[
    ExportRole, typer.Option("--role", help="Which of the models that a run trains.")
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="Numbers of the weights; as config.json says by default."),
]
BaseOption = Annotated[
    Path | None,
    typer.Option("--base", help="The model that an adapter or a bare checkpoint is of."),
]
MergeOption = Annotated[bool, typer.Option("--merge", help="Write an adapter into its base model.")]
PushOption = Annotated[
    str | None,
    typer.Option("--push", metavar="ORG/NAME", help="Upload it to the Hugging Face hub."),
]
PrivateOption = Annotated[
    bool, typer.Option("--private/--public", help="Who may see a repository that --push makes.")
]
