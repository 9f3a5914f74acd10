"""How the agents of a run chat: its tokenizer, and SGLang's parsers of what the model writes."""

from __future__ import annotations

import weakref

from milescli.agents.proxy import SessionProxy
from milescli.backends.sglang.replies import SglangReplies
from milescli.backends.sglang.reply_process import ReplyForm
from milescli.recipe.agents import FOREIGN
from milescli.recipe.schema import Recipe
from milescli.rollout.agents import AGENTS
from milescli.rollout.scratch_tokenizer import CHAT_TEMPLATE
from milescli.rollout.session import ChatForm
from milescli.rollout.tokenizer import ChatTokenizer

OF_OUR_TEMPLATE = "qwen25"
"""How calls are written by our own template, of which SGLang knows nothing."""
POLICY = "policy"
"""How the model is called by HTTP."""
_PARSERS: weakref.WeakValueDictionary[ReplyForm, SglangReplies] = weakref.WeakValueDictionary()
"""Training and evaluation share one."""


def chat_form_of(recipe: Recipe, tokenizer: ChatTokenizer) -> ChatForm | None:
    """None: the agent `single_turn` gives token ids, and nobody chats."""
    rollout = recipe.rollout
    if rollout.agent == "single_turn":
        return None
    tool_parser = rollout.tool_parser
    if tool_parser == "auto" and tokenizer.template == CHAT_TEMPLATE:
        tool_parser = OF_OUR_TEMPLATE
    form = ReplyForm(
        tool_parser=tool_parser,
        reasoning_parser=rollout.reasoning_parser,
        template=tokenizer.template,
        special_texts=tuple(tokenizer.special_texts),
    )
    parser = _PARSERS[form] = _PARSERS.get(form) or SglangReplies(form)
    doors = None
    if rollout.agent not in AGENTS.builtin or rollout.agent in FOREIGN:
        longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
        doors = SessionProxy(tokenizer=tokenizer, model=POLICY, max_model_len=longest)
    return ChatForm(tokenizer=tokenizer, parser=parser, doors=doors)
