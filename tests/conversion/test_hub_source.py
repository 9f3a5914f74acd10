"""SRC as a name on the hub, against a hub on loopback: what is fetched, with which token, and what
is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conversion.making import make
from tests.loopback_hub import LoopbackHub, loopback_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "served").iterdir()}
    files |= {
        "pytorch_model.bin": b"never fetched",
        "modeling_tiny.py": b"raise SystemExit('never fetched')",
    }
    with loopback_hub() as served:
        served.files = {"models/org/tiny": files, "models/org/secret": files}
        served.gated = {"models/org/secret": "sesame"}
        yield served


def _convert(
    hub: LoopbackHub, tmp_path: Path, name: str, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environ |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    command = [
        sys.executable,
        "-m",
        "milescli",
        "convert",
        "hf-to-megatron",
        name,
        str(tmp_path / "out"),
        "--verify",
        "tensors",
        *more,
    ]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)


def test_a_name_on_the_hub_is_fetched_and_converted(hub: LoopbackHub, tmp_path: Path) -> None:
    done = _convert(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert "downloading the model `org/tiny`" in done.stderr
    assert (tmp_path / "out" / "hf" / "tokenizer.json").exists()
    assert "config.json" in hub.fetched
    assert not {"pytorch_model.bin", "modeling_tiny.py"} & set(hub.fetched), (
        "neither pickles nor code are even fetched"
    )


def test_a_dry_run_reads_headers_and_fetches_no_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    weights = {
        path: content
        for path, content in hub.files["models/org/tiny"].items()
        if path.endswith(".safetensors")
    }
    hub.files["models/org/tiny"] |= {
        path: content + bytes(200_000) for path, content in weights.items()
    }
    done = _convert(hub, tmp_path, "org/tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not set(weights) & set(hub.fetched) and {path for path, _ in hub.parts} == set(weights)
    assert "read the headers" in done.stderr and "model.embed_tokens.weight" in done.stdout, (
        done.stdout
    )
    assert not (tmp_path / "out").exists()


def test_a_gated_model_needs_a_token_and_takes_it_from_the_environment(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    refused = _convert(hub, tmp_path, "org/secret")
    assert refused.returncode == 6 and "hf auth login" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    done = _convert(hub, tmp_path, "org/secret", HF_TOKEN="sesame")
    assert done.returncode == 0, done.stderr
    assert "sesame" not in done.stderr + done.stdout
    assert not any(
        b"sesame" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()
    )


def test_a_name_that_nobody_has_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    done = _convert(hub, tmp_path, "nobody/nothing")
    assert done.returncode == 6 and "neither a folder nor available on the hub" in done.stderr
    assert not (tmp_path / "out").exists()
