"""`miles doctor` on a small cluster: every node is examined, and the one with planted faults is
kept apart from the others."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

from tests.end_to_end.cluster.small_cluster import SmallCluster

HEAD, ODD = "10.77.0.1", "10.77.0.2"
ASK = textwrap.dedent(
    """
    import json, sys
    from dataclasses import asdict
    from pathlib import Path
    from milescli.doctor.cluster import cluster_findings
    findings = cluster_findings(sys.argv[1], runs_dir=Path(sys.argv[2]), with_trials=False)
    print(json.dumps([asdict(finding) for finding in findings]))
    """
)


def _examine(
    cluster: SmallCluster, runs_dir: object, **env: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """(check, node) -> finding."""
    done = cluster.run(
        [sys.executable, "-c", ASK, cluster.address, str(runs_dir)], env=env, timeout_s=800
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout.splitlines()[-1])
    return {(finding["check"], finding["node"]): finding for finding in findings}


def test_a_node_with_planted_faults_is_kept_apart_and_the_printed_command_mends_it(
    own_cluster: SmallCluster,
) -> None:
    own_cluster.run(["mount", "-o", "remount,size=500m", "/dev/shm"], node=1, timeout_s=120)
    # every node has a /tmp of its own
    findings = _examine(own_cluster, "/tmp", NCCL_SOCKET_IFNAME="ib0")
    assert (findings["shm", HEAD]["status"], findings["shm", ODD]["status"]) == ("ok", "fail")
    assert (
        findings["shared disk", ODD]["status"] == "fail" and ("shared disk", HEAD) not in findings
    )
    assert {findings["interfaces", node]["status"] for node in (HEAD, ODD)} == {"warn"}
    whole = {
        name: findings[name, ""]["status"]
        for name in ("cluster", "versions", "reach", "clocks", "group")
    }
    assert whole == dict.fromkeys(whole, "ok"), findings
    assert (
        "2 nodes" in findings["cluster", ""]["what"]
        and "across 2 nodes" in findings["group", ""]["what"]
    )
    assert findings["hostname", ODD]["fix"][0].startswith(f"echo '{ODD} node-2' |")
    own_cluster.run(["bash", "-c", findings["shm", ODD]["fix"][0]], node=1, timeout_s=120)
    look = (
        "from milescli.doctor.host import check_shm, shm_sizes; a, b = shm_sizes(); "
        "print(check_shm(size_bytes=a, free_bytes=b)[0].status)"
    )
    assert own_cluster.run([sys.executable, "-c", look], node=1, timeout_s=200).stdout == "ok\n"
