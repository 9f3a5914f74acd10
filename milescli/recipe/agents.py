"""Sections of `rollout` that say who plays an episode, and with what: tools, MCP servers, search,
environments, agents of other packages, roles and the user. With their rules."""

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

PACKAGE_AGENTS = ("verifiers", "harbor")
"""Built-in agents that let another package play the episode and return its reward."""
_ENVIRONMENT = "environment"
_CALLS_TOOLS = ("tools",)
"""Built-in agents that need tools."""
_CALLS_NONE = ("single_turn", "multi_agent", "chat", _ENVIRONMENT, *PACKAGE_AGENTS)
_CHATS = (*_CALLS_TOOLS, "multi_agent", "chat", _ENVIRONMENT, *PACKAGE_AGENTS)
_NAME = re.compile(r"[A-Za-z][\w-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MCP_URL = "http://127.0.0.1:8000/mcp"


class EnvironmentSettings(Section):
    """The environment that the policy acts in."""

    name: str | None = None
    """Name of the environment: frozen_lake; gymnasium, textarena or reasoning_gym (environments of
    these packages, chosen by `settings`); or an import path `mypkg.games:Chess`."""
    settings: dict[str, Any] = Field(default={})
    """Arguments that create the environment, e.g. `{id: FrozenLake-v1, is_slippery: false}`."""
    step_timeout_s: PositiveFloat = 30.0
    """Time limit for creating the environment, for a reset and for a step. If one takes longer, its
    process is killed, and the other environments of that process continue in a new one."""
    processes: Positive | None = None
    """Number of processes per node that run environments in parallel; null: half of the node's
    cores."""
    memory_gib: PositiveFloat = 8.0
    """Memory limit of each process."""


class VerifiersSettings(Section):
    """An environment of the package verifiers."""

    environment: str | None = None
    """Name of the package that contains the taskset (`my-tasks`, `owner/my-tasks`). It must be
    installed alongside verifiers, or be in the directory where you start the run."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments of the taskset: the settings of verifiers' `[env.taskset]`."""
    options: dict[str, Any] = Field(default={})
    """The other settings of verifiers' `[env]`: `{id: best-of-n, agent: {harness: {id: bash}}}`. A
    seat without settings runs on this machine, in a harness that chats and calls tools."""
    num_tasks: Positive = 8192
    """Number of tasks in `task:verifiers`: the first ones of the taskset. Some tasksets are
    infinite."""
    episode_timeout_s: PositiveFloat = 600.0
    """Time limit of one episode, including its scoring."""


class HarborSettings(Section):
    """Tasks of the package harbor; each runs in its own container."""

    tasks: str | None = None
    """A folder that contains a task (task.toml, instruction.md, environment, tests), or a folder of
    such folders."""
    agent: str = "terminus-2"
    """The agent that works on the tasks: a name that harbor knows, or `mypkg.agents:Mine`, a
    subclass of harbor's BaseAgent. It must be able to reach the policy on this machine's loopback,
    as agents that run outside the container can."""
    agent_options: dict[str, Any] = Field(default={})
    """Settings of the agent, as harbor accepts them: `{kwargs: {max_turns: 20}}`."""
    environment: str = "docker"
    """Where the containers run: an environment type that harbor knows, or `mypkg.places:Mine`, a
    subclass of harbor's BaseEnvironment."""
    environment_options: dict[str, Any] = Field(default={})
    """Settings of the environment, as harbor accepts them: `{override_memory_mb: 2048}`."""
    reward: str | None = None
    """Which number of the task's verifier is the reward; null: `reward`, or the only number."""
    num_at_once: Positive = 8
    """Number of trials that run at once; further episodes wait."""
    num_tasks: Positive = 8192
    """Number of tasks in `task:harbor`."""
    episode_timeout_s: PositiveFloat = 3600.0
    """Time limit of one trial, from the start of its container to the end of its verifier."""


class SearchSettings(Section):
    """What the tool `search` searches."""

    corpus: str | None = None
    """A .jsonl, .parquet, .csv or .arrow file with one text per row, which miles searches with
    BM25; null: queries go to the server at `url`."""
    text_key: str | None = None
    """Column of the text; null: the first of text, contents, content, passage and body that the
    file has. If there is a column `title`, it is put before the text."""
    url: str | None = None
    """Full address of a retrieval server. It receives `{queries: [...], topk: N}` and replies with
    `{result: [[{document: {contents: ...}}, ...]]}`, like the server of Search-R1."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key for `url`, sent as `Authorization:
    Bearer`; null: no key is sent."""
    top_k: Positive = 3
    """Number of texts that a call returns."""


class McpServer(Section):
    """An MCP server: a program that the run starts and stops, or an address."""

    command: list[str] = Field(default=[])
    """The program and its arguments: [python, server.py]. miles talks to it over standard input and
    output. Empty: the server is at `url`."""
    url: str | None = None
    """HTTP address of the server: http://127.0.0.1:8000/mcp; null: `command` starts the server."""
    env: list[str] = Field(default=[])
    """Names of environment variables to pass to the program in addition to HOME, LOGNAME, PATH,
    SHELL, TERM and USER. Their values are never written to disk."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key for `url`, sent as `Authorization:
    Bearer`; null: no key is sent. The key is never written to disk."""
    tools: list[str] | None = None
    """Which of the server's tools the model may call; null: all of them."""


class SpeakerSettings(Requests):
    """A model behind an OpenAI-compatible endpoint that takes turns in the conversation. Its tokens
    are not trained on."""

    url: str | None = None
    """Address of the endpoint, including its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model at the endpoint."""
    max_tokens: Positive = 512
    """Longest response per turn, in tokens."""
    temperature: NonNegativeFloat = 1.0


class Role(Section):
    """A participant in a multi-agent episode. Each role has its own conversation, in which the
    other roles' messages appear as user messages, `name: text`."""

    prompt: str | None = None
    """System message of the role; null: none."""
    sees: Literal["all", "prompt", "others"] = "all"
    """What the role sees in addition to its own turns. all: the prompt and the other roles'
    messages; prompt: only the prompt; others: only the other roles' messages."""
    endpoint: SpeakerSettings | None = None
    """Set this if a model behind an endpoint plays the role."""
    policy: str | None = None
    """Set this if an older version of the policy plays the role: a Hugging Face folder, a name on
    the hub, a run, or RUN@STEP. The run serves it, frozen, on its own engine. If both this and
    `endpoint` are null, the policy itself plays the role."""
    trained: bool = True
    """false: the policy plays the role, but its tokens in this role are not trained on."""
    reward: str | dict[str, float] | None = None
    """Reward of this role, in the format of `rollout.reward`; its advantages compare the same role
    across the samples of the group. null: the role shares the episode's reward."""
    scores: Literal["turn", "episode"] = "turn"
    """What the role's own reward receives as the response. turn: the role's last turn; episode:
    every turn of every role, as JSON: `[{"role": "solver", "content": "42"}, ...]`."""

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
    """What the user says after each response, in order. The conversation ends after the last
    text."""
    endpoint: SpeakerSettings = SpeakerSettings()
    """Model that simulates the user, if `endpoint.url` is set."""
    prompt: str | None = None
    """System message of the simulated user: who the user is, what the user wants, and when to say
    `ends_with`."""
    ends_with: str = "[END]"
    """Text with which the simulated user ends the conversation; `prompt` must mention it."""


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for the agent, and for the roles, tools and environments that it uses."""
    rollout, agent = recipe.rollout, recipe.rollout.agent
    yield Rule(
        agent == _ENVIRONMENT and rollout.environment.name is None,
        f"the agent `{_ENVIRONMENT}` needs an environment",
        why="`rollout.environment.name` is null",
        fix="--set rollout.environment.name=frozen_lake   # `miles envs` lists all environments",
    )
    yield Rule(
        agent == "verifiers" and rollout.verifiers.environment is None,
        "the agent `verifiers` needs an environment",
        why="`rollout.verifiers.environment` is null",
        fix="--set rollout.verifiers.environment=my_tasks   # the package of a taskset",
    )
    yield Rule(
        agent == "harbor" and rollout.harbor.tasks is None,
        "the agent `harbor` needs tasks",
        why="`rollout.harbor.tasks` is null",
        fix="--set rollout.harbor.tasks=FOLDER   # a folder of task folders, each with a task.toml",
    )
    yield from _tool_rules(rollout)
    yield Rule(
        recipe.data.chat_template == "none" and agent in _CHATS,
        f"the agent `{agent}` needs a chat template",
        why="with `data.chat_template=none`, prompts are raw text, but the turns after the "
        "first one are chat messages",
        fix="--set data.chat_template=chatml   # or a file with the chat template of the "
        "model's family",
    )
    if agent == "multi_agent":
        yield from _role_rules(rollout)
        yield from _turn_rules(rollout)
        yield from _role_reward_rules(recipe)
    if agent == "chat":
        yield from _user_rules(rollout)


def find_warnings(recipe: Recipe) -> list[str]:
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
        f"the agent `{rollout.agent}` needs tools",
        why="`rollout.tools` and `rollout.mcp` are empty",
        fix="--set 'rollout.tools=[calculator]'   # or an import path, mypkg.tools:lookup",
    )
    for name, server in rollout.mcp.items():
        yield from _mcp_rules(name, server)
    has = "neither a `corpus` nor a `url`" if search.url is None else "a `corpus` and a `url`"
    yield Rule(
        "search" in rollout.tools and (search.corpus is None) == (search.url is None),
        "the tool `search` needs exactly one source",
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
        f"two tools have the name `{twice}`",
        why="the model calls a tool by its name, but `rollout.tools` is "
        f"[{', '.join(rollout.tools)}]"
        + "".join(
            f", the MCP server `{name}` has [{', '.join(server.tools)}]"
            for name, server in rollout.mcp.items()
            if server.tools
        ),
        fix="rename one of the tools, or remove one from the recipe",
    )


def _mcp_rules(name: str, server: McpServer) -> Iterator[Rule]:
    yield Rule(
        bool(server.command) == (server.url is not None),
        f"the MCP server `{name}` needs either a command or an address",
        why=f"`rollout.mcp` sets {'both' if server.command else 'neither'} of `command` and "
        "`url` for this server",
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
        f"`{unused}` has no effect on the MCP server `{name}`",
        why="`env` is passed to a program (`command`); `api_key_env` is sent to an address (`url`)",
        fix=f"use `{useful}` instead",
    )
    keys = [server.api_key_env] if server.api_key_env is not None else []
    yield Rule(  # what it names may be a secret, so it is not shown
        not all(_VARIABLE.fullmatch(variable) for variable in [*server.env, *keys]),
        f"the MCP server `{name}` does not name an environment variable",
        why="`env` and `api_key_env` take names of variables; the values come from the "
        "environment and are never written to disk",
        fix="write `env: [MY_TOKEN]`, and export MY_TOKEN before you start the run",
    )
    yield Rule(
        server.tools is not None and not server.tools,
        f"the MCP server `{name}` has no tool that the model may call",
        why="its list of `tools` is empty",
        fix="write `tools: null` to allow all of them, or remove the server from `rollout.mcp`",
    )


def _role_rules(rollout: Rollout) -> Iterator[Rule]:
    """Yield the rules for who the roles are."""
    roles, names, final = rollout.roles, ", ".join(rollout.roles), rollout.final_role
    yield Rule(
        not roles,
        "the agent `multi_agent` needs roles",
        why="`rollout.roles` is empty",
        fix="--set 'rollout.roles={solver: {prompt: Solve it.}, verifier: {prompt: Find the "
        "mistake.}}'",
    )
    for odd in (name for name in roles if not _NAME.fullmatch(name)):
        better = re.sub(r"[^A-Za-z0-9_-]+", "_", odd).strip("_") or "solver"
        yield Rule(
            True,
            f"`{odd}` is not a valid name for a role",
            why="messages appear to other roles as `NAME: text`, so a name may contain only "
            "letters, digits, - and _",
            fix=f"rename it to `{better}` in `rollout.roles`",
        )
    yield Rule(
        final is not None and final not in roles,
        f"there is no role `{final}`",
        why=f"`rollout.final_role` must be one of `rollout.roles`: {names}",
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
        "the policy does not play any role",
        why=f"every role in `rollout.roles` has an `endpoint` or a `policy`: {names}",
        fix=f"remove it from the role `{next(iter(roles))}`",
    )
    yield Rule(
        not any(role.is_trained for role in roles.values()),
        "the run does not train any role",
        why="every role in `rollout.roles` has an `endpoint`, a `policy` or `trained: false`: "
        f"{names}",
        fix=f"remove `trained: false` from the role `{ours[0]}`",
    )


def _rules_of_role(name: str, role: Role) -> Iterator[Rule]:
    yield Rule(
        role.reward is None and role.scores != "turn",
        f"the role `{name}` has no reward of its own",
        why=f"`scores: {role.scores}` chooses what the role's `reward` receives, but `reward` is "
        "null",
        fix=f"write `reward: judge` at the role `{name}`, or remove `scores`",
    )
    yield Rule(
        role.reward is not None and not any(role.reward_weights.values()),
        f"all weights of the reward of the role `{name}` are 0",
        why=f"it is {role.reward!r}, so every sample would have the reward 0",
        fix=f"write `reward: {next(iter(role.reward_weights), 'math')}` at the role `{name}`",
    )
    problem = "is not trained" if role.is_policy else "is played by another model"
    yield Rule(
        role.reward is not None and not role.is_trained,
        f"the reward of the role `{name}` has no effect",
        why=f"the role {problem}, so a reward cannot teach it anything",
        fix=f"remove `reward` from the role `{name}`",
    )
    yield Rule(
        role.policy is not None and not role.policy.strip("@ "),
        f"the `policy` of the role `{name}` is empty",
        why="`policy` must name a folder, a model on the hub, a run, or RUN@STEP",
        fix=f"write `policy: runs/NAME@20` at the role `{name}`",
    )
    yield Rule(
        role.policy is not None and role.endpoint is not None,
        f"the role `{name}` has two models",
        why=f"it has both an `endpoint` and a `policy`, {role.policy}",
        fix=f"remove one of them from the role `{name}`",
    )


def _turn_rules(rollout: Rollout) -> Iterator[Rule]:
    """Yield the rules for what the roles see, and how often they speak."""
    order, roles, rounds = rollout.role_turns, rollout.roles, rollout.rounds
    yield Rule(
        len(order) > rollout.max_turns,
        f"an episode of {len(order)} turns exceeds the limit",
        why=f"`rollout.roles` has {len(roles)} roles, `rollout.rounds` is {rounds}, and "
        f"`rollout.max_turns` is {rollout.max_turns}",
        fix=f"--set rollout.max_turns={len(order)}",
    )
    silent = next((name for name in roles if name not in order), None)
    yield Rule(
        silent,
        f"the role `{silent}` never gets a turn",
        why=f"the episode ends after the last turn of `{rollout.final_role}` "
        f"(`rollout.final_role`), and `rollout.rounds` is {rounds}",
        fix=["--set rollout.rounds=2", "--set rollout.final_role=null"],
    )
    yield Rule(
        roles[order[0]].sees == "others",
        f"the role `{order[0]}` would speak first without seeing anything",
        why="`sees: others` shows only what the other roles said, and none has spoken yet",
        fix=f"write `sees: all` at the role `{order[0]}`, or put another role before it",
    )
    is_alone = len(roles) == 1
    for name in set(order):
        yield Rule(
            order.count(name) > 1 and (roles[name].sees == "prompt" or is_alone),
            f"the role `{name}` would speak again without seeing anything new",
            why=f"`rollout.rounds` is {rounds}, and the role sees no new messages between its "
            "turns",
            fix=["--set rollout.rounds=1"]
            + ([] if is_alone else [f"write `sees: all` at the role `{name}`"]),
        )


def _role_reward_rules(recipe: Recipe) -> Iterator[Rule]:
    roles, turns = recipe.rollout.roles, recipe.rollout.role_turns
    own = next((name for name, role in roles.items() if role.reward), None)
    yield Rule(
        own is not None and recipe.train.advantage == "remax",
        "`remax` does not support rewards of roles",
        why=f"the role `{own}` has its own reward, but the greedy response that "
        "`train.advantage=remax` compares with has only the episode's reward",
        fix="--set train.advantage=rloo",
    )
    last = [name for name, role in roles.items() if role.is_policy][-1]
    yield Rule(
        recipe.uses_reward_model and turns[-1] != last,
        f"the reward `reward_model` cannot score the role `{turns[-1]}`",
        why="it scores the tokens of the conversation that started last, which is that of "
        f"`{last}`",
        fix=f"--set rollout.final_role={last}",
    )


def _user_rules(rollout: Rollout) -> Iterator[Rule]:
    user, script = rollout.user, rollout.user.script
    yield Rule(
        bool(script) == (user.endpoint.url is not None),
        "the agent `chat` has two users" if script else "the agent `chat` has no user",
        why="the user's messages come either from `rollout.user.script` or from "
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
        "`rollout.user.script` contains an empty text",
        why="a user message must contain text",
        fix="--set 'rollout.user.script=[\"Are you sure?\"]'",
    )
    yield Rule(
        len(script) >= rollout.max_turns,
        "the episode would end before the script does",
        why=f"`rollout.user.script` has {len(script)} texts, and the model answers each of them, "
        f"but `rollout.max_turns` is {rollout.max_turns}",
        fix=f"--set rollout.max_turns={len(script) + 1}",
    )
    if script:
        return
    yield from _speaker_rules(user.endpoint, "rollout.user.endpoint", who="the user")
    yield Rule(
        not user.ends_with or user.ends_with not in (user.prompt or ""),
        "the simulated user cannot end the conversation",
        why=f"`rollout.user.ends_with` is `{user.ends_with}`, but `rollout.user.prompt` does not "
        "mention it"
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
