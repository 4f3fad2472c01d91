"""Uses a program's windows as a screen reader does, by AT-SPI; run by Debian's Python.

Takes a line of JSON from standard input, such as {"do": "press", "role": "push button", "name":
"Finish"}, and answers it with one: {"ok": true, "names": [...]}, or why not. Roles and names are
those of AT-SPI. It is of the display and the session bus that it is started with.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import gi

gi.require_version("Atspi", "2.0")
from gi.repository import Atspi, GLib  # noqa: E402 (its version is chosen before)

DEADLINE_S = 60.0
EVERY_S = 0.1


def below(node: Any) -> Iterator[Any]:
    """Yields a node and all below it, but for those that go away meanwhile."""
    yield node
    with contextlib.suppress(GLib.Error):
        for index in range(node.get_child_count()):
            if (child := node.get_child_at_index(index)) is not None:
                yield from below(child)


def found(role: str, name: str) -> Iterator[Any]:
    """Yields what has this role and a name that begins so, the newest window's last."""
    for node in below(Atspi.get_desktop(0)):
        with contextlib.suppress(GLib.Error):
            if node.get_role_name() == role and node.get_name().startswith(name):
                yield node


def can_be_used(node: Any) -> bool:
    """Whether it is on the screen, and not grey."""
    states = node.get_state_set()
    return all(map(states.contains, (Atspi.StateType.SHOWING, Atspi.StateType.SENSITIVE)))


def wait_for(role: str, name: str) -> Any:
    """Returns the last that can be used of these, once there is one."""
    end = time.monotonic() + DEADLINE_S
    while True:
        nodes = [node for node in found(role, name) if can_be_used(node)]
        if nodes:
            return nodes[-1]
        if time.monotonic() > end:
            raise LookupError(f"there is no {role} {name!r}")
        time.sleep(EVERY_S)


def act(do: str, role: str, name: str, text: str = "") -> None:
    """Does one thing: `press`, `click`, `select`, `focus`, `write` a text, or `find`.

    A press is the program's own action, which answers nothing more while it asks a question: what
    may lead to one is clicked on with the mouse.
    """
    node = wait_for(role, name)
    if do == "press":
        node.get_action_iface().do_action(0)
    elif do == "select":
        node.get_parent().get_selection_iface().select_child(node.get_index_in_parent())
    elif do == "focus":
        node.get_component_iface().grab_focus()
    elif do == "write":
        node.get_editable_text_iface().set_text_contents(text)
    elif do == "click":
        place = node.get_component_iface().get_extents(Atspi.CoordType.SCREEN)
        x, y = place.x + place.width // 2, place.y + place.height // 2
        Atspi.generate_mouse_event(x, y, "b1c")
    else:
        assert do == "find", do


def main() -> None:
    """Answers until standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "names":
                answer = {
                    "ok": True,
                    "names": [each.get_name() for each in found(asked["role"], "")],
                }
            else:
                act(**asked)
                answer = {"ok": True}
        except (LookupError, GLib.Error, AttributeError) as error:
            names = {
                f"{node.get_role_name()} {node.get_name()!r}"
                for node in below(Atspi.get_desktop(0))
                if node.get_name()
            }
            answer = {"ok": False, "why": f"{asked}: {error}; there are {sorted(names)}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
