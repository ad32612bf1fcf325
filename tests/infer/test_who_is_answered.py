"""Whose requests a server answers, and how many of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_model import published, serving

from phalanx.infer.app import Limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("served"))


def test_a_key_is_asked_for(folder: Path) -> None:
    with serving(folder, Limits(api_key="secret")) as client:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": "Bearer secr\u00e9t"}, 401),
            ({"Authorization": "Basic secret"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
            ({"Authorization": "bearer  secret"}, 200),
        ):
            body = {"prompt": "a", "max_tokens": 1}
            found, answer = client.ask("/v1/completions", body, **headers)
            assert found == status
            assert status == 200 or answer["error"]["code"] == "invalid_api_key"
        for path in ("/v1/responses", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert client.ask(path, {})[0] == 401
        assert client.ask("/health")[0] == 200


def test_a_page_of_another_site_is_refused(folder: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with serving(folder, Limits(is_local=True)) as client:
        for kind, status in (
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("application/json; charset=utf-8", 200),
            ("Application/JSON", 200),
        ):
            found, answer = client.ask("/v1/completions", body, **{"Content-Type": kind})
            assert found == status, answer
        port = client.port
        for host, status in (
            (f"localhost:{port}", 200),
            ("app.localhost", 200),
            (f"[::1]:{port}", 200),
            ("192.168.0.7", 200),
            ("evil.example", 403),
            (f"evil.example:{port}", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("[::1", 403),
            ("", 403),
        ):
            for path in ("/v1/completions", "/stats", "/"):
                content = body if path.startswith("/v1") else None
                assert client.ask(path, content, Host=host)[0] == status, (host, path)


def test_more_texts_than_ever_fit_are_no_full_queue(folder: Path) -> None:
    with serving(folder, Limits(max_waiting=0), slots=4) as client:
        body = {"prompt": "Once", "max_tokens": 1}
        status, answer = client.ask("/v1/completions", {**body, "n": 5})
        assert status == 400 and "at most 4 together" in answer["error"]["message"]
        assert client.ask("/v1/completions", {**body, "n": 4})[0] == 200
