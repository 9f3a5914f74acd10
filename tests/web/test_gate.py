"""Who is let in, and what a browser is told to keep to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.web.gate import Gate, new_key
from tests.fake_run import WrittenRun
from tests.web.serving import GATE, KEY, client_of, site_of, with_host

PAGES = ("/", "/static/index.html", "/api/runs", "/api/runs/tiny-1/columns", "/nowhere")


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("wrong", ["", "?key=", "?key=wrong", f"?key={KEY}x", f"?key={KEY[:-1]}"])
def test_nothing_is_shown_without_the_key(folder: Path, path: str, wrong: str) -> None:
    with client_of(site_of(folder), has_key=False) as client:
        response = client.get(path + wrong)
    assert response.status_code == 403
    assert "needs its key" in response.text and KEY not in response.text


@pytest.mark.parametrize("value", ["", "wrong", '"', "\u00e4", KEY + "x"])
def test_a_wrong_cookie_or_bearer_is_none(folder: Path, value: str) -> None:
    with client_of(site_of(folder), has_key=False) as client:
        for headers in ({"cookie": f"miles_ui_8000={value}"}, {"authorization": f"Bearer {value}"}):
            sent = {name: text.encode() for name, text in headers.items()}
            assert client.get("/api/runs", headers=sent).status_code == 403


@pytest.mark.parametrize(
    "other", ['a={"b": [1, 2]}', "a b=c", "a", "a=b c", "a\u00ef=\u00e9", "=;;"]
)
def test_cookies_of_other_programs_on_this_host_lock_nobody_out(folder: Path, other: str) -> None:
    with client_of(site_of(folder), has_key=False) as client:
        for cookie in (f"{other}; miles_ui_8000={KEY}", f"miles_ui_8000={KEY}; {other}"):
            assert client.get("/api/runs", headers={"cookie": cookie.encode()}).status_code == 200


def test_the_key_becomes_a_cookie_that_no_script_reads(run: WrittenRun, folder: Path) -> None:
    with client_of(site_of(folder), has_key=False) as client:
        entered = client.get(f"/?key={KEY}&dark=1")
        assert (entered.status_code, entered.headers["location"]) == (303, "/?dark=1")
        kept = entered.headers["set-cookie"]
        assert f"miles_ui_8000={KEY}" in kept
        assert "HttpOnly" in kept and "SameSite=strict" in kept
        assert client.get("/api/runs").json()["runs"][0]["id"] == "tiny-1"
        assert client.get("/").status_code == 200


def test_a_link_of_another_site_leads_in_by_a_step_of_our_own(folder: Path) -> None:
    """A strict cookie is not sent where such a link is redirected to."""
    with client_of(site_of(folder), has_key=False) as client:
        entered = client.get(f"/?key={KEY}", headers={"sec-fetch-site": "cross-site"})
    assert entered.status_code == 200 and "url=/" in entered.text
    assert KEY not in entered.text and KEY in entered.headers["set-cookie"]


def test_a_wrong_key_sets_no_cookie(folder: Path) -> None:
    with client_of(site_of(folder), has_key=False) as client:
        assert "set-cookie" not in client.get("/?key=wrong").headers


@pytest.mark.parametrize(
    ("host", "header", "is_known"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "localhost:9", True),
        ("127.0.0.1", "LOCALHOST.", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "127.0.0.1:evil", False),
        ("127.0.0.1", "192.168.0.7", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", None, False),
        ("192.168.0.7", "192.168.0.7:8000", True),
        ("192.168.0.7", "192.168.0.8:8000", False),
        ("gpu-7", "GPU-7:8000", True),
        ("0.0.0.0", "192.168.0.7:8000", True),
        ("0.0.0.0", f"{socket.gethostname()}:8000", True),
        ("0.0.0.0", "evil.example", False),
        ("::", "[fd00::1]:8000", True),
    ],
)
def test_a_foreign_name_is_refused(host: str, header: str | None, is_known: bool) -> None:
    assert with_host(host).knows_host(header) is is_known


def test_a_page_whose_name_was_made_to_point_here_reads_nothing(
    run: WrittenRun, folder: Path
) -> None:
    with client_of(site_of(folder)) as client:
        response = client.get("/api/runs", headers={"host": "evil.example:8000"})
    assert response.status_code == 400 and set(response.json()) == {"what", "why", "fix"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(folder: Path, method: str) -> None:
    with client_of(site_of(folder)) as client:
        response = client.request(method, "/api/runs")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", [*PAGES, "/?key=wrong", "/static/no.js"])
def test_every_response_holds_the_browser_to_our_files(folder: Path, path: str) -> None:
    with client_of(site_of(folder)) as client:
        headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "cache-control" in headers
    assert "access-control-allow-origin" not in headers


def test_head_says_what_get_would(run: WrittenRun, folder: Path) -> None:
    with client_of(site_of(folder)) as client:
        run.tell()
        assert client.head("/api/runs").headers["etag"] == client.get("/api/runs").headers["etag"]
        assert client.head("/api/runs/tiny-1/live").status_code == 200


def test_keys_have_128_bits_and_are_never_shown() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) == 22  # of 6 bits each
    assert KEY not in repr(GATE)


@settings(max_examples=30)
@given(st.text())
def test_only_the_key_is_the_key(text: str) -> None:
    gate = Gate(key=new_key(), host="127.0.0.1", port=1)
    assert not gate.is_key(text) and gate.is_key(gate.key)
