"""The `virtlun` commands that texts tell a person to type: they are there, as written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from plugin.cli.main import main

_BLOCK = re.compile(r"^ *```(?:sh|text)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(virtlun [^`\n]+)`")
_BEGINS = re.compile(r"(?:^\s*(?:sudo )?|\s--\s+)(virtlun .+)")
"""By itself, or in a pod: `kubectl exec POD -- virtlun ...`."""
_ENDS = re.compile(r"[|;&<>#]|\$\(|\)")
"""What ends a command in a line of a shell, written without regard to quotes."""


def written(text: str) -> Iterator[str]:
    """Yields the commands in a Markdown text, in its blocks for a shell and between backticks."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for part in _ENDS.split(line):
                if found := _BEGINS.search(part):
                    yield found[1].strip()
    yield from _INLINE.findall(_BLOCK.sub("", text))


def wrong(command: str) -> str | None:
    """Returns what is wrong with a command; None if its names and options are there."""
    words = shlex.split(command)[1:]
    level: click.Command = main
    context = click.Context(level, info_name="virtlun")
    while True:
        try:
            _, words, _ = level.make_parser(context).parse_args(words)
        except click.UsageError as error:
            return f"{command}: {error.format_message()}"
        if not isinstance(level, click.Group) or not words:
            return None
        below = level.get_command(context, words[0])
        if below is None:
            return f"{command}: {context.info_name} has no {words[0]}"
        context = click.Context(below, context, words[0])
        level, words = below, words[1:]
