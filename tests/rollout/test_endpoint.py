"""Tests of which proxy a request goes through: the one that curl would take."""

from __future__ import annotations

import pytest

from milescli.rollout.endpoint import proxy_for

HTTP, HTTPS = "http://judge.corp.example/v1", "https://judge.corp.example/v1"
PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        (HTTP, {}, None),
        (HTTP, {"http_proxy": PROXY}, PROXY),
        (HTTP, {"http_proxy": "proxy:3128"}, PROXY),
        (HTTP, {"HTTP_PROXY": PROXY}, None),
        (HTTP, {"https_proxy": PROXY}, None),
        (HTTP, {"ALL_PROXY": PROXY}, PROXY),
        (HTTPS, {"HTTPS_PROXY": PROXY}, PROXY),
        (HTTPS, {"https_proxy": PROXY, "HTTPS_PROXY": "http://other"}, PROXY),
        (HTTP, {"http_proxy": PROXY, "no_proxy": "corp.example"}, None),
        (HTTP, {"http_proxy": PROXY, "no_proxy": ".corp.example"}, None),
        (HTTP, {"http_proxy": PROXY, "NO_PROXY": "a, judge.corp.example"}, None),
        (HTTP, {"http_proxy": PROXY, "no_proxy": "orp.example"}, PROXY),
        (HTTP, {"http_proxy": PROXY, "no_proxy": "*"}, None),
        ("http://10.1.2.3:8000/v1", {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, None),
        ("http://10.1.2.3:8000/v1", {"http_proxy": PROXY, "no_proxy": "192.168.0.0/16"}, PROXY),
        ("http://127.0.0.1:8000/v1", {"http_proxy": PROXY, "no_proxy": "localhost"}, PROXY),
        ("http://[::1]:8000/v1", {"http_proxy": PROXY, "no_proxy": "[::1]"}, None),
    ],
)
def test_the_proxy_is_the_one_that_curl_takes(
    url: str, environ: dict[str, str], proxy: str | None
) -> None:
    assert proxy_for(url, environ) == proxy
