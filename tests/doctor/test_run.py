"""Tests of reporting the findings, and the whole doctor on this machine."""

from __future__ import annotations

import io
import json

import pytest

from milescli.console.output import Mode, Output
from milescli.doctor import run as module
from milescli.doctor.finding import Check, Finding, fail, ok, skip, warn
from milescli.doctor.finding import fail as failed
from milescli.doctor.fixes import DoctorOptions
from milescli.doctor.run import mask, mask_environment, mask_secrets, run_doctor

NOTHING = DoctorOptions()
FINDINGS = [
    *ok("python", "Python 3.11"),
    *warn("shm", "1 GiB", why="larger models need more", fix="mount -o remount"),
    *skip("data", "on the hub"),
    *failed("ports", "0 of 16", why="all taken", fix=["ss -ltn", "reboot"]),
]


def _doctor(
    monkeypatch: pytest.MonkeyPatch,
    findings: list[Finding],
    mode: Mode,
    options: DoctorOptions = NOTHING,
) -> tuple[int, str, str]:
    checks = [
        Check(name=finding.check, run=lambda finding=finding: [finding])  # type: ignore[misc]
        for finding in findings
    ]
    monkeypatch.setattr(module, "all_checks", lambda _: checks)
    stdout, stderr = io.StringIO(), io.StringIO()
    code = run_doctor(options, output=Output(mode, stdout=stdout, stderr=stderr))
    return code, stdout.getvalue(), stderr.getvalue()


def test_a_fail_ends_with_4_and_is_shown_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    code, stdout, stderr = _doctor(monkeypatch, FINDINGS, Mode.HUMAN)
    assert code == 4
    assert [line.split()[:2] for line in stdout.splitlines()[1:]] == [
        ["python", "ok"],
        ["shm", "warn"],
        ["data", "skip"],
        ["ports", "fail"],
    ]
    assert (
        "ports: all taken" in stderr
        and "fix: ss -ltn" in stderr
        and "fix: reboot" in stderr
        and "not ready" in stderr
    )


def test_warnings_and_skips_end_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _doctor(monkeypatch, FINDINGS[:3], Mode.HUMAN)[0] == 0


def test_json_mode_has_everything_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, stdout, _ = _doctor(monkeypatch, FINDINGS, Mode.JSON)
    (line,) = stdout.splitlines()
    report = json.loads(line)
    assert (
        code == 4
        and report["kind"] == "doctor"
        and report["counts"] == {"ok": 1, "warn": 1, "fail": 1, "skip": 1}
    )
    assert report["findings"][3] == {
        "check": "ports",
        "status": "fail",
        "what": "0 of 16",
        "why": "all taken",
        "fix": ["ss -ltn", "reboot"],
        "node": "",
    }


def test_an_option_that_mends_is_shown_as_a_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = failed("disk", "full", why="x", fix="--set run.dir=/another")
    assert (
        "fix: miles launch --recipe quickstart --set run.dir=/another"
        in _doctor(monkeypatch, findings, Mode.HUMAN)[2]
    )


def test_fixes_bear_the_arguments_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = failed(
        "disk", "full", why="x", fix=["--set run.dir=/another", "miles doctor   # again"]
    )
    options = DoctorOptions(recipe="quickstart", sets=["data.eval=null"])
    stderr = _doctor(monkeypatch, findings, Mode.HUMAN, options)[2]
    assert (
        "fix: miles launch --recipe quickstart --set data.eval=null --set run.dir=/another"
        in stderr
    )
    assert "fix: miles doctor --recipe quickstart --set data.eval=null   # again" in stderr


def test_a_recipe_that_cannot_be_read_is_a_fail_and_the_machine_is_looked_at_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, stdout, stderr = _doctor(
        monkeypatch,
        FINDINGS[:1],
        Mode.HUMAN,
        DoctorOptions(recipe="quickstart", sets=["data.promts=x"]),
    )
    assert code == 4
    assert [line.split()[:2] for line in stdout.splitlines()[1:]] == [
        ["recipe", "fail"],
        ["python", "ok"],
    ]
    assert "fix: miles launch --recipe quickstart --set data.prompts=x" in stderr


def test_a_check_that_prints_does_not_spoil_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loud() -> list[Finding]:
        print("loading my reward")
        return ok("reward", "fine")

    monkeypatch.setattr(module, "all_checks", lambda _: [Check(name="reward", run=loud)])
    assert run_doctor(NOTHING, output=Output(Mode.JSON)) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["counts"]["ok"] == 1 and "loading my reward" in said.err


def test_no_secret_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret_of_mine")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:mirror_secret_of_mine@mirror")
    monkeypatch.setenv("NCCL_SECRET", "nccl_secret_of_mine")
    leaky = failed(
        "hub",
        "hf_secret_of_mine",
        why="https://me:mirror_secret_of_mine@mirror",
        fix="login wandb_secret_of_mine",
    )
    for mode in (Mode.JSON, Mode.HUMAN):
        _, stdout, stderr = _doctor(monkeypatch, leaky, mode)
        assert "secret_of_mine" not in stdout + stderr and "***" in stdout
        if mode is Mode.JSON:
            report = json.loads(stdout)
            assert (
                report["environment"]["HF_ENDPOINT"] == "https://***@mirror"
                and report["versions"]["ray"]
            )


@pytest.mark.engine
def test_this_machine_is_ready_for_ray_an_engine_a_trainer_and_new_weights() -> None:
    stdout = io.StringIO()
    code = run_doctor(NOTHING, output=Output(Mode.JSON, stdout=stdout, stderr=io.StringIO()))
    findings = {finding["check"]: finding for finding in json.loads(stdout.getvalue())["findings"]}
    failed = [finding for finding in findings.values() if finding["status"] == "fail"]
    assert not failed and code == 0
    assert {"torch", "ray", "collective", "engine", "agreement", "trainer", "weights"} <= set(
        findings
    )


SECRETS = {
    "WANDB_API_KEY": "sk-12345678",
    "HF_TOKEN": "hf_abcdef",
    "db_password": "hunter22",
    "HOME": "/home/me",
}


def test_no_secret_is_shown() -> None:
    findings = mask_secrets(
        fail("x", "sk-12345678", why="hf_abcdef in /home/me", fix="login hunter22")[0], SECRETS
    )
    assert (findings.what, findings.why, findings.fix) == ("***", "*** in /home/me", ["login ***"])


def test_short_values_are_not_masked_for_they_are_no_secrets() -> None:
    assert mask_secrets(ok("x", "1 of 2")[0], {"USE_TOKENS": "1"}).what == "1 of 2"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:hunter2@mirror/path", "https://***@mirror/path"),
        ("http://me:p@ss@proxy:3128 and http://a:b@c", "http://***@proxy:3128 and http://***@c"),
        ("https://mirror/x?user=me&api_key=abc&n=1", "https://mirror/x?user=me&api_key=***&n=1"),
        ("https://mirror/x?X-Amz-Signature=abc", "https://mirror/x?X-Amz-Signature=***"),
        ("https://mirror/models/name", "https://mirror/models/name"),
    ],
)
def test_credentials_of_addresses_are_masked(text: str, masked: str) -> None:
    assert mask(text, {}) == masked


def test_a_password_of_an_address_is_masked_where_a_library_tells_a_piece_of_it() -> None:
    environ = {
        "HF_ENDPOINT": "https://u:pw@ss@nowhere",
        "https_proxy": "http://me:hunter2@proxy:3128",
    }
    assert (
        mask("nonnumeric port: 'pw@ss@nowhere'; hunter2", environ)
        == "nonnumeric port: '***@nowhere'; ***"
    )


def test_of_a_variable_that_sounds_secret_even_a_short_value_is_kept_back() -> None:
    environ = {
        "RAY_REDIS_PASSWORD": "abc",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "HF_TOKEN": "hf_abcdef",
        "MILES_X": "hf_abcdef",
    }
    assert mask_environment(environ, prefixes=("RAY_", "MILES_")) == {
        "MILES_X": "***",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_REDIS_PASSWORD": "***",
    }
