"""Who plays an episode, and with what: tools, MCP servers, search, environments, agents of other
packages, roles and the user. Sections of `rollout`, with their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from milescli.core.errors import RecipeError
from milescli.recipe.requests import EXAMPLE_URL, Requests, check_url
from milescli.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.rollout import Rollout
    from milescli.recipe.schema import Recipe

FOREIGN = ("verifiers", "harbor")
"""Built-in agents that have another package play the episode, which says the reward too."""
_ENVIRONMENT = "environment"
_CALLS_TOOLS = ("tools",)
"""Built-in agents that do nothing without tools."""
_CALLS_NONE = ("single_turn", "multi_agent", "chat", _ENVIRONMENT, *FOREIGN)
_CHATS = (*_CALLS_TOOLS, "multi_agent", "chat", _ENVIRONMENT, *FOREIGN)
_NAME = re.compile(r"[A-Za-z][\w-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MCP_URL = "http://127.0.0.1:8000/mcp"


class EnvironmentSettings(Section):
    """What the policy acts in."""

    name: str | None = None
    """frozen_lake; gymnasium, textarena, reasoning_gym (of those packages, see `settings`); or an
    import path `mypkg.games:Chess`."""
    settings: dict[str, Any] = Field(default={})
    """What it is made with, e.g. `{id: FrozenLake-v1, is_slippery: false}`."""
    step_timeout_s: PositiveFloat = 30.0
    """Of its making, of a reset and of a step. The process of one that takes longer is ended, and
    the others of that process go on in a new one."""
    processes: Positive | None = None
    """In which environments live, side by side, on each node of a run; null: half of the node's
    cores."""
    memory_gib: PositiveFloat = 8.0
    """Of each process."""


class VerifiersSettings(Section):
    """An environment of verifiers."""

    environment: str | None = None
    """Its taskset, by the name of the package that holds it (`my-tasks`, `owner/my-tasks`), which
    is installed beside verifiers, or lies where the run is begun."""
    arguments: dict[str, Any] = Field(default={})
    """Of the taskset: what verifiers' `[env.taskset]` takes."""
    options: dict[str, Any] = Field(default={})
    """The rest of verifiers' `[env]`: `{id: best-of-n, agent: {harness: {id: bash}}}`.
    A seat that says nothing plays on this machine, by a harness that chats and calls tools."""
    num_tasks: Positive = 8192
    """Of `task:verifiers`, which are the first of the taskset: some have no end."""
    episode_timeout_s: PositiveFloat = 600.0
    """Of one episode, its scoring included."""


class HarborSettings(Section):
    """Tasks of harbor, each worked at in a container of its own."""

    tasks: str | None = None
    """A folder with a task (task.toml, instruction.md, environment, tests), or of such folders."""
    agent: str = "terminus-2"
    """Who works at them: a name that harbor knows, or `mypkg.agents:Mine`, of harbor's BaseAgent.
    It has to reach the policy on this machine's loopback, as those do that run beside harbor."""
    agent_options: dict[str, Any] = Field(default={})
    """What harbor's settings of an agent take: `{kwargs: {max_turns: 20}}`."""
    environment: str = "docker"
    """Where: a kind that harbor knows, or `mypkg.places:Mine`, of harbor's BaseEnvironment."""
    environment_options: dict[str, Any] = Field(default={})
    """What harbor's settings of an environment take: `{override_memory_mb: 2048}`."""
    reward: str | None = None
    """Which of the numbers that a task's verifier says; null: `reward`, or the only one."""
    num_at_once: Positive = 8
    """Trials; further episodes wait for one to end."""
    num_tasks: Positive = 8192
    """Of `task:harbor`."""
    episode_timeout_s: PositiveFloat = 3600.0
    """Of one trial, from its container's begin to its verifier's end."""


class SearchSettings(Section):
    """What the tool `search` finds texts in."""

    corpus: str | None = None
    """A .jsonl, .parquet, .csv or .arrow file with a text in each row, which is searched here, by
    BM25; null: a server is asked."""
    text_key: str | None = None
    """Its column of the text; null: the first of text, contents, content, passage and body that is
    there. A column `title`, where there is one, stands before it."""
    url: str | None = None
    """Of a server of retrieval, the whole address: it is sent `{queries: [...], topk: N}` and
    replies `{result: [[{document: {contents: ...}}, ...]]}`, as that of Search-R1 does."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key for `url`, sent as `Authorization:
    Bearer`; null: none is sent."""
    top_k: Positive = 3
    """Texts that a call gives."""


class McpServer(Section):
    """A server of tools: a program that the run starts and ends, or an address."""

    command: list[str] = Field(default=[])
    """The program and its arguments, spoken to over its standard input and output: [python,
    server.py]. Empty: the server is at `url`."""
    url: str | None = None
    """Where it is had by HTTP: http://127.0.0.1:8000/mcp; null: it is started by `command`."""
    env: list[str] = Field(default=[])
    """Names of environment variables that the program is given beside HOME, LOGNAME, PATH, SHELL,
    TERM and USER. Their values are written nowhere."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key for `url`, sent as `Authorization:
    Bearer`; null: none is sent. The key itself is written nowhere."""
    tools: list[str] | None = None
    """Which of its tools the model may call; null: all."""


class SpeakerSettings(Requests):
    """A model behind an OpenAI-compatible endpoint that takes turns. Nothing that it says is
    trained on."""

    url: str | None = None
    """Of the endpoint, up to its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """As the endpoint calls it."""
    max_tokens: Positive = 512
    """Of one turn."""
    temperature: NonNegativeFloat = 1.0


class Role(Section):
    """One of those who speak in turn. Each has a conversation of its own, in which what the others
    say comes from the user, as `name: text`."""

    prompt: str | None = None
    """Its system message; null: none of its own."""
    sees: Literal["all", "prompt", "others"] = "all"
    """What it is shown beside its own turns. all: the prompt, and what the others say; prompt: the
    prompt alone; others: what they say alone."""
    endpoint: SpeakerSettings | None = None
    """Who plays it, where that is a model behind an endpoint."""
    policy: str | None = None
    """Who plays it, where that is an older version of the policy: a Hugging Face folder, a name on
    the hub, a run, or RUN@STEP. The run serves it on an engine of its own, as it is; null, and no
    `endpoint`: the policy itself."""
    trained: bool = True
    """false: the policy itself plays it, and nothing that it says there is trained on."""
    reward: str | dict[str, float] | None = None
    """Its own, written as `rollout.reward` is; its advantages are among the same role of the
    group's samples. null: it shares the episode's reward."""
    scores: Literal["turn", "episode"] = "turn"
    """What its own reward is given as the response. turn: its last turn; episode: every turn of
    every role, as JSON: `[{"role": "solver", "content": "42"}, ...]`."""

    @property
    def is_trained(self) -> bool:
        """Return True if any of its turns is trained on."""
        return self.trained and self.is_policy

    @property
    def is_policy(self) -> bool:
        """Return True if the trained policy plays it."""
        return self.endpoint is None and self.policy is None

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the weights of its own rewards by name; empty if it shares the episode's."""
        own = self.reward
        return {own: 1.0} if isinstance(own, str) else own or {}


class UserSettings(Section):
    """The user of the agent `chat`: either `script` or `endpoint`."""

    script: list[str] = Field(default=[])
    """What the user says after each response, in order; then the conversation has ended."""
    endpoint: SpeakerSettings = SpeakerSettings()
    """Who simulates the user, where `endpoint.url` is set."""
    prompt: str | None = None
    """System message of the simulated one: who it is, what it wants, and when it says
    `ends_with`."""
    ends_with: str = "[END]"
    """What the simulated user says to end the conversation; it must stand in `prompt`."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the agent, and for the roles, tools and environments that it uses."""
    rollout, agent = recipe.rollout, recipe.rollout.agent
    yield Rule(
        agent == _ENVIRONMENT and rollout.environment.name is None,
        f"the agent `{_ENVIRONMENT}` has no environment",
        why="`rollout.environment.name` is null",
        fix="--set rollout.environment.name=frozen_lake   # `miles envs` lists them",
    )
    yield Rule(
        agent == "verifiers" and rollout.verifiers.environment is None,
        "the agent `verifiers` has no environment",
        why="`rollout.verifiers.environment` is null",
        fix="--set rollout.verifiers.environment=my_tasks   # the package of a taskset",
    )
    yield Rule(
        agent == "harbor" and rollout.harbor.tasks is None,
        "the agent `harbor` has no tasks",
        why="`rollout.harbor.tasks` is null",
        fix="--set rollout.harbor.tasks=FOLDER   # of folders with a task.toml each",
    )
    yield from _tool_rules(rollout)
    yield Rule(
        recipe.data.chat_template == "none" and agent in _CHATS,
        f"the agent `{agent}` needs a chat template",
        why="`data.chat_template=none` makes prompts raw text, and what comes after the first turn "
        "are messages of a chat",
        fix="--set data.chat_template=chatml   # or a file with the template of its family",
    )
    if agent == "multi_agent":
        yield from _role_rules(rollout)
        yield from _turn_rules(rollout)
        yield from _role_reward_rules(recipe)
    if agent == "chat":
        yield from _user_rules(rollout)


def doubts(recipe: Recipe) -> list[str]:
    """Return warnings about legal settings that are probably not intended; the first that
    applies."""
    rollout, agent = recipe.rollout, recipe.rollout.agent
    if (rollout.tools or rollout.mcp) and agent in _CALLS_NONE:
        key = "tools" if rollout.tools else "mcp"
        return [
            f"`rollout.{key}` are never called by the agent `{agent}`; rollout.agent=tools calls "
            "them"
        ]
    if agent in _CALLS_TOOLS and rollout.tool_parser == "none":
        return ["`rollout.tool_parser=none`: no call of a tool is ever seen"]
    is_ours = agent in (*_CHATS, "single_turn")
    if is_ours and agent != "multi_agent" and rollout.roles:
        return ["`rollout.roles` never speak; rollout.agent=multi_agent plays them"]
    if rollout.environment.name is not None and is_ours and agent != _ENVIRONMENT:
        return [
            f"`rollout.environment` is never asked: the agent is `{agent}`; "
            f"rollout.agent={_ENVIRONMENT} plays in it"
        ]
    if rollout.shaping != "none" and any(role.reward for role in rollout.roles.values()):
        return [f"`rollout.shaping={rollout.shaping}` leaves rewards that roles have as they are"]
    return []


def _tool_rules(rollout: Rollout) -> Iterator[Rule]:
    search = rollout.search
    yield Rule(
        rollout.agent in _CALLS_TOOLS and not rollout.tools and not rollout.mcp,
        f"the agent `{rollout.agent}` has no tools",
        why="`rollout.tools` and `rollout.mcp` are empty",
        fix="--set 'rollout.tools=[calculator]'   # or an import path, mypkg.tools:lookup",
    )
    for name, server in rollout.mcp.items():
        yield from _mcp_rules(name, server)
    has = "neither a `corpus` nor a `url`" if search.url is None else "a `corpus` and a `url`"
    yield Rule(
        "search" in rollout.tools and (search.corpus is None) == (search.url is None),
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
    called = [name.rpartition(":")[2] for name in rollout.tools]
    called += [tool for server in rollout.mcp.values() for tool in server.tools or ()]
    twice = next((name for name in called if called.count(name) > 1), None)
    yield Rule(
        twice,
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


def _mcp_rules(name: str, server: McpServer) -> Iterator[Rule]:
    yield Rule(
        bool(server.command) == (server.url is not None),
        f"the MCP server `{name}` is started or has an address",
        why=f"`rollout.mcp` says {'both' if server.command else 'neither'} for it: `command` and "
        "`url`",
        fix=[
            f"--set 'rollout.mcp={{{name}: {{command: [python, server.py]}}}}'",
            f"--set 'rollout.mcp={{{name}: {{url: {_MCP_URL}}}}}'",
        ],
    )
    if server.url is not None:
        key = f"rollout.mcp.{name}"
        try:
            check_url(server.url, key=f"{key}.url", section=key, example=_MCP_URL)
        except RecipeError as error:  # a server in the mapping has no key that `--set` takes
            entry = f"`{name}: {{url: {_MCP_URL}, api_key_env: NAME}}`"
            fix = f"write {entry}, or without `api_key_env`"
            raise RecipeError(error.what, why=error.why, fix=fix) from None
    unused, useful = ("env", "api_key_env: NAME")
    if server.command:
        unused, useful = ("api_key_env", "env: [NAME]")
    yield Rule(
        getattr(server, unused),
        f"`{unused}` does nothing for the MCP server `{name}`",
        why="`env` is given to a program (`command`), `api_key_env` sent to an address (`url`)",
        fix=f"write `{useful}` instead",
    )
    keys = [server.api_key_env] if server.api_key_env is not None else []
    yield Rule(  # what it names may be a secret, so it is not shown
        not all(_VARIABLE.fullmatch(variable) for variable in [*server.env, *keys]),
        f"the MCP server `{name}` names no environment variable",
        why="`env` and `api_key_env` hold names; values come from the environment, and are written "
        "nowhere",
        fix="write `env: [MY_TOKEN]`, and export MY_TOKEN where the run begins",
    )
    yield Rule(
        server.tools is not None and not server.tools,
        f"no tool of the MCP server `{name}` may be called",
        why="its `tools` are an empty list",
        fix="write `tools: null` for all of them, or take the server out of `rollout.mcp`",
    )


def _role_rules(rollout: Rollout) -> Iterator[Rule]:
    """Of who the roles are."""
    roles, names, final = rollout.roles, ", ".join(rollout.roles), rollout.final_role
    yield Rule(
        not roles,
        "the agent `multi_agent` has no roles",
        why="`rollout.roles` is empty",
        fix="--set 'rollout.roles={solver: {prompt: Solve it.}, verifier: {prompt: Find the "
        "mistake.}}'",
    )
    for odd in (name for name in roles if not _NAME.fullmatch(name)):
        better = re.sub(r"[^A-Za-z0-9_-]+", "_", odd).strip("_") or "solver"
        yield Rule(
            True,
            f"a role cannot be called `{odd}`",
            why="the others are told `NAME: text`: a name has letters, digits, - and _",
            fix=f"write `{better}` in the place of it in `rollout.roles`",
        )
    yield Rule(
        final is not None and final not in roles,
        f"no role is called `{final}`",
        why=f"`rollout.final_role` is one of `rollout.roles`: {names}",
        fix=f"--set rollout.final_role={list(roles)[-1]}",
    )
    for name, role in roles.items():
        if role.endpoint is not None:
            section = f"rollout.roles.{name}.endpoint"
            yield from _speaker_rules(role.endpoint, section, who=f"the role `{name}`")
        yield from _rules_of_role(name, role)
    ours = [name for name, role in roles.items() if role.is_policy]
    yield Rule(
        not ours,
        "no role is played by the policy",
        why=f"each of `rollout.roles` has an `endpoint` or a `policy`: {names}",
        fix=f"take it out of the role `{next(iter(roles))}`",
    )
    yield Rule(
        not any(role.is_trained for role in roles.values()),
        "no role is trained",
        why=f"each of `rollout.roles` has an `endpoint`, a `policy` or `trained: false`: {names}",
        fix=f"take `trained: false` out of the role `{ours[0]}`",
    )


def _rules_of_role(name: str, role: Role) -> Iterator[Rule]:
    yield Rule(
        role.reward is None and role.scores != "turn",
        f"the role `{name}` has no reward of its own to score with",
        why=f"`scores: {role.scores}` says what its `reward` is given, and that is null",
        fix=f"write `reward: judge` at the role `{name}`, or take `scores` out",
    )
    yield Rule(
        role.reward is not None and not any(role.reward_weights.values()),
        f"the reward of the role `{name}` weighs nothing",
        why=f"it is {role.reward!r}: all samples would have the reward 0",
        fix=f"write `reward: {next(iter(role.reward_weights), 'math')}` at the role `{name}`",
    )
    said = "is not trained" if role.is_policy else "is played by another model"
    yield Rule(
        role.reward is not None and not role.is_trained,
        f"the role `{name}` has a reward that teaches nobody",
        why=f"the role {said}: nothing that it says is trained on",
        fix=f"take `reward` out of the role `{name}`",
    )
    yield Rule(
        role.policy is not None and not role.policy.strip("@ "),
        f"the role `{name}` has a `policy` without a name",
        why="it names a folder, a model on the hub, a run, or RUN@STEP",
        fix=f"write `policy: runs/NAME@20` at the role `{name}`",
    )
    yield Rule(
        role.policy is not None and role.endpoint is not None,
        f"the role `{name}` would be played by two models",
        why=f"it has an `endpoint` and a `policy`, {role.policy}",
        fix=f"take one of them out of the role `{name}`",
    )


def _turn_rules(rollout: Rollout) -> Iterator[Rule]:
    """Of what the roles are shown, and how often they speak."""
    order, roles, rounds = rollout.role_turns, rollout.roles, rollout.rounds
    yield Rule(
        len(order) > rollout.max_turns,
        f"an episode of {len(order)} turns is longer than it may be",
        why=f"`rollout.roles` are {len(roles)}, `rollout.rounds` is {rounds}, and "
        f"`rollout.max_turns` {rollout.max_turns}",
        fix=f"--set rollout.max_turns={len(order)}",
    )
    silent = next((name for name in roles if name not in order), None)
    yield Rule(
        silent,
        f"the role `{silent}` never speaks",
        why=f"the episode ends with the last turn of `{rollout.final_role}` "
        f"(`rollout.final_role`), and `rollout.rounds` is {rounds}",
        fix=["--set rollout.rounds=2", "--set rollout.final_role=null"],
    )
    yield Rule(
        roles[order[0]].sees == "others",
        f"the role `{order[0]}` would speak first and see nothing",
        why="`sees: others` shows what the others said, and nobody has",
        fix=f"write `sees: all` at the role `{order[0]}`, or put another before it",
    )
    is_alone = len(roles) == 1
    for name in set(order):
        yield Rule(
            order.count(name) > 1 and (roles[name].sees == "prompt" or is_alone),
            f"the role `{name}` would be asked again with nothing new",
            why=f"`rollout.rounds` is {rounds}, and between its turns it is shown nothing",
            fix=["--set rollout.rounds=1"]
            + ([] if is_alone else [f"write `sees: all` at the role `{name}`"]),
        )


def _role_reward_rules(recipe: Recipe) -> Iterator[Rule]:
    roles, turns = recipe.rollout.roles, recipe.rollout.role_turns
    own = next((name for name, role in roles.items() if role.reward), None)
    yield Rule(
        own is not None and recipe.train.advantage == "remax",
        "`remax` knows no rewards of roles",
        why=f"the role `{own}` has a reward of its own, and the greedy response that "
        "`train.advantage=remax` compares with has the episode's alone",
        fix="--set train.advantage=rloo",
    )
    last = [name for name, role in roles.items() if role.is_policy][-1]
    yield Rule(
        recipe.asks_reward_model and turns[-1] != last,
        f"the reward `reward_model` cannot score the role `{turns[-1]}`",
        why="it reads the tokens of the conversation that was begun last, which is that of "
        f"`{last}`",
        fix=f"--set rollout.final_role={last}",
    )


def _user_rules(rollout: Rollout) -> Iterator[Rule]:
    user, script = rollout.user, rollout.user.script
    yield Rule(
        bool(script) == (user.endpoint.url is not None),
        "the agent `chat` has two users" if script else "the agent `chat` has no user",
        why="what the user says is `rollout.user.script`, or comes from "
        "`rollout.user.endpoint.url`",
        fix=[
            "--set rollout.user.endpoint.url=null"
            if script
            else "--set 'rollout.user.script=[\"Are you sure?\"]'",
            f"--set rollout.user.script=[] --set rollout.user.endpoint.url={EXAMPLE_URL}",
        ],
    )
    yield Rule(
        "" in script,
        "`rollout.user.script` has an empty text",
        why="a user who says nothing asks for nothing",
        fix="--set 'rollout.user.script=[\"Are you sure?\"]'",
    )
    yield Rule(
        len(script) >= rollout.max_turns,
        "the user would not get round to the whole script",
        why=f"`rollout.user.script` has {len(script)} texts, each answered by a turn of the model, "
        f"and `rollout.max_turns` is {rollout.max_turns}",
        fix=f"--set rollout.max_turns={len(script) + 1}",
    )
    if script:
        return
    yield from _speaker_rules(user.endpoint, "rollout.user.endpoint", who="the user")
    yield Rule(
        not user.ends_with or user.ends_with not in (user.prompt or ""),
        "the simulated user does not know how to end the conversation",
        why=f"`rollout.user.ends_with` is `{user.ends_with}`, and `rollout.user.prompt` does not "
        "say it"
        if user.prompt
        else "`rollout.user.prompt` is not set",
        fix="--set 'rollout.user.prompt=You are a customer who ... When you have what you want, "
        f"say {user.ends_with or '[END]'}.'",
    )


def _speaker_rules(settings: SpeakerSettings, section: str, *, who: str) -> Iterator[Rule]:
    for name, example in (("url", EXAMPLE_URL), ("model", "Qwen/Qwen3-32B")):
        yield Rule(
            not getattr(settings, name),
            f"{who} has an endpoint without `{name}`",
            why=f"`{section}.{name}` is not set",
            fix=f"write `{name}: {example}` at `{section}`",
        )
    check_url(settings.url or "", key=f"{section}.url", section=section, example=EXAMPLE_URL)
