"""`virtlun`, the command for people. One module a noun; `output` prints, `main` is the door."""

from plugin.cli.main import main

__all__ = ["main"]
