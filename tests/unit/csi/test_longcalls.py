"""Work that goes on when a call can wait no longer."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from csi.errors import Code, Failure
from csi.hostdevice.loop import LoopDevices
from csi.hostdevice.loopctl import Loop
from csi.longcalls import LongCalls
from csi.proto import csi_pb2 as pb
from csi.targets import Targets
from tests.support.fake_target import FakeTarget
from tests.unit.csi.conftest import World, mount, refused


def test_a_call_that_waits_no_longer_leaves_the_work_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, end, begun = LongCalls(0.01), threading.Event(), []

    def work() -> str:
        begun.append(1)
        assert end.wait(60)
        return "done"

    message = refused(lambda: jobs.run("v", "checking v", work), Code.DEADLINE_EXCEEDED)
    assert message.startswith("checking v has not ended within 0 s and goes on: ")
    refused(lambda: jobs.run("v", "checking v", work), Code.DEADLINE_EXCEEDED)
    jobs._wait_s = 60
    assert jobs.run("w", "checking w", lambda: 1) == 1
    job, waiting = jobs._jobs["v"], threading.Semaphore(0)
    result = job.result

    def waits(timeout: float | None = None) -> str:
        waiting.release()
        return str(result(timeout))

    monkeypatch.setattr(job, "result", waits)
    with ThreadPoolExecutor(3) as executor:
        answers = [executor.submit(jobs.run, "v", "checking v", work) for _ in range(3)]
        assert all(waiting.acquire(timeout=60) for _ in answers)
        end.set()
        assert [each.result() for each in answers] == ["done"] * 3
    assert len(begun) == 1
    assert not jobs._jobs


def test_a_failure_reaches_each_that_waits_and_the_next_begins_anew() -> None:
    jobs = LongCalls()

    def fail() -> None:
        raise TimeoutError("its own")

    for _ in range(2):
        with pytest.raises(TimeoutError, match="its own"):
            jobs.run("v", "checking v", fail)
    assert jobs.run("v", "checking v", lambda: 2) == 2


def test_what_ends_at_the_moment_when_the_call_gives_up_is_the_call_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            found = super().result(60)
            if timeout is not None:
                raise TimeoutError
            return found

    monkeypatch.setattr("csi.longcalls.Future", Late)
    assert LongCalls().run("v", "checking v", lambda: 3) == 3


def test_without_a_thread_nothing_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = LongCalls()

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            jobs.run("v", "checking v", lambda: 4)
    assert jobs.run("v", "checking v", lambda: 4) == 4


def test_a_check_of_a_file_system_that_takes_long_is_not_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging goes on; it holds the volume, and the same call made again has its result."""
    handle = world.create().volume_id
    end, mounted = threading.Event(), world.host.mount
    calls = []

    def slow(volume: str, device: Path, target: Path, fs_type: str, options: list[str]) -> None:
        calls.append(device)
        assert end.wait(60)
        mounted(volume, device, target, fs_type, options)

    monkeypatch.setattr(world.host, "mount", slow)
    world.node._jobs._wait_s = 0.05
    message = refused(lambda: world.stage(handle), Code.DEADLINE_EXCEEDED)
    assert message.startswith(f"staging volume {handle} has not ended")
    world.node._jobs._wait_s = 60
    for call in (
        lambda: world.unstage(handle),
        lambda: world.delete(handle),
        lambda: world.stage(handle, mount("xfs")),
    ):
        refused(call, Code.ABORTED)
    threading.Timer(0.05, end.set).start()
    world.stage(handle)
    assert len(calls) == 1
    assert world.host.at(Path(world.staging)) is not None
    world.unstage(handle)
    world.delete(handle)


def test_an_export_or_a_device_that_does_not_answer_keeps_no_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, end = tmp_path / "file", threading.Event()
    file.touch()
    found = file.stat()
    devices = LoopDevices(Targets([FakeTarget()]), probe_s=0.01)
    hung: set[object] = {file}

    def wait_for(what: object) -> bool:
        return what not in hung or end.wait(60)

    real = Path.stat

    def stat(path: Path, **options: bool) -> object:
        wait_for(path)
        return real(path, **options)

    loop = Loop(Path("/dev/loop9"), "virtlun:v", (found.st_dev, found.st_ino), False, True, False)
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(devices, "_export", lambda _volume, *, shared: file)
    monkeypatch.setattr(devices, "_loops", lambda _: [loop])
    monkeypatch.setattr("csi.hostdevice.loopctl.encoded", lambda device: device)
    monkeypatch.setattr(devices._host, "answers", lambda _, device: wait_for(device))
    for _ in range(2):
        with pytest.raises(Failure, match="looking at the target's export") as failure:
            devices.attach("v")
        assert failure.value.code is Code.DEADLINE_EXCEEDED
    hung.clear()
    hung.add(loop.device)
    end.set()
    devices._probes._wait_s = 60
    devices.attach("v")
    end.clear()
    devices._probes._wait_s = 0.01
    said = ""
    while not said.startswith("reading /dev/loop9 of virtlun:v"):  # the file is looked at before
        with pytest.raises(Failure) as failure:
            devices.attach("v")
        said = str(failure.value)
    end.set()


def test_unstaging_waits_no_longer_either(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    end, unmount = threading.Event(), world.host.unmount

    def slow(volume: str, target: Path) -> None:
        assert end.wait(60)
        unmount(volume, target)

    monkeypatch.setattr(world.host, "unmount", slow)
    world.node._jobs._wait_s = 0.05
    request = pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=world.staging)
    refused(lambda: world.node.node_unstage_volume(request), Code.DEADLINE_EXCEEDED)
    end.set()
    world.node._jobs._wait_s = 60
    world.unstage(handle)
    assert not world.host.mounted
