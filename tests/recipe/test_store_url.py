"""Which URLs of object stores a recipe may name, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.load import load
from milescli.recipe.store_url import is_store_url, require_store_url, variables_of


@pytest.mark.parametrize(
    "text", ["s3://bucket/a", "gs://b", "hf://me/model", "file:///mnt/x", "abfs://c@a.host/x/"]
)
def test_places_in_stores_are_urls(text: str) -> None:
    assert is_store_url(text)
    assert require_store_url(text, key="--to") == text.rstrip("/")


@pytest.mark.parametrize("text", ["runs/mine", "/abs", "https://host/x", "Qwen/Qwen3-0.6B", "a:b"])
def test_other_names_are_none(text: str) -> None:
    assert not is_store_url(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://me:pw12345@bucket/x", "login"),
        ("s3://bucket/x?key=pw12345", "login"),
        ("s3://bucket/hf_" + "pw12345" * 4, "login"),
        ("ftp://bucket/x", "miles knows s3://"),
        ("s3:///x", "SCHEME://BUCKET/PATH"),
        ("s3://bucket/../x", "SCHEME://BUCKET/PATH"),
        ("s3://bucket//x", "SCHEME://BUCKET/PATH"),
        ("bucket/x", "not a URL"),
    ],
)
def test_what_is_no_place_or_holds_a_password_is_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    sets = [f"checkpoint.mirror={text}"]
    with pytest.raises(RecipeError, match=r"checkpoint\.mirror") as caught:
        load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    assert why in caught.value.why
    assert "pw12345" not in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["weights.store=hf://me/weights"], "cannot travel through the Hugging Face hub"),
        (["weights.store=s3://bucket/w", "weights.channel=disk"], "do not belong together"),
        (["weights.channel=store"], "do not belong together"),
        (["weights.store=bucket/w"], r"`weights\.store` cannot be"),
    ],
)
def test_a_store_for_weights_has_its_channel_and_gives_links(
    sets: list[str], what: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=what) as caught:
        load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    (fix, *_) = caught.value.fixes
    mended = [*sets, *fix.replace("--set", "").split()]
    weights = load(
        "quickstart", sets=mended, environ={}, cwd=tmp_path, home=tmp_path
    ).recipe.weights
    assert weights.named_channel == "store"


def test_only_variables_of_its_own_service_go_to_who_speaks_to_a_store() -> None:
    environ = {"AWS_PROFILE": "p", "GOOGLE_CLOUD_PROJECT": "g", "HF_TOKEN": "h", "HOME": "/root"}
    assert variables_of("s3://bucket/x", environ) == {"AWS_PROFILE": "p"}
    assert variables_of("gs://bucket/x", environ) == {"GOOGLE_CLOUD_PROJECT": "g"}
    assert variables_of("file:///mnt/x", environ) == {}


def test_models_and_data_are_copied_here_first(tmp_path: Path) -> None:
    for sets, fix in (
        (["model.scratch=null", "model.path=s3://bucket/m"], "aws s3 sync s3://bucket/m ./m"),
        (
            ["data.prompts=[gs://bucket/p.jsonl,x.jsonl]"],
            "gcloud storage cp gs://bucket/p.jsonl ./p.jsonl ",
        ),
    ):
        with pytest.raises(RecipeError, match="cannot be in an object store") as caught:
            load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
        assert caught.value.fixes[0].startswith(fix)


def test_several_adapters_are_not_copied(tmp_path: Path) -> None:
    for sets in (
        ["checkpoint.mirror=s3://bucket/x", "adapters={a: {train: {steps: 2}}}"],
        ["adapters={a: {checkpoint: {mirror: s3://bucket/x}}}"],
    ):
        with pytest.raises(RecipeError, match="several adapters"):
            load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
