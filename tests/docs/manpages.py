"""The man pages of `virtlun`, made from what its commands say of themselves: man-pages(7)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from plugin.cli import main
from tests.docs.links import ROOT

FOLDER = ROOT / "docs/man"
NOTE = '.\\" Made by `python -m tests.docs`; do not edit.'
SOURCES = {
    "/etc/virtlun/virtlun.toml": "the configuration, where it exists",
    "/run/virtlun/target.sock": "the target's socket for calls",
    "/var/log/virtlun/target.log": "the target's log, where systemd does not keep it",
}


def pages() -> dict[str, str]:
    """Returns the pages by the names of their files: one of the command, and one a noun."""
    names = ["virtlun", *(f"virtlun-{noun}" for noun in sorted(main.commands))]
    made = {"virtlun.1": _page("virtlun", main, names)}
    for noun in sorted(main.commands):
        made[f"virtlun-{noun}.1"] = _page(f"virtlun {noun}", main.commands[noun], names)
    return made


def _page(words: str, command: click.Command, names: list[str]) -> str:
    """Returns one page: of a command, and of those below it that have no page."""
    page = words.replace(" ", "-")
    context = _context(command, words)
    lines = [
        NOTE,
        f'.TH {page.upper()} 1 "" virtlun "virtlun\'s commands"',
        ".SH NAME",
        f"{_text(page)} \\- {_text(command.get_short_help_str(200).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(words)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        ".SH OPTIONS",
        *_options(command, context),
    ]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in sorted(command.commands):
            lines += _below(f"{words} {name}", command.commands[name], whole=command is not main)
    if command is main:
        lines.append(".SH FILES")
        for path, what in SOURCES.items():
            lines += [".TP", f".I {_text(path)}", _text(what)]
    others = ", ".join(f"\\fB{_text(name)}\\fR(1)" for name in names if name != page)
    return "\n".join([*lines, ".SH SEE ALSO", others]) + "\n"


def _below(words: str, command: click.Command, *, whole: bool) -> Iterator[str]:
    """Yields what a page says of a command below its own: all, or what it is for."""
    context = _context(command, words)
    if not whole:
        yield from (".TP", f"\\fB{_text(words.replace(' ', '-'))}\\fR(1)")
        yield _text(command.get_short_help_str(200))
        return
    yield f'.SS "{_text(words)} {_text(" ".join(command.collect_usage_pieces(context)))}"'
    yield from _paragraphs(command.help or "")
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _below(f"{words} {name}", command.commands[name], whole=True)


def _context(command: click.Command, words: str) -> click.Context:
    names = main.context_settings["help_option_names"]
    return click.Context(command, info_name=words, help_option_names=names, color=False)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yields the options that a command lists."""
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is not None and isinstance(option, click.Option):
            yield from (".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1]))


def _paragraphs(text: str) -> Iterator[str]:
    """Yields a help text: paragraphs, and as they stand those that are marked for click."""
    for paragraph in text.split("\f", maxsplit=1)[0].strip().split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        yield ".PP"
        if lines[0].strip() == "\b":
            yield from (".nf", *map(_text, lines[1:]), ".fi")
        else:
            yield _text(" ".join(line.strip() for line in lines))


def _text(text: str) -> str:
    """Returns text in which nothing is a request or an escape of roff's."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", escaped)
