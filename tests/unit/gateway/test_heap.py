"""What the gateway asks of the C library's heap."""

from __future__ import annotations

import subprocess
import sys

#: Prints how many blocks have pages of their own more than before, while 1 MiB is held: after a
#: larger block went, glibc of itself has such ones in its heap.
PROGRAM = """
import ctypes
from plugin.gateway import heap

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
{asked}
large = bytearray(16 << 20)
del large
before = libc.mallinfo2().hblks
held = bytearray(1 << 20)
print(libc.mallinfo2().hblks - before)
"""


def alone(asked: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(asked=asked)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def test_a_large_block_is_the_kernels_again_when_it_is_free() -> None:
    assert alone("heap.keep_small()") == 1
    assert alone("pass") == 0, "glibc does it of itself: the module has no reason any more"
