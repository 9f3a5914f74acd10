"""Implements `rollout.agent=multi_agent`: several roles that speak in turn. The policy plays them,
each in a conversation of its own; some may be played by an older version of it, or by models behind
endpoints."""

from __future__ import annotations

from milescli.agents.chat import Speaker
from milescli.agents.replying import next_reply
from milescli.core.types import Prompt, StopReason
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session
from milescli.rollout.episode.roles import RoleTurn, conversation_of, episode_as_json


class MultiAgent:
    """Plays the turns of `rollout.roles`, in their order, `rollout.rounds` times."""

    def __init__(self, settings: Rollout) -> None:
        """Set up the roles. Raises RecipeError if the environment lacks the key of an endpoint."""
        assert settings.roles, "recipe.check lets no agent without roles pass"
        self._roles = settings.roles
        self._order = settings.role_turns
        self._speakers = {
            name: Speaker(
                role.endpoint, who=f"the role `{name}`", section=f"rollout.roles.{name}.endpoint"
            )
            for name, role in settings.roles.items()
            if role.endpoint is not None
        }

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play all turns; the reward scores the last turn of the final role."""
        turns, is_cut = list[RoleTurn](), False
        for name in self._order:
            turn, is_cut = await self._turn(name, prompt, session, turns)
            turns += [] if turn is None else [turn]
            if is_cut:
                break
        last = {turn.role: turn.message["content"] for turn in turns}
        return Outcome(
            text=last.get(self._order[-1], ""),
            turn_roles=[turn.role for turn in turns if self._roles[turn.role].is_policy],
            role_texts={
                name: last[name] if role.scores == "turn" else episode_as_json(turns)
                for name, role in self._roles.items()
                if role.reward is not None and name in last
            },
            is_cut=is_cut,
            figures={f"{n}_turns": sum(turn.role == n for turn in turns) for n in self._roles},
        )

    async def _turn(
        self, name: str, prompt: Prompt, session: Session, turns: list[RoleTurn]
    ) -> tuple[RoleTurn | None, bool]:
        """Return (the role's reply, True if it is missing or truncated); the reply is None if its
        conversation is full. Raises ContextFull if even the first reply has no room,
        EndpointError."""
        messages = conversation_of(name, self._roles, prompt=prompt, turns=turns)
        if speaker := self._speakers.get(name):
            message = {"role": "assistant", "content": await speaker.next_turn(messages)}
            return RoleTurn(role=name, message=message), False
        is_policy = self._roles[name].is_policy
        player = session if is_policy else session.played_by(name)
        if (reply := await next_reply(player, messages)) is None:
            return None, True
        is_cut = is_policy and reply.turn.stop_reason is StopReason.LENGTH
        return RoleTurn(role=name, message=reply.message), is_cut
