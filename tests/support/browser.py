"""A headless Chromium, by DevTools' protocol through a pipe: JSON texts, each with a zero byte.

Elements are found as a screen reader finds them, by role and accessible name, and used as people
do, with keys and the mouse: what is found so can be reached by all.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

from tests.support.wait import DEADLINE_S, until

PROGRAM = "chromium"
OPTIONS = (
    "--headless",
    "--no-sandbox",  # of a root user it would refuse to start
    "--no-first-run",
    "--no-proxy-server",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--password-store=basic",
    "--remote-debugging-pipe",
)
#: Chromium's ends of the pipe are its file descriptors 3 and 4.
HANDS_ON = 'to=$1 from=$2; shift 2; exec "$@" 3<&"$to" 4>&"$from"'
#: From where on ours are, not to be among those.
FREE_FD = 10

Size = tuple[int, int]
DESKTOP: Size = (1280, 900)
PHONE: Size = (390, 800)


class PageError(AssertionError):
    """Something is not on the page, or a script failed; the text says what."""


def _pipe() -> tuple[int, int]:
    """Returns the ends of a pipe, to be read and to be written."""
    ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FREE_FD) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


class Browser:
    """A running Chromium; a context manager that ends it. `folder` gets its profile and its log."""

    def __init__(self, folder: Path) -> None:
        """Starts it."""
        self._log = folder / "chromium.log"
        to_read, self._to = _pipe()
        self._from, to_write = _pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("bash", "-c", HANDS_ON, "bash", str(to_read), str(to_write)),
                    *(PROGRAM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"),
                ],
                pass_fds=(to_read, to_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
                start_new_session=True,
            )
        os.close(to_read)
        os.close(to_write)
        self._last = 0
        self._read = b""
        self.events: deque[dict[str, Any]] = deque()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with_children = self._process.pid
        os.killpg(with_children, 15)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(with_children, 9)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Calls a method of DevTools, of one page if `session` is given, and returns its result."""
        self._last += 1
        text: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session:
            text["sessionId"] = session
        os.write(self._to, json.dumps(text).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(end, method)
            if answer.get("id") != self._last:
                self.events.append(answer)
            elif "error" in answer:
                raise PageError(f"{method} {params}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._from, 1 << 20) if ready else b""
            if not piece:
                log = self._log.read_text(errors="replace")[-3000:]
                raise PageError(f"Chromium does not answer to {method}:\n{log}")
            self._read += piece
        text, self._read = self._read.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(text)
        return answer

    def open(self, url: str, size: Size = DESKTOP, *, dark: bool = False, scale: float = 1) -> Page:
        """Opens a page in a new tab of that size, in pixels."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "DOM", "Accessibility"):
            page.send(f"{domain}.enable")
        page.resize(size, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=url)
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of DevTools on this page."""
        return self._browser.send(method, self._session, **params)

    def close(self) -> None:
        """Closes the tab."""
        self.send("Page.close")

    def resize(self, size: Size, scale: float = 1) -> None:
        """Gives it another size, in pixels of CSS, of `scale` pixels of a picture each."""
        width, height = size
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """Returns the value of an expression of JavaScript, awaited.

        Raises:
            PageError: it threw; the text is what.
        """
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise PageError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def text(self) -> str:
        """Returns what can be read on it."""
        return str(self.run("document.body?.innerText ?? ''"))

    def until(self, script: str, what: str = "") -> Any:
        """Waits until an expression is true, and returns its value."""

        def told() -> str:
            return f"{what or script}, on the page:\n{self.text()}\n{self.problems()}"

        return until(lambda: self.run(script), told, not_yet=PageError)

    def until_says(self, *parts: str) -> None:
        """Waits until each of these texts can be read on it."""
        texts = json.dumps(parts)
        self.until(f"{texts}.every(text => document.body.innerText.includes(text))", str(parts))

    def problems(self) -> list[str]:
        """Returns what scripts threw, and the errors that its console has."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                entry = params["entry"]
                found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def names(self, role: str) -> list[str]:
        """Returns the accessible names of what has a role, in the order of the page."""
        nodes = self._nodes(role=role)
        return [str(node.get("name", {}).get("value", "")) for node in nodes]

    def _nodes(self, **sought: str) -> list[dict[str, Any]]:
        root = self.send("DOM.getDocument", depth=0)["root"]["nodeId"]
        found = self.send("Accessibility.queryAXTree", nodeId=root, **sought)["nodes"]
        return [node for node in found if not node["ignored"]]

    def find(self, role: str, name: str) -> int:
        """Waits for what has this role and accessible name; returns DevTools' number of it."""

        def there() -> int | None:
            nodes = self._nodes(role=role, accessibleName=name)
            return int(nodes[0]["backendDOMNodeId"]) if nodes else None

        return until(
            there, lambda: f"the {role} {name!r}, on the page:\n{self.text()}", not_yet=PageError
        )

    def is_enabled(self, role: str, name: str) -> bool:
        """Whether it can be used."""
        self.find(role, name)
        (node,) = self._nodes(role=role, accessibleName=name)
        properties = {each["name"]: each["value"].get("value") for each in node["properties"]}
        return not properties.get("disabled", False)

    def press(self, role: str, name: str, *, times: int = 1) -> None:
        """Presses it with the mouse, so many times at once."""
        node = self.find(role, name)
        self.send("DOM.scrollIntoViewIfNeeded", backendNodeId=node)
        quad = self.send("DOM.getContentQuads", backendNodeId=node)["quads"][0]
        place = {"x": sum(quad[0::2]) / 4, "y": sum(quad[1::2]) / 4}
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.send(
                    "Input.dispatchMouseEvent", type=kind, button="left", clickCount=count, **place
                )

    def write(self, name: str, text: str, *, role: str = "textbox") -> None:
        """Writes into the text field of that label, in place of what it has."""
        node = self.find(role, name)
        self.send("DOM.focus", backendNodeId=node)
        self.run("document.activeElement.select()")
        self.send("Input.insertText", text=text)

    def choose(self, option: str) -> None:
        """Chooses an option of the one list that has it."""
        self.run(
            f"""(() => {{
                const [list, option] = [...document.querySelectorAll('select')]
                    .flatMap(list => [...list.options].map(option => [list, option]))
                    .find(([, option]) => option.text === {json.dumps(option)});
                list.value = option.value;
                list.dispatchEvent(new Event('change', {{ bubbles: true }}));
            }})()"""
        )

    def key(self, key: str, code: int, text: str = "") -> None:
        """Presses a key, such as Enter, of that Windows key code."""
        given = {"key": key, "windowsVirtualKeyCode": code, "code": key}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, path: Path) -> None:
        """Saves what is seen as a PNG."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
