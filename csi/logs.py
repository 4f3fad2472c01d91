"""The log of our programs: structlog on stderr, a line of text or of JSON for each entry."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = ["debug", "info", "warning", "error"]


def set_up(level: str, *, as_json: bool) -> None:
    """Lets structlog write entries of `level`, one of LEVELS, and above."""
    render: structlog.types.Processor = structlog.dev.ConsoleRenderer()
    if as_json:
        render = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
