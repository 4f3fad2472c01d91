"""`python -m tests.kubernetes.tools`: builds the programs where needed and prints where they are.

With `--apt` it prints the Debian packages that a cluster needs instead.
"""

from __future__ import annotations

import sys

from tests.kubernetes.tools import APT_PACKAGES, ToolsError, build


def main() -> int:
    """Returns the exit status."""
    if "--apt" in sys.argv[1:]:
        print(*APT_PACKAGES)
        return 0
    try:
        print(build().directory)
    except ToolsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
