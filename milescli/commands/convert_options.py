"""Options that both directions of `miles convert` have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.conversion.verify import Verify


class ConvertDtype(StrEnum):
    """Of floating-point weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


Target = Annotated[
    Path, typer.Argument(metavar="DST", help="The folder to make.", show_default=False)
]
VerifyOption = Annotated[
    Verify | None,
    typer.Option(
        "--verify",
        help="logits: also compute with both (the default where the model fits into memory).",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    ConvertDtype | None,
    typer.Option(
        "--dtype", help="Numbers of the weights; as they are by default.", show_default=False
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show mapping, sizes, room and time; write nothing.")
]
