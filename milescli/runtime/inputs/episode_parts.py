"""Builds the parts that play and score episodes, in training and in evaluation alike: the chat form
(the tokenizer, SGLang's parsers of the model's replies), the scorers of responses, and the warnings
of episodes that failed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milescli.agents.proxy import SessionProxy
from milescli.backends.sglang.client.parsers import ReplyForm, SglangReplies
from milescli.core.plug_points import AGENTS
from milescli.data.scratch_tokenizer import CHAT_TEMPLATE, IMAGE_CHAT_TEMPLATE
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.agents import PACKAGE_AGENTS
from milescli.recipe.schema import Recipe
from milescli.rollout import rewards
from milescli.rollout.episode.session import ChatForm
from milescli.rollout.rewards.role_rewards import RoleScorer
from milescli.rollout.rewards.scoring import Scoring, SourceScorer
from milescli.rollout.rewards.served.reward_model import ScoreServer
from milescli.runtime.inputs.auxiliary_models import policies_by_role
from milescli.runtime.inputs.data_files import rollout_of_source

if TYPE_CHECKING:
    from milescli.backends.sglang.client.fleet import SglangFleet
    from milescli.runtime.inputs.run_inputs import RunInputs
    from milescli.runtime.recovery.engines import Engines

OWN_TEMPLATE_FORM = "qwen25"
"""The form in which miles's own template writes tool calls, which SGLang does not know."""
POLICY = "policy"
"""Name of the model in HTTP requests."""
_PARSERS: weakref.WeakValueDictionary[ReplyForm, SglangReplies] = weakref.WeakValueDictionary()
"""Training and evaluation share one parser."""


def chat_form_of(recipe: Recipe, tokenizer: ChatTokenizer) -> ChatForm | None:
    """Return how the recipe's agent converts messages to tokens; None for the agent `single_turn`,
    which passes token ids."""
    rollout = recipe.rollout
    if rollout.agent == "single_turn":
        return None
    tool_parser = rollout.tool_parser
    if tool_parser == "auto" and tokenizer.template in (CHAT_TEMPLATE, IMAGE_CHAT_TEMPLATE):
        tool_parser = OWN_TEMPLATE_FORM
    form = ReplyForm(
        tool_parser=tool_parser,
        reasoning_parser=rollout.reasoning_parser,
        template=tokenizer.template,
        special_texts=tuple(tokenizer.special_texts),
    )
    parser = _PARSERS[form] = _PARSERS.get(form) or SglangReplies(form)
    doors = None
    if rollout.agent not in AGENTS.builtin or rollout.agent in PACKAGE_AGENTS:
        longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
        doors = SessionProxy(tokenizer=tokenizer, model=POLICY, max_model_len=longest)
    return ChatForm(tokenizer=tokenizer, parser=parser, session_server=doors)


def scorer_of(recipe: Recipe, server: ScoreServer | None) -> Scoring:
    """Return the scorer of the recipe's reward, bounded and retried as the recipe says, with the
    rewards of sources of its mix and of its roles. `server`: scores with the reward model; None:
    the recipe names none."""
    usual = rewards.scorer_of(recipe.rollout, server)
    own = {
        source.called: rewards.scorer_of(rollout_of_source(recipe, source), server)
        for source in recipe.data.mix or []
        if source.reward is not None
    }
    episodes = SourceScorer(usual, own) if own else usual
    roles = rewards.role_scorers_of(recipe.rollout, server)
    return RoleScorer(episodes, roles) if roles else episodes


def episode_parts(
    recipe: Recipe,
    inputs: RunInputs,
    engines: Engines,
    *,
    engine: SglangFleet,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the arguments that training episodes and evaluation episodes of a run share.
    `engine`: plays the policy; `warn`: warns the user of episodes that failed."""
    return {
        "engine": engine,
        "scorer": scorer_of(recipe, engines.scores),
        "decode": inputs.tokenizer.decode_response,
        "vocab_size": inputs.facts.vocab_size,
        "chat_form": chat_form_of(recipe, inputs.tokenizer),
        "policies": policies_by_role(recipe, engines.policies),
        "tell": FirstWarnings(warn) if warn is not None else None,
    }


NUM_REPORTED = 3


@dataclass(slots=True)
class FirstWarnings:
    """Passes on the first `NUM_REPORTED` warnings of failed episodes, which are repeated; the
    metric `failed_episodes` counts all."""

    say: Callable[[str], None]
    num_received: int = 0

    def __call__(self, text: str) -> None:
        """Pass on the warning if it is one of the first."""
        self.num_received += 1
        if self.num_received <= NUM_REPORTED:
            self.say(text + "; further ones are counted" * (self.num_received == NUM_REPORTED))
