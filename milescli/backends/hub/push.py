"""Uploads an exported folder to a repository on the Hugging Face hub, through huggingface_hub. The
token is that of its login, or HF_TOKEN; miles never takes one on the command line, and neither
stores nor prints it. Called by export."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from milescli.backends.hub.repo import first_line, quiet_client
from milescli.core.errors import CheckpointError, MachineError, MilesError, RecipeError

_REPO = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b")
_LOGIN = [
    "hf auth login",
    "export HF_TOKEN=...   # from https://huggingface.co/settings/tokens, with write access",
]


class Hub:
    """Represents the hub for one user. Checks the login at once, so that hours of work do not end
    in a refusal."""

    def __init__(self, repo: str, *, endpoint: str | None = None) -> None:
        """Connect to the repository ORG/NAME. `endpoint` replaces HF_ENDPOINT's hub in tests.
        Raises RecipeError for an invalid name, MachineError without a valid token, MilesError if
        the hub is unreachable."""
        from huggingface_hub import HfApi, get_token

        if not _REPO.match(repo) or ".." in repo or "--" in repo:
            raise RecipeError(
                f"`{repo}` is not a valid repository name",
                why="it must have the form ORG/NAME, with letters, digits, - _ and .",
                fix="--push my-name/my-model",
            )
        self.repo, self._api = repo, HfApi(endpoint=endpoint)
        if get_token() is None:
            raise MachineError(
                f"pushing `{repo}` needs a login",
                why="there is neither a huggingface_hub login nor HF_TOKEN",
                fix=_LOGIN,
            )
        with _explained(repo, folder=None):
            self.user = str(self._api.whoami().get("name"))

    def push(
        self, folder: Path, *, private: bool, message: str, show_progress: bool = False
    ) -> str:
        """Create the repository if it does not exist, and upload the folder. Return the
        repository's address. Called again after an interruption, it continues the upload. An
        existing repository keeps its visibility. `show_progress`: show the client's own progress
        bars, for a terminal."""
        bars = nullcontext() if show_progress else quiet_client()
        with _explained(self.repo, folder=folder), bars:
            url = self._api.create_repo(self.repo, private=private, exist_ok=True)
            self._api.upload_folder(repo_id=self.repo, folder_path=folder, commit_message=message)
        return str(url)


@contextmanager
def _explained(repo: str, *, folder: Path | None) -> Iterator[None]:
    """Turn the hub's exceptions into MilesErrors. The folder stays in any case."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    upload = (
        [
            f"hf upload {repo} {shlex.quote(str(folder))}   # the folder is whole, only the upload "
            "is missing"
        ]
        if folder
        else []
    )
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise MachineError(
            f"pushing `{repo}` needs a login", why=_one_line_message(error), fix=[*_LOGIN, *upload]
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 401:
            raise MachineError(
                f"the hub rejects the token for pushing `{repo}`",
                why=f"401: {_one_line_message(error)}",
                fix=[*_LOGIN, *upload],
            ) from None
        if status == 403:
            fixes = [f"--push {repo.split('/')[0]}-or-your-name/{repo.split('/')[1]}", *_LOGIN]
            raise MachineError(
                f"the token has no permission to write to `{repo}`",
                why=f"403: {_one_line_message(error)}",
                fix=[*upload, *fixes] if upload else fixes,
            ) from None
        if status == 404:
            raise CheckpointError(
                f"the hub has no repository `{repo.split('/')[0]}` that you can write to",
                why=f"404: {_one_line_message(error)}",
                fix=["hf auth whoami", *upload],
            ) from None
        raise MilesError(
            f"the hub failed to accept `{repo}`",
            why=f"{status}: {_one_line_message(error)}",
            fix=upload or "try again later",
        ) from None
    except (httpx.HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise MilesError(
            f"the hub cannot be reached to push `{repo}`",
            why=f"{type(error).__name__}: {_one_line_message(error)}",
            fix=upload or ["try again when the network is available", "remove --push"],
        ) from None


def _one_line_message(error: Exception) -> str:
    """Return the hub's message on one line, without anything that looks like a token."""
    server = getattr(error, "server_message", None)
    return _TOKEN.sub("[removed]", first_line(server or error))
