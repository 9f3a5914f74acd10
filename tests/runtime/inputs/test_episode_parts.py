"""Parts of episodes: what training and evaluation share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.episode_parts import episode_parts
from tests.data.chat_templates import GPT_OSS, tokenizer_of


def test_rewards_are_given_the_tokens_that_separate_thinking_from_answer() -> None:
    tokenizer = tokenizer_of(GPT_OSS.template, special=GPT_OSS.special, eos=GPT_OSS.eos)
    inputs = SimpleNamespace(tokenizer=tokenizer, facts=SimpleNamespace(vocab_size=300))
    engines = SimpleNamespace(scores=None, policies={})
    parts = episode_parts(
        Recipe(), cast("Any", inputs), cast("Any", engines), engine=cast("Any", None)
    )
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7"
    token_ids = tokenizer.inner(f"{text}<|return|>", add_special_tokens=False)["input_ids"]
    assert parts["decode"](token_ids) == text
