"""The libvirt hook: makes a domain's controller and LUNs exist before QEMU starts.

`SCRIPT` is the program: one plain file for any Python 3.11, to be linked or copied into
/etc/libvirt/hooks/qemu.d/. `main` is the same for the console command `virtlun-hook`.
"""

from __future__ import annotations

from pathlib import Path

from plugin.hook.script import main

SCRIPT = Path(__file__).with_name("script.py")

__all__ = ["SCRIPT", "main"]
