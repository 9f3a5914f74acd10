"""Runs the two forms of `miles serve`: a model for OpenAI's clients, and training for clients of
the Tinker API. Called by `serve`."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import typer

from milescli.commands import measure
from milescli.commands.find_run import find_eval_target
from milescli.commands.options import read_recipe
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.core.files import read_regular_text

KEY_PREFIX = "tml-"
"""Prefix of keys; clients of the Tinker API accept no others."""
SHORTEST_KEY = 20
SOLE_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Describes where a server listens."""

    host: str
    port: int | None
    """None: the default port."""
    usual: int

    @contextmanager
    def listening(self, command: str, *, output: Output) -> Iterator[socket]:
        """Open the socket to listen on, with a warning if other computers can connect. `command`:
        for the fixes of errors."""
        from milescli.web.gate import is_loopback
        from milescli.web.serve import listen

        with listen(self.host, self.port, usual=self.usual, command=command) as listener:
            if not is_loopback(self.host):
                output.warn(
                    f"other computers can reach {self.host}: anyone with the key can use the "
                    "model, and the traffic is not encrypted"
                )
            yield listener

    def address(self, listener: socket) -> str:
        """Return the URL of the server."""
        from milescli.web.serve import address_of

        return address_of(self.host, listener.getsockname()[1])


def serve_model(
    subject: str, place: ListenAddress, *, tokens: int, sets: list[str] | None, output: Output
) -> None:
    """Serve a checkpoint or a model to OpenAI's clients until a signal arrives. `tokens`: length of
    the longest response."""
    from milescli.checkpoint.run_dir import open_run
    from milescli.recipe.resolved import load_resolved
    from milescli.rollout.base import SessionAddress
    from milescli.runtime.evaluation.serve import Serving, serve_settings
    from milescli.runtime.evaluation.sets import EvalOptions

    target = find_eval_target(subject)
    if target.endpoint is not None:
        raise typer.BadParameter(
            "`serve` starts engines for a model, so it cannot take an endpoint"
        )
    run = target.run and load_resolved(open_run(target.run).recipe_file).recipe
    changes = serve_settings(tokens=tokens, has_stop=bool(run and run.rollout.stop))
    with place.listening(f"miles serve {subject}", output=output) as listener:
        url = f"{place.address(listener)}/v1"

        def ready(model: str, address: SessionAddress) -> None:
            body = {"model": model, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            output.json("serve", {"base_url": url, "model": model, "api_key": address.api_key})
            output.text(f"base URL  {url}\nmodel     {model}\nAPI key   {address.api_key}")
            output.text(
                f"curl {url}/chat/completions -H 'Authorization: Bearer {address.api_key}' "
                f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
            )
            output.note("Ctrl-C stops the server; the key is new each time")

        serving = Serving(listener=listener, model=target.model, ready=ready)
        eval_options = EvalOptions(data=["task:seeds"], sets=[*changes, *(sets or ())])
        options = measure.MeasureOptions(use_engines=serving.use_engines, verb="serve")
        measure.measure_subject(subject, eval_options, options, output=output)
    output.note("the server has ended")


def serve_clients(
    recipe: str | None,
    place: ListenAddress,
    *,
    name: str | None,
    keys: str | None,
    flags: dict[str, str],
    sets: list[str] | None,
    output: Output,
) -> None:
    """Train and sample for clients of the Tinker API until a signal arrives. `name`: name of the
    service; `keys`: file with the keys of its clients."""
    from milescli.runtime.service.start import NUM_SLOTS, ServiceOptions, serve_training

    loaded = read_recipe(None, recipe, sets=sets, flags=flags, adapters=None, output=output)
    sole = f"{KEY_PREFIX}{secrets.token_hex(24)}"
    tenants = {sole: SOLE_TENANT} if keys is None else read_keys(Path(keys).expanduser())
    with place.listening(f"miles serve --recipe {recipe}", output=output) as listener:
        url = place.address(listener)

        def ready(model: str, folder: Path) -> None:
            own = {} if keys is not None else {"api_key": sole}
            output.json("serve", {"base_url": url, "model": model, "folder": str(folder), **own})
            output.text(f"base URL  {url}\nmodel     {model}\nstates    {folder}")
            output.text(f"API key   {sole}" if keys is None else f"API keys  {keys}")
            output.text(f"export TINKER_BASE_URL={url} TINKER_API_KEY={own.get('api_key', 'KEY')}")
            output.note("Ctrl-C stops the server; saved states stay")

        service_options = ServiceOptions(
            name=name or loaded.recipe.name,
            num_slots=NUM_SLOTS,
            keys=tenants,
            listener=listener,
            ready=ready,
        )
        serve_training(loaded, service_options, output=output)
    output.note("the server has ended")


def read_keys(file: Path) -> dict[str, str]:
    """Map each key to its tenant, as read from a file that only its owner can read. Raises
    DataError."""
    path = shlex.quote(str(file))
    add = f'(umask 077; echo "alice {KEY_PREFIX}$(openssl rand -hex 24)" >> {path})'
    try:
        is_private = not file.stat().st_mode & 0o077
        rows = [line.split() for line in read_regular_text(file).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the keys in {file}",
            why=f"{type(error).__name__}: {error}",
            fix=add,
        ) from error
    if not is_private:
        raise DataError(
            f"other users of this computer can read the keys in {file}",
            why="whoever has a key can use what its client saved",
            fix=f"chmod 600 {path}",
        )
    found = dict[str, str]()
    for number, row in enumerate(rows, 1):
        if not row or row[0].startswith("#"):
            continue
        is_valid = _is_key_row(row)
        if not is_valid or row[1] in found:
            raise DataError(
                f"line {number} of the keys in {file} is not valid",
                why=f"it has the key of `{found[row[1]]}`, too"
                if is_valid
                else f"a line is NAME {KEY_PREFIX}KEY, with a key of {SHORTEST_KEY} characters or "
                "more",
                fix=f"${{EDITOR:-vi}} +{number} {path}",
            )
        found[row[1]] = row[0]
    if not found:
        raise DataError(f"the keys in {file} are not valid", why="it has no clients", fix=add)
    return found


def _is_key_row(row: list[str]) -> bool:
    return len(row) == 2 and row[1].startswith(KEY_PREFIX) and len(row[1]) >= SHORTEST_KEY
