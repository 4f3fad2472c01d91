"""What the threads of a process wait for, for the text of a test that waited for it in vain."""

from __future__ import annotations

from pathlib import Path


def of_processes(*pids: int) -> str:
    """Returns a paragraph for each thread: its state, system call and kernel stack (proc(5)).

    What is gone meanwhile, or only root may read, is left out.
    """
    return "\n".join(_of_thread(task) for pid in pids for task in _tasks(pid))


def of_all_that_block() -> str:
    """Returns the same of all threads in an uninterruptible sleep: whose disk is stuck."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    tasks = [task for pid in pids for task in _tasks(pid)]
    return "\n".join(_of_thread(task) for task in tasks if "State:\tD" in _read(task / "status"))


def _tasks(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _of_thread(task: Path) -> str:
    state = next((line for line in _read(task / "status").splitlines() if "State:" in line), "")
    lines = [
        f"thread {task.name} ({_read(task / 'comm')}) {state}",
        f"  system call {_read(task / 'syscall')}, waits in {_read(task / 'wchan')}",
        *(f"  {line}" for line in _read(task / "stack").splitlines()),
    ]
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
