"""What `engines.extra` may say, as SGLang's own parser has it."""

from __future__ import annotations

import json
import subprocess

import pytest

from milescli.backends.sglang.launch.arguments import check_extra
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.errors import RecipeError
from tests.backends.sglang.conftest import make_qwen3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    make_qwen3(folder)
    return folder


def check(folder, *words: str, device_kind: str = "cpu") -> None:
    check_extra(
        EngineSpec(
            model_dir=folder,
            tokenizer_dir=None,
            device_kind=device_kind,
            precision="fp32",
            port=1,
            log_path=folder / "engine.log",
            extra_args=words,
        )
    )


def test_what_sglang_takes_and_nobody_else_sets_is_let_through(folder) -> None:
    words = ("--chunked-prefill-size=64", "--schedule-policy", "lpm", "--log-level=debug")
    check(folder, *words, device_kind="cuda")  # whoever starts a run may have no device


def test_an_abbreviation_of_what_the_recipe_decides_is_refused_with_its_key(folder) -> None:
    with pytest.raises(RecipeError, match=r"engines\.memory_fraction") as caught:
        check(folder, "--mem-frac", "0.3")
    assert "--set engines.memory_fraction=0.3" in caught.value.fixes[0]


def test_what_sglang_does_not_know_is_refused_in_its_words(folder) -> None:
    with pytest.raises(
        RecipeError, match=r"SGLang's server does not accept `engines\.extra`"
    ) as caught:
        check(folder, "--no-such-thing")
    assert "unrecognized arguments: --no-such-thing" in caught.value.why


@pytest.mark.parametrize("name", ["api_key", "host", "config"])
def test_what_a_run_depends_on_is_refused_without_its_value(folder, monkeypatch, name) -> None:
    reply = json.dumps({"given": {name: "secret"}, "ours": ["host"]})
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=reply)
    )
    with pytest.raises(RecipeError, match=f"cannot set `--{name.replace('_', '-')}`") as caught:
        check(folder, f"--{name}=secret")
    assert "secret" not in str(caught.value)
