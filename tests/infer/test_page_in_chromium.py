"""The page that tries a model, in a headless Chromium that is driven over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served_model import long_published, published, serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """A page of Chromium, spoken to by the DevTools protocol."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._number, self._rest = send, receive, 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session: str | None = None
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    session: str | None = None

    def ask(self, method: str, **params: Any) -> Any:
        """Send a command, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._receive, 1 << 16)
            content, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(content)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression: str) -> Any:
        """Return the value of a line of JavaScript in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        for _ in range(600):
            if self.value(expression):
                return
            time.sleep(0.1)
        raise AssertionError(f"never true: {expression}")


@contextmanager
def browsing(home: Path) -> Generator[Browser]:
    """Start Chromium, whose pipe it expects as the files 3 and 4."""
    assert CHROMIUM is not None
    (read_commands, send), (receive, write_answers) = os.pipe(), os.pipe()
    script = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += [f"--user-data-dir={home}", "--window-size=900,760"]
    process = subprocess.Popen(
        ["bash", "-c", script, *words],
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(send, receive)
    finally:
        process.kill()
        process.wait()
        for file in (read_commands, send, receive, write_answers):
            os.close(file)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_prompt_is_continued_on_the_page(tmp_path: Path) -> None:
    picture = Path(os.environ.get("PAGE_PICTURE", tmp_path / "page.png"))
    with serving(published(tmp_path)) as client, browsing(tmp_path / "home") as page:
        page.ask("Page.navigate", url=f"http://127.0.0.1:{client.port}/")
        page.wait("document.getElementById('model')?.textContent === 'hf'")
        page.value("document.getElementById('prompt').value = 'Once upon'")
        page.value("document.getElementById('max_tokens').value = 20")
        page.value("document.getElementById('temperature').value = 0")
        page.value("document.getElementById('go').click()")
        page.wait("document.getElementById('speed').textContent !== '-'")
        text = page.value("document.getElementById('text').textContent")
        body = {"prompt": "Once upon", "max_tokens": 20, "temperature": 0}
        expected = client.ask("/v1/completions", body)[1]["choices"][0]["text"]
        assert text == f"Once upon{expected}" and expected
        content = page.ask("Page.captureScreenshot")["data"]
        picture.write_bytes(base64.b64decode(content))
        page.value("document.getElementById('max_tokens').value = 1000")
        page.value("document.getElementById('go').click()")
        page.wait("document.getElementById('error').textContent.includes('nearest that fits')")
        assert page.value("document.getElementById('go').disabled") is False
        # A stopped text frees its blocks.
        page.value("document.getElementById('max_tokens').value = 100")
        page.value("document.getElementById('go').click()")
        page.value("document.getElementById('stop').click()")
        page.wait("!document.getElementById('go').disabled")
        client.wait_until_idle()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_chat_on_the_page_has_turns(tmp_path: Path) -> None:
    picture = Path(os.environ.get("CHAT_PICTURE", tmp_path / "chat.png"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with serving(long_published(tmp_path, template)) as client, browsing(tmp_path / "home") as page:
        page.ask("Page.navigate", url=f"http://127.0.0.1:{client.port}/")
        page.wait("document.getElementById('model')?.textContent === 'hf'")
        page.value("document.getElementById('of_chat').click()")
        page.value("document.getElementById('system').value = 'Be brief.'")
        page.value("document.getElementById('max_tokens').value = 20")
        page.value("document.getElementById('temperature').value = 0")
        messages = [{"role": "system", "content": "Be brief."}]
        for said in ("Hello", "Again"):
            page.value(f"document.getElementById('prompt').value = '{said}'")
            page.value("document.getElementById('go').click()")
            page.wait("document.getElementById('go').disabled === false")
            messages.append({"role": "user", "content": said})
            body = {"messages": messages, "max_tokens": 20, "temperature": 0}
            _, answer = client.ask("/v1/chat/completions", body)
            messages.append(answer["choices"][0]["message"])
        shown = "[...document.querySelectorAll('#turns p')].map(each => each.textContent)"
        texts = json.loads(page.value(f"JSON.stringify({shown})"))
        assert texts == [each["content"] for each in messages[1:]]
        picture.write_bytes(base64.b64decode(page.ask("Page.captureScreenshot")["data"]))
        page.value("document.getElementById('max_tokens').value = 3000")
        page.value("document.getElementById('prompt').value = 'More'")
        page.value("document.getElementById('go').click()")
        page.wait("document.getElementById('error').textContent.includes('nearest that fits')")
        assert page.value("document.getElementById('prompt').value + turns.length") == "More4"
        page.value("document.getElementById('max_tokens').value = 1000")
        page.value("document.getElementById('go').click()")
        page.wait("document.querySelectorAll('#turns p')[5]?.textContent.length > 5")
        page.value("document.getElementById('stop').click()")
        page.wait("document.getElementById('go').disabled === false")
        client.wait_until_idle()
        page.value("document.getElementById('clear').click()")
        assert page.value("document.querySelectorAll('#turns p').length + turns.length") == 0
