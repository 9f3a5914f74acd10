"""Parses URLs of object stores in recipes and on command lines: which are accepted, which are
refused, and which package each needs. Opens nothing; `backends.stores` does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.core.private import holds_secret, without_private
from milescli.recipe.section import Rule

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
    "file": "fsspec",
}
"""Scheme -> the package that fsspec needs for it."""
BUCKET = "s3://bucket"
NO_STORE = "--set weights.store=null --set weights.channel=auto"
"""Fix where weights cannot go through a store."""
_URL = re.compile(r"([a-zA-Z][\w+.-]*)://(.*)", re.DOTALL)
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_"}
"""Scheme -> how the names of the variables begin from which its client takes credentials and
settings."""
_COPY = {
    "s3": ("aws s3 sync", "aws s3 cp"),
    "gs": ("gcloud storage rsync -r", "gcloud storage cp"),
}
"""Scheme -> the commands that copy a folder and a file to this machine."""


def is_store_url(text: str) -> bool:
    """Return True for a URL of any scheme except `http` and `https`, which are not object
    stores."""
    found = _URL.match(text)
    return found is not None and found[1].lower() not in ("http", "https")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL: s3 for s3://bucket/name."""
    return url.partition("://")[0]


def variables_of(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that the client of a URL's store may need."""
    start = _VARIABLES.get(scheme_of(url))
    return {name: value for name, value in environ.items() if start and name.startswith(start)}


def require_store_url(text: str, *, key: str) -> str:
    """Return the URL without a trailing slash. `key`: the option or key that names it. Raises
    RecipeError if it names no place in a store, or contains a password."""
    if (fault := _fault_of(text)) is not None:
        raise RecipeError(
            f"`{key}` cannot be `{without_private(text.partition('?')[0])}`",
            why=fault,
            fix=f"--set {key}={BUCKET}/runs" if "." in key else f"{key} {BUCKET}/my-model",
        )
    return text.rstrip("/")


def _fault_of(text: str) -> str | None:
    found = _URL.fullmatch(text)
    if found is None:
        return "it is not a URL of an object store"
    scheme, place = found[1], found[2]
    login, at, _ = place.partition("/")[0].rpartition("@")
    if (at and ":" in login) or "?" in place or "#" in place or holds_secret(text):
        return (
            "it holds a login, a key or a query, which would be written to the run's files; "
            "credentials come from the store's own environment (AWS_ACCESS_KEY_ID, ...) or files"
        )
    if scheme not in PACKAGES:
        return f"miles knows {', '.join(f'{name}://' for name in PACKAGES)}"
    parts = place.rstrip("/").removeprefix("/" * (scheme == "file")).split("/")
    if not parts[0] or not set(parts).isdisjoint((".", "..", "")) or not place.isprintable():
        return "it must be SCHEME://BUCKET/PATH"
    return None


def rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield the rules for values that may, or may not, be the URL of a store."""
    mirror, data, weights = recipe.checkpoint.mirror, recipe.data, recipe.weights
    if mirror is not None:
        require_store_url(mirror, key="checkpoint.mirror")
    if weights.store is not None:
        require_store_url(weights.store, key="weights.store")
    yield Rule(
        weights.store is not None and scheme_of(weights.store) == "hf",
        "weights cannot travel through the Hugging Face hub",
        why="engine ranks read signed links, which the hub does not give",
        fix=f"--set weights.store={BUCKET}/weights",
    )
    yield Rule(
        (weights.store is not None) != (weights.named_channel == "store"),
        "`weights.channel` and `weights.store` do not belong together",
        why=f"`weights.channel` is {weights.channel}, and `weights.store` is "
        + ("null" if weights.store is None else "set"),
        fix=[f"--set weights.store={BUCKET}/weights --set weights.channel=store", NO_STORE],
    )
    own = [one.get("checkpoint") or {} for one in recipe.adapters.values()]
    yield Rule(
        own and (mirror is not None or any("mirror" in one for one in own)),
        "`checkpoint.mirror` cannot copy several adapters",
        why=f"each of {', '.join(recipe.adapters)} has checkpoints of its own, and only those of a "
        "run with one policy are copied",
        fix="--set checkpoint.mirror=null",
    )
    named: list[tuple[str, object]] = [("model.path", recipe.model.path)]
    for name in ("prompts", "eval", "train", "validation", "demonstrations"):
        value = getattr(data, name)
        values = value if isinstance(value, list) else [value]
        named += [(f"data.{name}", one) for one in values]
    for key, value in named:
        url = without_private(str(value))
        here, is_file = f"./{url.rstrip('/').rpartition('/')[2]}", key != "model.path"
        copy = _COPY.get(scheme_of(url), ("copy", "copy"))[is_file]
        yield Rule(
            isinstance(value, str) and is_store_url(value),
            f"`{key}` cannot be in an object store",
            why="miles reads a folder of this computer, or the Hugging Face hub",
            fix=f"{copy} {url} {here}   # then --set {key}={here}",
        )
