"""The tags and channels in which models think before they answer: rewards read the answer after
them, and tokenizers keep those that are special tokens in the text of a response."""

from __future__ import annotations

from collections.abc import Collection

OPENS_THINKING, ENDS_THINKING = "<think>", "</think>"
TAGS = {
    OPENS_THINKING: ENDS_THINKING,
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel>": "<channel|>",
}
"""Opening tags and the closing tag of each. The last pair is Gemma 4's."""

CHANNEL = "<|channel|>"
FINAL_CHANNEL = f"{CHANNEL}final<|message|>"
ANALYSIS_CHANNEL = f"{CHANNEL}analysis"
"""gpt-oss thinks in one channel and answers in another."""
_CHANNEL_TOKENS = {"<|start|>", CHANNEL, "<|message|>", "<|end|>"}


def thinking_tokens(special: Collection[str]) -> set[str]:
    """Return those of a tokenizer's special tokens that separate the thinking from the answer."""
    markers = {*TAGS, *TAGS.values()} | (_CHANNEL_TOKENS if CHANNEL in special else set())
    return markers & {*special}
