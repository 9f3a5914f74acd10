"""Who may talk to an engine, from where, and who gets to see the key."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace

import psutil
import pytest

from milescli.backends.sglang.client.http import EngineRefused
from milescli.backends.sglang.launch.key import bearer
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.weights.channels import DistributedChannel
from milescli.platform.ports import RANGE
from tests.backends.sglang.conftest import HOST, KEY
from tests.backends.sglang.launch.test_server import spec

OPEN = ("/health", "/ready", "/metrics")
DANGEROUS = {
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/release_memory_occupation",
    "/pause_generation",
}


def ask(url: str, *, key: str | None, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers=bearer(key))
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def family(pid: int) -> list[psutil.Process]:
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every listening socket of the process and those that it started."""
    pids = {process.pid for process in family(pid)}
    sockets = [socket for socket in psutil.net_connections(kind="inet") if socket.pid in pids]
    return {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.mark.engine
@pytest.mark.parametrize("key", [None, "another-key"])
def test_every_endpoint_of_an_engine_but_its_health_refuses_a_stranger(service, key):
    paths = json.loads(ask(f"{service.engine.url}/openapi.json", key=KEY)[1])["paths"]
    asked = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if not path.startswith(OPEN)
    }
    assert {path for _, path in asked} >= DANGEROUS
    let_in = {
        (method, path): code
        for method, path in asked
        if (code := ask(f"{service.engine.url}{path}", key=key, method=method)[0]) != 401
    }
    assert let_in == {}
    assert ask(f"{service.engine.url}/health", key=None)[0] == 200


@pytest.mark.engine
@pytest.mark.timeout(600)  # far below the bound of the channel: who is refused does not wait for it
def test_a_trainer_with_another_key_is_refused_at_once(service):
    channel = DistributedChannel(backend="gloo", timeout_s=3600)
    with pytest.raises(EngineRefused, match=r"rejected \S+/init_weights_update_group.*HTTP 401"):
        channel.open([replace(service.address, api_key="another-key")])
    channel.close()


@pytest.mark.engine
def test_the_key_is_in_no_argument_no_log_and_no_response(service):
    log = service.engine.log_path.read_text()
    assert "server_args=" in log, (
        "SGLang's arguments are no longer in its log: nothing was looked through"
    )
    ours = family(service.engine.pid)
    seen = [log, *(" ".join(process.cmdline()) for process in ours)]
    seen.append(ask(f"{service.engine.url}/server_info", key=KEY)[1])
    seen += [repr(shown) for shown in (service.engine.spec, service.address)]
    assert [text for text in seen if KEY in text] == []


@pytest.mark.engine
def test_the_log_of_an_engine_that_is_well_shows_no_failure(service):
    log = service.engine.log_path.read_text()
    assert "The server is fired up" in log and "freeze_gc failed" not in log


@pytest.mark.engine
def test_every_socket_listens_on_the_given_address_alone(service):
    # it knows interfaces only, and takes the first address of the one that it is given
    of_gloo = "127.0.0.1"
    assert {address for address, _ in listening(service.engine.pid)} == {HOST, of_gloo}


@pytest.mark.engine
def test_the_ranks_of_an_engine_meet_at_a_port_that_no_outgoing_connection_takes(service):
    ours = {port for _, port in listening(service.engine.pid) if port in RANGE}
    # where it answers and where its ranks meet; gloo binds at once what the system gives it
    assert len(ours) == 2 and service.engine.spec.port in ours


def test_an_engine_beyond_loopback_needs_a_key(tmp_path):
    with pytest.raises(AssertionError, match=r"10\.1\.2\.3 without a key"):
        EngineServer(spec(tmp_path, host="10.1.2.3"))
    EngineServer(spec(tmp_path, host="10.1.2.3", api_key=KEY))
