"""Checks whether the Hugging Face hub is reachable and accepts the token, and whether what the
recipe names exists there or in the cache. Shows no secret."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from milescli.backends.hub.repo import cache_of
from milescli.doctor.finding import Finding, fail, ok, warn
from milescli.doctor.roles import repos_of_roles
from milescli.recipe.data_files import FIELDS, files_of, is_hub, parse_hub
from milescli.recipe.schema import Recipe

PUBLIC = "https://huggingface.co"
TIMEOUT_S = 10.0
"""Timeout of one request to the hub."""
NO_HUB = (407, 500, 502, 503, 504)
"""HTTP statuses: proxy authentication required, and those by which gateways report that a server is
down."""


def wanted_repos(recipe: Recipe | None) -> list[tuple[str, str, str]]:
    """Return (kind, name, key) of what the recipe fetches from the hub."""
    if recipe is None:
        return []
    path = recipe.model.path
    repos = (
        [("model", path, "model.path")]
        if path is not None and not Path(path).expanduser().is_dir()
        else []
    )
    repos += [("model", name, key) for name, key in repos_of_roles(recipe)]
    for field in FIELDS:
        for file in files_of(recipe.data, field):
            if is_hub(file.name):
                name = parse_hub(file.name, key=f"data.{field}").name
                repos.append(("dataset", name, f"data.{field}"))
    return repos


def check_hub(
    recipe: Recipe | None, *, environ: Mapping[str, str], token: str | None
) -> list[Finding]:
    """Query the hub, with the token if there is one, once for each repository. An unreachable hub
    is a `fail` only if the recipe needs something that is not in the cache."""
    repos = wanted_repos(recipe)
    lacking = [repo for repo in repos if not is_cached(repo)]
    endpoint = environ.get("HF_ENDPOINT") or PUBLIC
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _unreachable_findings(
            lacking, repos, "HF_HUB_OFFLINE is set", ["unset HF_HUB_OFFLINE"]
        )
    try:
        status = _request_status(f"{endpoint}/api/whoami-v2", token)
    except OSError as error:
        reason = getattr(error, "reason", error)
        fixes = [f"unset HF_ENDPOINT   # then it is {PUBLIC}"] if endpoint != PUBLIC else []
        if urllib.request.getproxies() and not urllib.request.proxy_bypass(
            urlsplit(endpoint).hostname or ""
        ):
            fixes.append(
                "unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY   # if "
                "the proxy is the problem"
            )
        return _unreachable_findings(
            lacking,
            repos,
            f"{_without_credentials(endpoint)}: {reason}",
            [*fixes, f"curl -sSI {_without_credentials(endpoint)}"],
        )
    if token and status == 401:
        fix = ["unset HF_TOKEN" if environ.get("HF_TOKEN") else "hf auth logout", "hf auth login"]
        why = "then public models are refused too"
        return (fail if repos else warn)(
            "hub", "the hub does not accept the token that is set", why=why, fix=fix
        )
    problems = [finding for repo in repos for finding in _repo_findings(endpoint, repo, token)]
    token_state = (
        "token accepted"
        if token
        else "no token" + (", and none is needed" if repos and not problems else "")
    )
    return problems or ok(
        "hub",
        f"{_without_credentials(endpoint)} responds, {token_state}"
        + "".join(f"; {name} exists" for _, name, _ in repos),
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends the token to no other host than the one that was asked."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Called by urllib."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        before, after = map(urlsplit, (req.full_url, newurl))
        if following and (before.scheme, before.netloc) != (after.scheme, after.netloc):
            following.remove_header("Authorization")
        return following


def _request_status(url: str, token: str | None) -> int:
    """Return the status of the response. Raises OSError if there is none, or only that of a proxy
    or gateway that does not reach the hub."""
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        if error.code in NO_HUB:
            raise OSError(f"it responded with {error.code} {error.reason}") from None
        return error.code
    except (ValueError, http.client.HTTPException) as error:
        # no address at all, or no HTTP behind it
        raise OSError(f"{type(error).__name__}: {error}") from None


def _repo_findings(endpoint: str, repo: tuple[str, str, str], token: str | None) -> list[Finding]:
    kind, name, key = repo
    what = f"the {'model' if kind == 'model' else 'data set'} `{name}`"
    try:
        status = _request_status(f"{endpoint}/api/{kind}s/{name}", token)
        if status == 200 and kind == "model":
            status = _request_status(
                f"{endpoint}/{name}/resolve/main/config.json", token
            )  # gated ones are listed, and refused here
    except OSError as error:
        return fail(
            "hub",
            f"{what} is not available",
            why=str(getattr(error, "reason", error)),
            fix=f"--set {key}=/path/to/a/copy",
        )
    if status in (401, 403):
        fixes = [
            *([] if token else ["hf auth login"]),
            f"open {_without_credentials(endpoint)}/{name}   # accept its terms",
        ]
        why = "it is private, gated or does not exist" + (
            "" if token else ", and there is no token"
        )
        return fail(
            "hub",
            f"access to {what} is denied",
            why=why,
            fix=[*fixes, f"--set {key}=/path/to/a/copy"],
        )
    if status >= 400:
        why = f"the hub responded with {status}" + (
            "; the name may be wrong" if status == 404 else ""
        )
        return fail(
            "hub",
            f"{what} does not exist",
            why=why,
            fix=[f"--set {key}=NAME", f"--set {key}=/path/to/a/copy"],
        )
    return []


def _unreachable_findings(
    lacking: list[tuple[str, str, str]],
    repos: list[tuple[str, str, str]],
    why: str,
    fixes: list[str],
) -> list[Finding]:
    if lacking:
        names = ", ".join(f"`{name}`" for _, name, _ in lacking)
        copies = [f"--set {key}=/path/to/a/copy" for _, _, key in lacking]
        return fail("hub", f"the hub cannot be asked about {names}", why=why, fix=[*fixes, *copies])
    if repos:
        return ok("hub", "not contacted; everything that the recipe names is in the cache")
    return warn(
        "hub",
        "the hub cannot be reached",
        why=f"{why}; only models and data on this disk are available",
        fix=fixes,
    )


def is_cached(repo: tuple[str, str, str]) -> bool:
    """Return True if the cache has a snapshot with more than a config; the download itself finds
    out whether it is complete."""
    kind, name, _ = repo
    folder = cache_of(kind, name) / "snapshots"
    wanted = (
        {".safetensors"}
        if kind == "model"
        else {".parquet", ".jsonl", ".json", ".csv", ".gz", ".zst"}
    )
    return any(wanted & {Path(file).suffix for file in files} for _, _, files in os.walk(folder))


def _without_credentials(url: str) -> str:
    """Remove the user and password that a mirror's address may hold."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}".rstrip("/")
