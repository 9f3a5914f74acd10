"""A spot machine is taken away: the run saves in time, its copy in an object store is complete, and
another machine goes on with it, bit for bit. Its engines get new weights through the store, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.end_to_end.runs import Workplace, learned, step_done
from tests.loopback_services import BUCKET, metadata_server, needs_s3, s3_server

STEPS = ("--set", "train.steps=40", "--set", "eval.every=0", "--set", "checkpoint.every=5")


@needs_s3
def test_a_run_goes_on_elsewhere_when_its_machine_is_taken_away(
    workplace: Workplace, tmp_path: Path
) -> None:
    launch = ("launch", "--recipe", "tiny.yaml", *STEPS)
    calm = workplace.miles(*launch, "--name", "undisturbed")
    assert calm.code == 0, calm
    with s3_server(tmp_path) as s3, metadata_server() as metadata:
        away = Workplace(tmp_path)
        away.environment |= s3.environment
        away.environment["MILES_METADATA_URL"] = metadata.url
        metadata.replies["PUT /latest/api/token"] = 200, "token"
        mirror = f"s3://{BUCKET}/runs"
        sets = ("--set", f"checkpoint.mirror={mirror}", "--set", "machine.preemption=aws")
        sets += ("--set", f"weights.store=s3://{BUCKET}/weights", "--set", "weights.full_every=3")
        process = away.start(*launch, *sets, "--name", "spot")
        away.wait_for("spot", step_done(6), process)
        told = json.dumps({"action": "terminate", "time": "2031-05-01T08:00:00Z"})
        metadata.replies["GET /latest/meta-data/spot/instance-action"] = 200, told
        stopped = away.finish(process)
        assert stopped.code == 75 and "AWS will terminate this spot instance" in stopped.err
        events = away.events("spot")
        at = [event for event in events if event["event"] == "StepDone"][-1]["step"]
        kinds = ("CheckpointSaved", "CheckpointMirrored")
        newest = {e["event"]: e["step"] for e in events if e["event"] in kinds}
        assert 6 <= at < 40 and newest == dict.fromkeys(kinds, at), stopped
        said = json.loads(away.miles("status", "spot", "--json").out)
        assert (said["mirror"], said["mirrored_step"]) == (mirror, at)
        secret = s3.environment["AWS_SECRET_ACCESS_KEY"].encode()
        files = [file for file in away.run("spot").rglob("*") if file.is_file()]
        for private in (secret, b"X-Amz-Signature"):
            assert not [file for file in files if private in file.read_bytes()]
        shutil.rmtree(away.run("spot"))
        del metadata.replies["GET /latest/meta-data/spot/instance-action"]
        resumed = away.miles("resume", f"{mirror}/spot")
        assert resumed.code == 0 and f"continuing from step {at}" in resumed.err, resumed
        exported = away.miles("export", "spot", "--to", f"s3://{BUCKET}/models/spot")
        assert exported.code == 0, exported
    steps = [*map(learned, workplace.steps("undisturbed"))]
    assert [*map(learned, away.steps("spot"))] == steps and len(steps) == 40
