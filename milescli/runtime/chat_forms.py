"""How the agents of a run chat: its tokenizer, and SGLang's parsers of what the model writes."""

from __future__ import annotations

import weakref

from milescli.backends.sglang.replies import SglangReplies
from milescli.recipe.schema import Recipe
from milescli.rollout.scratch_tokenizer import CHAT_TEMPLATE
from milescli.rollout.session import ChatForm
from milescli.rollout.tokenizer import ChatTokenizer

OF_OUR_TEMPLATE = "qwen25"
"""How calls are written by our own template, of which SGLang knows nothing."""
_PARSERS: weakref.WeakValueDictionary[tuple[str, str, str | None], SglangReplies] = (
    weakref.WeakValueDictionary()
)
"""Training and evaluation share one."""


def chat_form_of(recipe: Recipe, tokenizer: ChatTokenizer) -> ChatForm | None:
    """None: the agent `single_turn` gives token ids, and nobody chats."""
    rollout = recipe.rollout
    if rollout.agent == "single_turn":
        return None
    tool_parser = rollout.tool_parser
    if tool_parser == "auto" and tokenizer.template == CHAT_TEMPLATE:
        tool_parser = OF_OUR_TEMPLATE
    form = (tool_parser, rollout.reasoning_parser, tokenizer.template)
    parser = _PARSERS.get(form) or SglangReplies(
        tool_parser=form[0], reasoning_parser=form[1], template=form[2]
    )
    _PARSERS[form] = parser
    return ChatForm(tokenizer=tokenizer, parser=parser)
