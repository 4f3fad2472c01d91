"""What is kept of launcher pods: whose a folder is, and who works on them."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from csi.errors import Code, Failure
from csi.hosterrors import HostError
from csi.kubevirt import podlocks, pods
from csi.kubevirt.podlocks import PodLocks
from csi.kubevirt.pods import Pod

POD = Pod("11111111-1111-4111-8111-111111111111", "shop", "virt-launcher-vm", hook_in_pod=True)


def test_a_folder_tells_whose_it_is(tmp_path: Path) -> None:
    assert pods.noted(tmp_path) is None
    (tmp_path / ".pod.json.new").write_text("cut off")
    for pod in (POD, Pod(POD.uid, "shop", "another", hook_in_pod=False)):
        pods.note(tmp_path, pod)
        assert pods.noted(tmp_path) == pod
    (only,) = tmp_path.iterdir()
    assert stat.S_IMODE(only.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"uid": "u"}', '{"uid": "' + "x" * 5000 + '"}'])
def test_a_note_that_cannot_be_read_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / pods.FILE).write_text(text)
    with pytest.raises(HostError, match=r"pod\.json cannot be read"):
        pods.noted(tmp_path)


def test_one_thread_works_on_a_pod_and_may_do_so_within_itself() -> None:
    locks, inside, leave = PodLocks(), threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with locks.hold("a"), locks.hold("a"):
            inside.set()
            leave.wait(60)
            order.append("first")

    other = threading.Thread(target=work)
    other.start()
    assert inside.wait(60)
    with locks.hold("b"):
        leave.set()
    with locks.hold("a"):
        order.append("second")
    other.join(60)
    assert order == ["first", "second"]
    assert locks._held == {}


def test_a_second_one_that_has_waited_too_long_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(podlocks, "WAIT_S", 0.01)
    locks = PodLocks()
    said: list[Failure] = []

    def work() -> None:
        try:
            with locks.hold("a"):
                pass
        except Failure as failure:
            said.append(failure)

    with locks.hold("a"):
        other = threading.Thread(target=work)
        other.start()
        other.join(60)
    (failure,) = said
    assert failure.code is Code.ABORTED
    assert "another operation on the volumes of pod a is in progress: try again" in str(failure)
    assert locks._held == {}
