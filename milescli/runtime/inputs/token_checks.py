"""Compares what a model's tokens are said to be in several places: the tokenizer, the embedding,
the chat template, config.json and generation_config.json, and the texts of users. `prepare` calls
it before a device is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from milescli.core.types import Prompt
from milescli.data.tokenizer import ChatTokenizer

NUM_LOOKED_AT = 2_000
"""Prompts whose texts are searched for special tokens."""
_MARKER = re.compile(r"<\|[\w.:-]+\|>|<[a-z]+_of_[a-z]+>|\[/?INST\]")
"""What a chat template writes around turns."""


def doubts(
    tokenizer: ChatTokenizer, *, own_stop_ids: Iterable[int], prompts: Iterable[Prompt]
) -> Iterator[str]:
    """Yield what the user should know before the run. `own_stop_ids`: the end of a turn, where the
    engines do not know it by themselves."""
    for token in own_stop_ids:
        name = tokenizer.inner.convert_ids_to_tokens(token)
        yield (
            f"the chat template ends a turn by `{name}`, which neither config.json nor "
            "generation_config.json names: engines are told to stop at it"
        )
    if parts := split_markers(tokenizer):
        shown = ", ".join(f"`{name}` ({number} tokens)" for name, number in sorted(parts.items()))
        yield (
            f"the chat template writes {shown}, which this tokenizer does not know as one token: "
            "the model reads letters; is the template of another family?"
        )
    for prompt in islice(prompts, NUM_LOOKED_AT):
        if found := sorted(tokenizer.special_texts_in(prompt.messages)):
            yield (
                f"row {prompt.index + 1} spells out `{found[0]}`, which the model reads as a "
                "special token: text of users can open or end a turn there"
            )
            return


def split_markers(tokenizer: ChatTokenizer) -> dict[str, int]:
    """Return the markers of the chat template that are no single tokens, and how many each is."""
    found = set(_MARKER.findall(tokenizer.template or ""))
    lengths = {marker: len(tokenizer.encode_more(marker)) for marker in found}
    return {marker: number for marker, number in lengths.items() if number > 1}
