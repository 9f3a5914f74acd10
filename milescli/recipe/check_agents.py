"""Rules of a recipe's agent, its tools, its roles and its user. Pure; called by `check`."""

from __future__ import annotations

import re

from milescli.core.errors import RecipeError
from milescli.recipe.agents import Role, SpeakerSettings
from milescli.recipe.check_mcp import check_mcp
from milescli.recipe.check_url import check_url
from milescli.recipe.foreign import FOREIGN
from milescli.recipe.schema import Recipe, Rollout

CALLS_TOOLS = ("tools",)
"""Built-in agents that do nothing without tools."""
PLAYS = "environment"
CALLS_NONE = ("single_turn", "multi_agent", "chat", PLAYS, *FOREIGN)
CHATS = (*CALLS_TOOLS, "multi_agent", "chat", PLAYS, *FOREIGN)
_NAME = re.compile(r"[A-Za-z][\w-]*")
_EXAMPLE_URL = "http://127.0.0.1:8000/v1"


def check_agents(recipe: Recipe) -> None:
    """Raises RecipeError where the agent cannot do what is meant."""
    rollout = recipe.rollout
    if rollout.agent == PLAYS and rollout.environment.name is None:
        raise RecipeError(
            f"the agent `{PLAYS}` has no environment",
            why="`rollout.environment.name` is null",
            fix="--set rollout.environment.name=frozen_lake   # `miles envs` lists them",
        )
    if rollout.agent == "verifiers" and rollout.verifiers.environment is None:
        raise RecipeError(
            "the agent `verifiers` has no environment",
            why="`rollout.verifiers.environment` is null",
            fix="--set rollout.verifiers.environment=my_tasks   # the package of a taskset",
        )
    if rollout.agent == "harbor" and rollout.harbor.tasks is None:
        raise RecipeError(
            "the agent `harbor` has no tasks",
            why="`rollout.harbor.tasks` is null",
            fix="--set rollout.harbor.tasks=FOLDER   # of folders with a task.toml each",
        )
    _tools(rollout)
    if recipe.data.chat_template == "none" and rollout.agent in CHATS:
        raise RecipeError(
            f"the agent `{rollout.agent}` needs a chat template",
            why="`data.chat_template=none` makes prompts raw text, and what comes after the first "
            "turn are messages of a chat",
            fix="--set data.chat_template=chatml   # or a file with the template of its family",
        )
    if rollout.agent == "multi_agent":
        _roles(rollout)
        _turns_of_roles(rollout)
        _own_rewards_and_greedy(recipe)
        if recipe.asks_reward_model:
            _scored_by_model(rollout)
    if rollout.agent == "chat":
        _user(rollout)


def doubt_about_agents(recipe: Recipe) -> str | None:
    """What is legal and probably not meant."""
    rollout = recipe.rollout
    if (rollout.tools or rollout.mcp) and rollout.agent in CALLS_NONE:
        key = "tools" if rollout.tools else "mcp"
        return (
            f"`rollout.{key}` are never called by the agent `{rollout.agent}`; "
            "rollout.agent=tools calls them"
        )
    if rollout.agent in CALLS_TOOLS and rollout.tool_parser == "none":
        return "`rollout.tool_parser=none`: no call of a tool is ever seen"
    has_no_roles = (*CALLS_TOOLS, "single_turn", "chat", PLAYS, *FOREIGN)
    if rollout.agent in has_no_roles and rollout.roles:
        return "`rollout.roles` never speak; rollout.agent=multi_agent plays them"
    is_ours = rollout.agent in (*CHATS, "single_turn") and rollout.agent != PLAYS
    if rollout.environment.name is not None and is_ours:
        return (
            f"`rollout.environment` is never asked: the agent is `{rollout.agent}`; "
            f"rollout.agent={PLAYS} plays in it"
        )
    if rollout.shaping != "none" and any(role.reward for role in rollout.roles.values()):
        return f"`rollout.shaping={rollout.shaping}` leaves rewards that roles have as they are"
    return None


def _tools(rollout: Rollout) -> None:
    if rollout.agent in CALLS_TOOLS and not rollout.tools and not rollout.mcp:
        raise RecipeError(
            f"the agent `{rollout.agent}` has no tools",
            why="`rollout.tools` and `rollout.mcp` are empty",
            fix="--set 'rollout.tools=[calculator]'   # or an import path, mypkg.tools:lookup",
        )
    check_mcp(rollout)
    _search(rollout)
    called = [name.rpartition(":")[2] for name in rollout.tools]
    called += [tool for server in rollout.mcp.values() for tool in server.tools or ()]
    if twice := next((name for name in called if called.count(name) > 1), None):
        raise RecipeError(
            f"two tools are called `{twice}`",
            why="the model calls a tool by its name, and `rollout.tools` is "
            f"[{', '.join(rollout.tools)}]"
            + "".join(
                f", the MCP server `{name}` has [{', '.join(server.tools)}]"
                for name, server in rollout.mcp.items()
                if server.tools
            ),
            fix="give one of them another name, and take the other out of the recipe",
        )


def _search(rollout: Rollout) -> None:
    search = rollout.search
    if "search" in rollout.tools and (search.corpus is None) == (search.url is None):
        has = "neither a `corpus` nor a `url`" if search.url is None else "a `corpus` and a `url`"
        raise RecipeError(
            "the tool `search` does not know where",
            why=f"`rollout.search` has {has}",
            fix=[
                "--set rollout.search.url=null --set rollout.search.corpus=FILE.jsonl",
                "--set rollout.search.corpus=null --set rollout.search.url=http://HOST:PORT/retrieve",
            ],
        )
    if search.url is not None:
        check_url(
            search.url,
            key="rollout.search.url",
            section="rollout.search",
            example="http://127.0.0.1:8000/retrieve",
        )


def _roles(rollout: Rollout) -> None:
    """Who they are."""
    roles = rollout.roles
    if not roles:
        raise RecipeError(
            "the agent `multi_agent` has no roles",
            why="`rollout.roles` is empty",
            fix="--set 'rollout.roles={solver: {prompt: Solve it.}, verifier: {prompt: Find the "
            "mistake.}}'",
        )
    if odd := next((name for name in roles if not _NAME.fullmatch(name)), None):
        raise RecipeError(
            f"a role cannot be called `{odd}`",
            why="the others are told `NAME: text`: a name has letters, digits, - and _",
            fix=f"write `{re.sub(r'[^A-Za-z0-9_-]+', '_', odd).strip('_') or 'solver'}` in the "
            "place of it in `rollout.roles`",
        )
    if rollout.final_role is not None and rollout.final_role not in roles:
        raise RecipeError(
            f"no role is called `{rollout.final_role}`",
            why=f"`rollout.final_role` is one of `rollout.roles`: {', '.join(roles)}",
            fix=f"--set rollout.final_role={list(roles)[-1]}",
        )
    for name, role in roles.items():
        if role.endpoint is not None:
            _speaker(role.endpoint, f"rollout.roles.{name}.endpoint", who=f"the role `{name}`")
        _own_reward(name, role)
        _own_model(name, role)
    if not any(role.is_policy for role in roles.values()):
        raise RecipeError(
            "no role is played by the policy",
            why=f"each of `rollout.roles` has an `endpoint` or a `policy`: {', '.join(roles)}",
            fix=f"take it out of the role `{next(iter(roles))}`",
        )
    if not any(role.is_trained for role in roles.values()):
        ours = next(name for name, role in roles.items() if role.is_policy)
        raise RecipeError(
            "no role is trained",
            why="each of `rollout.roles` has an `endpoint`, a `policy` or `trained: false`: "
            + ", ".join(roles),
            fix=f"take `trained: false` out of the role `{ours}`",
        )


def _own_model(name: str, role: Role) -> None:
    if role.policy is not None and not role.policy.strip("@ "):
        raise RecipeError(
            f"the role `{name}` has a `policy` without a name",
            why="it names a folder, a model on the hub, a run, or RUN@STEP",
            fix=f"write `policy: runs/NAME@20` at the role `{name}`",
        )
    if role.policy is not None and role.endpoint is not None:
        raise RecipeError(
            f"the role `{name}` would be played by two models",
            why=f"it has an `endpoint` and a `policy`, {role.policy}",
            fix=f"take one of them out of the role `{name}`",
        )


def _own_reward(name: str, role: Role) -> None:
    if role.reward is None and role.scores != "turn":
        raise RecipeError(
            f"the role `{name}` has no reward of its own to score with",
            why=f"`scores: {role.scores}` says what its `reward` is given, and that is null",
            fix=f"write `reward: judge` at the role `{name}`, or take `scores` out",
        )
    if role.reward is not None and not any(role.reward_weights.values()):
        raise RecipeError(
            f"the reward of the role `{name}` weighs nothing",
            why=f"it is {role.reward!r}: all samples would have the reward 0",
            fix=f"write `reward: {next(iter(role.reward_weights), 'math')}` at the role `{name}`",
        )
    if role.reward is not None and not role.is_trained:
        said = "is not trained" if role.is_policy else "is played by another model"
        raise RecipeError(
            f"the role `{name}` has a reward that teaches nobody",
            why=f"the role {said}: nothing that it says is trained on",
            fix=f"take `reward` out of the role `{name}`",
        )


def _own_rewards_and_greedy(recipe: Recipe) -> None:
    own = next((name for name, role in recipe.rollout.roles.items() if role.reward), None)
    if own is not None and recipe.train.advantage == "remax":
        raise RecipeError(
            "`remax` knows no rewards of roles",
            why=f"the role `{own}` has a reward of its own, and the greedy response that "
            "`train.advantage=remax` compares with has the episode's alone",
            fix="--set train.advantage=rloo",
        )


def _turns_of_roles(rollout: Rollout) -> None:
    """What they are shown, and how often they speak."""
    order = rollout.role_turns
    if len(order) > rollout.max_turns:
        raise RecipeError(
            f"an episode of {len(order)} turns is longer than it may be",
            why=f"`rollout.roles` are {len(rollout.roles)}, `rollout.rounds` is {rollout.rounds}, "
            f"and `rollout.max_turns` {rollout.max_turns}",
            fix=f"--set rollout.max_turns={len(order)}",
        )
    if silent := next((name for name in rollout.roles if name not in order), None):
        raise RecipeError(
            f"the role `{silent}` never speaks",
            why=f"the episode ends with the last turn of `{rollout.final_role}` "
            f"(`rollout.final_role`), and `rollout.rounds` is {rollout.rounds}",
            fix=["--set rollout.rounds=2", "--set rollout.final_role=null"],
        )
    first = order[0]
    if rollout.roles[first].sees == "others":
        raise RecipeError(
            f"the role `{first}` would speak first and see nothing",
            why="`sees: others` shows what the others said, and nobody has",
            fix=f"write `sees: all` at the role `{first}`, or put another before it",
        )
    for name in set(order):
        is_shown_more = rollout.roles[name].sees != "prompt" and len(rollout.roles) > 1
        if order.count(name) > 1 and not is_shown_more:
            raise RecipeError(
                f"the role `{name}` would be asked again with nothing new",
                why=f"`rollout.rounds` is {rollout.rounds}, and between its turns it is shown "
                "nothing",
                fix=["--set rollout.rounds=1", f"write `sees: all` at the role `{name}`"]
                if len(rollout.roles) > 1
                else "--set rollout.rounds=1",
            )


def _scored_by_model(rollout: Rollout) -> None:
    ours = [name for name, role in rollout.roles.items() if role.is_policy]
    if rollout.role_turns[-1] != ours[-1]:
        raise RecipeError(
            f"the reward `reward_model` cannot score the role `{rollout.role_turns[-1]}`",
            why="it reads the tokens of the conversation that was begun last, which is that of "
            f"`{ours[-1]}`",
            fix=f"--set rollout.final_role={ours[-1]}",
        )


def _user(rollout: Rollout) -> None:
    user = rollout.user
    if bool(user.script) == (user.endpoint.url is not None):
        raise RecipeError(
            "the agent `chat` has two users" if user.script else "the agent `chat` has no user",
            why="what the user says is `rollout.user.script`, or comes from "
            "`rollout.user.endpoint.url`",
            fix=[
                "--set rollout.user.endpoint.url=null"
                if user.script
                else "--set 'rollout.user.script=[\"Are you sure?\"]'",
                f"--set rollout.user.script=[] --set rollout.user.endpoint.url={_EXAMPLE_URL}",
            ],
        )
    if "" in user.script:
        raise RecipeError(
            "`rollout.user.script` has an empty text",
            why="a user who says nothing asks for nothing",
            fix="--set 'rollout.user.script=[\"Are you sure?\"]'",
        )
    if len(user.script) >= rollout.max_turns:
        raise RecipeError(
            "the user would not get round to the whole script",
            why=f"`rollout.user.script` has {len(user.script)} texts, each answered by a turn of "
            f"the model, and `rollout.max_turns` is {rollout.max_turns}",
            fix=f"--set rollout.max_turns={len(user.script) + 1}",
        )
    if user.script:
        return
    _speaker(user.endpoint, "rollout.user.endpoint", who="the user")
    if not user.ends_with or user.ends_with not in (user.prompt or ""):
        raise RecipeError(
            "the simulated user does not know how to end the conversation",
            why=f"`rollout.user.ends_with` is `{user.ends_with}`, and `rollout.user.prompt` does "
            "not say it"
            if user.prompt
            else "`rollout.user.prompt` is not set",
            fix="--set 'rollout.user.prompt=You are a customer who ... When you have what you "
            f"want, say {user.ends_with or '[END]'}.'",
        )


def _speaker(settings: SpeakerSettings, section: str, *, who: str) -> None:
    for name, example in (("url", _EXAMPLE_URL), ("model", "Qwen/Qwen3-32B")):
        if not getattr(settings, name):
            raise RecipeError(
                f"{who} has an endpoint without `{name}`",
                why=f"`{section}.{name}` is not set",
                fix=f"write `{name}: {example}` at `{section}`",
            )
    assert settings.url is not None, settings
    check_url(settings.url, key=f"{section}.url", section=section, example=_EXAMPLE_URL)
