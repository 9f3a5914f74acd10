"""`/metrics` over HTTP, by a real client."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from milescli.core.errors import MachineError
from milescli.trackers.metrics_server import MetricsServer, require_free

BOUND_S = 10.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, lambda: "miles_step 3.0\n")
    yield made
    made.close()


def test_it_gives_figures_and_nothing_else(server: MetricsServer) -> None:
    with urllib.request.urlopen(server.url, timeout=BOUND_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert reply.read() == b"miles_step 3.0\n"
    for request in (
        server.url.replace("/metrics", "/"),
        urllib.request.Request(server.url, data=b"x", method="POST"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=BOUND_S)


def test_it_listens_on_this_machine_alone(server: MetricsServer) -> None:
    ours = [
        one.laddr
        for one in psutil.Process(os.getpid()).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and f":{one.laddr.port}/" in server.url
    ]
    assert [address.ip for address in ours] == ["127.0.0.1"]


def test_who_goes_away_or_says_nothing_holds_up_nobody(server: MetricsServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.send(b"GET /metr")
        with urllib.request.urlopen(server.url, timeout=BOUND_S) as reply:
            assert reply.status == 200


def test_a_port_in_use_is_refused_with_who_has_it(server: MetricsServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(MachineError, match=f"nobody can listen at 127.0.0.1:{port}") as refused:
        require_free("127.0.0.1", port)
    assert f"(process {os.getpid()}) does" in refused.value.why
    assert refused.value.fixes[0] == f"--set run.metrics_address=127.0.0.1:{port + 1}"
    with pytest.raises(MachineError, match="nobody can listen"):
        MetricsServer("127.0.0.1", port, lambda: "")


def test_a_port_is_free_again_when_it_is_closed() -> None:
    made = MetricsServer("127.0.0.1", 0, lambda: "")
    port = int(made.url.split(":")[2].split("/")[0])
    with urllib.request.urlopen(made.url, timeout=BOUND_S):
        pass
    made.close()
    require_free("127.0.0.1", port)


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(MachineError, match="no-such-host"):
        require_free("no-such-host.invalid", 9464)
