"""How the C library keeps memory for this process (glibc's mallopt(3)).

A reply about all domains has some ten megabytes, once as libvirtd sent it and once as the client
gets it. After the first such block glibc has all later ones in its heap, where small ones that stay
keep it from shrinking, and each thread has a heap of its own. So a gateway would stay as large as
it ever was.
"""

from __future__ import annotations

import ctypes

ALONE_BYTES = 128 << 10
"""A block of so many bytes has pages of its own, which go back to the kernel with it."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_small() -> None:
    """Large blocks are the kernel's again as soon as they are free; all threads share one heap.

    Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # That the threshold is set at all keeps glibc from raising it.
        mallopt(_MMAP_THRESHOLD, ALONE_BYTES)
        mallopt(_TRIM_THRESHOLD, ALONE_BYTES)
        mallopt(_ARENA_MAX, 1)
