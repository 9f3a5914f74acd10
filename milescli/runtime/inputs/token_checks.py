"""Compares the sources that define a model's tokens: the tokenizer, the embedding, the chat
template, config.json and generation_config.json, and users' texts. These are rows of the table in
`checks`: each yields warnings for the user before the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from milescli.core.files import read_json
from milescli.data.chat_template import no_template
from milescli.data.file_prompts import FilePrompts
from milescli.data.file_rows import describe_row
from milescli.data.tokenizer import ChatTokenizer

NUM_LOOKED_AT = 512
"""Prompts whose texts are searched for special tokens."""
_MARKER = re.compile(r"<\|[\w.:-]+\|>|<[a-z]+_of_[a-z]+>|\[/?INST\]")
"""Markers that a chat template writes around turns."""
_NUM_SHOWN = 3
TEMPLATE_FILE, OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder in which transformers looks for chat templates, besides tokenizer_config.json."""


class Tokens(Protocol):
    """Lists the parts of `checks.CheckSubject` that these checks read."""

    tokenizer: ChatTokenizer
    own_stop_ids: Sequence[int]
    trained: Sequence[tuple[FilePrompts, object]]


def require_template(folder: Path) -> None:
    """Raise DataError if a model folder has no chat template. Looks only at its files: it takes no
    time, and imports nothing heavy."""
    if (folder / TEMPLATE_FILE).is_file() or (folder / TEMPLATES_FOLDER).is_dir():
        return
    try:
        config = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return  # refused where it is read
    if not isinstance(config, dict):
        return  # refused where it is read
    if not config.get("chat_template") and not (folder / OLD_TEMPLATE_FILE).is_file():
        raise no_template(folder)


def check_embedding(subject: Tokens) -> Iterator[str]:
    """Yield a warning if the tokenizer has tokens that the embedding lacks. A row with such a token
    is refused when it is read."""
    tokenizer, rows = subject.tokenizer, subject.tokenizer.num_embeddings
    if rows is None or tokenizer.vocab_size <= rows:
        return
    beyond = range(rows, tokenizer.vocab_size)
    names = [f"`{tokenizer.inner.convert_ids_to_tokens(token)}`" for token in beyond[:_NUM_SHOWN]]
    yield (
        f"the tokenizer has {len(beyond)} more tokens than the model's embedding has rows: "
        f"{', '.join(names)}{', ...' * (len(beyond) > _NUM_SHOWN)}; rows that contain one are "
        "rejected"
    )


def check_end_tokens(subject: Tokens) -> Iterator[str]:
    """Yield a warning if engines do not stop at the token that ends a turn."""
    for token in subject.own_stop_ids:
        name = subject.tokenizer.inner.convert_ids_to_tokens(token)
        yield (
            f"the chat template ends a turn with `{name}`, which neither config.json nor "
            "generation_config.json names: miles makes engines stop at it"
        )


def check_markers(subject: Tokens) -> Iterator[str]:
    """Yield a warning if the chat template writes markers that are not in the vocabulary."""
    if parts := split_markers(subject.tokenizer):
        shown = ", ".join(f"`{name}` ({number} tokens)" for name, number in sorted(parts.items()))
        yield (
            f"the chat template writes {shown}, which is not a single token of this tokenizer, "
            "so the model reads letters; does the template belong to another family?"
        )


def check_template_date(subject: Tokens) -> Iterator[str]:
    """Yield a warning if the chat template writes today's date."""
    if "strftime_now" in (subject.tokenizer.template or ""):
        yield (
            "the chat template writes today's date, so prompts differ if the run is resumed, or "
            "its export used, on another day"
        )


def check_special_tokens(subject: Tokens) -> Iterator[str]:
    """Yield a warning if texts of prompts contain special tokens."""
    prompts = (
        (prompt, part.files) for part, _ in subject.trained for prompt in part.first(NUM_LOOKED_AT)
    )
    for prompt, files in islice(prompts, NUM_LOOKED_AT):
        if found := sorted(subject.tokenizer.special_texts_in(prompt.messages)):
            yield (
                f"{describe_row(prompt.index, files)} contains the text `{found[0]}`, which the "
                "model reads as a special token: text of users can open or end a turn there"
            )
            return


def split_markers(tokenizer: ChatTokenizer) -> dict[str, int]:
    """Return each marker of the template that is not a single token, with its number of tokens."""
    found = set(_MARKER.findall(tokenizer.template or ""))
    lengths = {marker: len(tokenizer.encode_continuation(marker)) for marker in found}
    return {marker: number for marker, number in lengths.items() if number > 1}
