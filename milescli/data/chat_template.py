"""Chooses a model's chat template, and reports one that is missing, is no Jinja, or does not end.
`tokenizer` renders with it."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from milescli.core.cpu_bound import TooSlow, cpu_bound
from milescli.core.errors import DataError
from milescli.core.files import read_regular_text
from milescli.data.scratch_tokenizer import CHAT_TEMPLATE

AUTO, RAW, CHATML = "auto", "none", "chatml"
"""The values of `data.chat_template` that are no file."""


def no_template(folder: Path) -> DataError:
    """Return the error of a model folder that has no chat template."""
    return DataError(
        f"the tokenizer in {folder} has no chat template",
        why="it has neither chat_template.jinja nor `chat_template` in tokenizer_config.json; "
        "base models often have none",
        fix=[
            "--set data.chat_template=none   # use prompts as raw text",
            "--set data.chat_template=chatml   # or a file with the chat template of the "
            "model's family",
            f"put the chat template of its family into {folder / 'chat_template.jinja'}",
        ],
    )


def configured_template(wanted: str) -> str | None:
    """Return the template that `data.chat_template` sets in place of the tokenizer's; None if it
    sets none. Raises DataError for a file without a template."""
    if wanted in (AUTO, RAW):
        return None
    return CHAT_TEMPLATE if wanted == CHATML else template_of_file(wanted)


def template_of_file(path: str) -> str:
    """Return the template in a file. Raises DataError if it is not Jinja."""
    try:
        text = read_regular_text(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"`data.chat_template` cannot be read: {path}",
            why=str(error),
            fix=f"--set data.chat_template={AUTO}   # or none, chatml, or a file",
        ) from error
    if fault := syntax_error(text):
        line, message = fault
        raise DataError(
            f"{path} is not a valid chat template",
            why=f"line {line}: {message}",
            fix=f"sed -n {line}p {shlex.quote(str(path))}   # fix it",
        )
    return text


def template_of_folder(template: object, folder: Path) -> str:
    """Return the template of a model's folder. Raises DataError if it is not Jinja."""
    fault = (1, "it is no text") if not isinstance(template, str) else syntax_error(template)
    if fault is not None:
        raise DataError(
            f"the chat template of the tokenizer in {folder} is not valid",
            why=f"line {fault[0]}: {fault[1]}",
            fix=[
                "--set data.chat_template=chatml   # or a file with the template of its family",
                f"copy chat_template.jinja or tokenizer_config.json of the model into {folder}",
            ],
        )
    return str(template)


def syntax_error(text: str) -> tuple[int, str] | None:
    """Return (line, message) of a syntax error in a template, or None."""
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
        )
    except jinja2.TemplateSyntaxError as error:
        return error.lineno, str(error.message)
    return None


_RENDER_CPU_S = 10.0
"""CPU seconds for one chat; a chat of 10^6 characters takes 0.01 s with the templates of SmolLM2
and Qwen2.5."""


class TemplateTooSlow(DataError):
    """Reports a chat template that took more than _RENDER_CPU_S for one chat."""


@contextlib.contextmanager
def ignoring_template_errors() -> Iterator[None]:
    """Ignore errors that the template raises in the block, whose types depend on the template.
    TemplateTooSlow is not ignored, so that the time of endless templates does not add up."""
    try:
        yield
    except TemplateTooSlow:
        raise
    except Exception:
        return


@contextlib.contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise TemplateTooSlow if the template takes more than _RENDER_CPU_S for one chat."""
    try:
        with cpu_bound(_RENDER_CPU_S):
            yield
    except TooSlow:
        raise TemplateTooSlow(
            f"the chat template took more than {_RENDER_CPU_S:.0f} s of CPU time for one chat",
            why="with common templates, a chat of a million characters takes 0.01 s",
            fix=f"--set data.chat_template={CHATML}   # or a file with the template of its family",
        ) from None
