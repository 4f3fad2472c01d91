"""A polkitd of one's own on a D-Bus of one's own: the installed programs, with a test's rules.

Nothing of the host's is used or touched: polkitd finds the rules in its fixed folders, which are
ours in its mount namespace, and who is to talk to it gets the bus by `environment`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.wait import listens, serves

POLKITD = "/usr/lib/polkit-1/polkitd"
RULE_FOLDERS = ("/etc/polkit-1/rules.d", "/usr/share/polkit-1/rules.d")

BUS = """\
<busconfig>
  <type>system</type>
  <listen>unix:path={path}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
  </policy>
</busconfig>
"""


class Polkit:
    """A running polkitd; a context manager that ends it and its bus. Needs root.

    `scratch` must be short and enterable for everybody; `rules` is the text of the only rules file.
    """

    def __init__(self, scratch: Path, rules: str) -> None:
        """Starts both and waits until polkitd answers."""
        self._folder = scratch
        self._log = scratch / "polkit.log"
        empty, ours = scratch / "no-rules", scratch / "rules"
        for folder in (scratch, empty, ours):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        (ours / "50-test.rules").write_text(rules)
        (ours / "50-test.rules").chmod(0o644)
        config = scratch / "bus.conf"
        self._socket = scratch / "bus"
        config.write_text(BUS.format(path=self._socket))
        self.environment = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={self._socket}"}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(["dbus-daemon", "--nofork", "--nopidfile", f"--config-file={config}"])
            self._wait(lambda: listens(self._socket))
            mounts = [f"mkdir -p {path}" for path in RULE_FOLDERS]
            mounts += [f"mount --bind {ours} {RULE_FOLDERS[0]}"]
            mounts += [f"mount --bind {empty} {RULE_FOLDERS[1]}"]
            script = "\n".join([*mounts, f"exec {POLKITD} --no-debug"])
            unshare = ["unshare", "--mount", "--propagation", "slave"]
            self._start([*unshare, "sh", "-ec", script])
            self._wait(self._answers)
        except BaseException:
            self.close()
            raise

    def _start(self, words: list[str]) -> None:
        self._processes.append(
            subprocess.Popen(
                words,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=self._log.open("ab"),
                stderr=subprocess.STDOUT,
            )
        )

    def _wait(self, ready: Callable[[], bool]) -> None:
        serves(self._processes[-1], ready, "polkit", self._log)

    def _answers(self) -> bool:
        """Whether polkitd says yes to root, who may do anything."""
        words = ["pkcheck", "--action-id", "org.libvirt.unix.manage", "--process", str(os.getpid())]
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, check=False
        )
        return done.returncode == 0

    def close(self) -> None:
        """Ends both."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def __enter__(self) -> Polkit:
        """Returns the running polkitd."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.close()
