"""What the episodes of a run are played with, in training and in evaluation alike: how an agent
chats (the tokenizer, SGLang's parsers of what the model writes), who scores responses, and how
users are warned of episodes that failed."""

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
from milescli.recipe.data import MixSource
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout import rewards
from milescli.rollout.episode.session import ChatForm
from milescli.rollout.rewards.role_rewards import ByRole
from milescli.rollout.rewards.scoring import BySource, Scoring
from milescli.rollout.rewards.served.reward_model import ScoreServer
from milescli.runtime.inputs.given_models import by_role

if TYPE_CHECKING:
    from milescli.backends.sglang.client.fleet import SglangFleet
    from milescli.runtime.inputs.run_inputs import RunInputs
    from milescli.runtime.recovery.engines import Engines

OF_OUR_TEMPLATE = "qwen25"
"""How calls are written by our own template, of which SGLang knows nothing."""
POLICY = "policy"
"""Name of the model in HTTP requests."""
_PARSERS: weakref.WeakValueDictionary[ReplyForm, SglangReplies] = weakref.WeakValueDictionary()
"""Training and evaluation share one parser."""


def chat_form_of(recipe: Recipe, tokenizer: ChatTokenizer) -> ChatForm | None:
    """Return how the recipe's agent chats; None for the agent `single_turn`, which gives token ids:
    nobody chats."""
    rollout = recipe.rollout
    if rollout.agent == "single_turn":
        return None
    tool_parser = rollout.tool_parser
    if tool_parser == "auto" and tokenizer.template in (CHAT_TEMPLATE, IMAGE_CHAT_TEMPLATE):
        tool_parser = OF_OUR_TEMPLATE
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
    return ChatForm(tokenizer=tokenizer, parser=parser, doors=doors)


def rollout_of_source(recipe: Recipe, source: MixSource) -> Rollout:
    """Return the recipe's `rollout`, with the reward of the source where it has one."""
    reward = source.reward or recipe.rollout.reward
    return recipe.rollout.model_copy(update={"reward": reward})


def scorer_of(recipe: Recipe, server: ScoreServer | None) -> Scoring:
    """Return the recipe's reward, bounded and retried as the recipe says; those of its mix, each
    for the prompts of its source; and those of its roles. `server`: who holds the reward model;
    None: the recipe names none."""
    usual = rewards.scorer_of(recipe.rollout, server)
    own = {
        source.called: rewards.scorer_of(rollout_of_source(recipe, source), server)
        for source in recipe.data.mix or []
        if source.reward is not None
    }
    episodes = BySource(usual, own) if own else usual
    roles = rewards.role_scorers_of(recipe.rollout, server)
    return ByRole(episodes, roles) if roles else episodes


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
        "decode": inputs.tokenizer.decode,
        "vocab_size": inputs.facts.vocab_size,
        "chat_form": chat_form_of(recipe, inputs.tokenizer),
        "policies": by_role(recipe, engines.policies),
        "tell": FirstFew(warn) if warn is not None else None,
    }


NUM_REPORTED = 3


@dataclass(slots=True)
class FirstFew:
    """Passes on the first `NUM_REPORTED` warnings of failed episodes, which are played anew; the
    figure `failed_episodes` counts all."""

    say: Callable[[str], None]
    num_heard: int = 0

    def __call__(self, text: str) -> None:
        """Report one more."""
        self.num_heard += 1
        if self.num_heard <= NUM_REPORTED:
            self.say(text + "; further ones are counted" * (self.num_heard == NUM_REPORTED))
