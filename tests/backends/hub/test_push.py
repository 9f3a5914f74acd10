"""Pushing to a hub on loopback: what arrives, what is asked first, and what each refusal says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.backends.hub.push import Hub
from milescli.core.errors import CheckpointError, MachineError, MilesError, RecipeError
from milescli.platform.ports import free_ports
from tests.loopback_hub import WRITE_TOKEN, LoopbackHub, loopback_hub

REPO = "my-org/my-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """With a token in the environment, and a home that has none."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    with loopback_hub() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As exported."""
    out = tmp_path / "my model"
    out.mkdir()
    (out / "README.md").write_text("card")
    (out / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return out


def test_what_is_pushed_arrives(hub: LoopbackHub, folder: Path) -> None:
    known = Hub(REPO, endpoint=hub.url)
    assert known.user == "somebody" and hub.made == {}, (
        "asked before the work begins, and nothing made"
    )
    url = known.push(folder, private=True, message="Exported by miles as fp8")
    assert url == f"{hub.url}/{REPO}" and hub.made[REPO] == "private"
    assert hub.files[f"models/{REPO}"] == {
        "README.md": b"card",
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
    }


def test_a_public_repository_is_made_on_request(hub: LoopbackHub, folder: Path) -> None:
    Hub(REPO, endpoint=hub.url).push(folder, private=False, message="x")
    assert hub.made[REPO] == "public"


def test_the_token_is_in_no_address(
    hub: LoopbackHub, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Hub(REPO, endpoint=hub.url).push(folder, private=True, message="x")
    said = capfd.readouterr()
    assert not any(WRITE_TOKEN in text for text in (*hub.asked, said.out, said.err))


def test_without_a_token_nothing_is_asked(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(MachineError) as caught:
        Hub(REPO, endpoint=hub.url)
    assert caught.value.exit_code == 4 and "hf auth login" in caught.value.fixes and hub.asked == []


def test_a_token_that_is_not_accepted(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "z" * 30)
    with pytest.raises(MachineError) as caught:
        Hub(REPO, endpoint=hub.url)
    assert "401" in caught.value.why and "hf_z" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "status", "kind", "code"),
    [
        ("/repos/create", 403, MachineError, 4),
        ("/preupload/", 404, CheckpointError, 6),
        ("/commit/", 403, MachineError, 4),
    ],
)
def test_refusals_say_how_to_go_on_with_the_folder(
    hub: LoopbackHub, folder: Path, path: str, status: int, kind: type[MilesError], code: int
) -> None:
    hub.fails[path] = status
    with pytest.raises(kind) as caught:
        Hub(REPO, endpoint=hub.url).push(folder, private=True, message="x")
    assert str(status) in caught.value.why and caught.value.exit_code == code
    assert any(fix.startswith(f"hf upload {REPO} '{folder}'") for fix in caught.value.fixes)
    assert folder.is_dir()


def test_a_hub_that_is_not_there(hub: LoopbackHub) -> None:
    with pytest.raises(MilesError) as caught:
        Hub(REPO, endpoint=f"http://127.0.0.1:{free_ports(1)[0]}")
    assert caught.value.exit_code == 1 and "cannot be reached" in caught.value.what


@pytest.mark.parametrize(
    "name", ["my-model", "a/b/c", "../x", "org/", "org/a b", "org/a--b", "org/a..b"]
)
def test_names_that_cannot_be_are_refused_before_anything_is_asked(
    hub: LoopbackHub, name: str
) -> None:
    with pytest.raises(RecipeError):
        Hub(name, endpoint=hub.url)
    assert hub.asked == []
