"""OpenStack's databases: a PostgreSQL of one's own, Debian's package.

SQLite does not do: oslo.db begins each transaction as a reader, and of two that then write one is
told at once that the database is locked.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.ports import free_port
from tests.support.wait import until

VERSIONS = Path("/usr/lib/postgresql")
USER = "nova"


class Databases:
    """A server with a port and files of its own."""

    def __init__(self, folder: Path) -> None:
        """Starts it; what it keeps and its log are in `folder`.

        RuntimeError where PostgreSQL is not installed.
        """
        self._programs = max(VERSIONS.glob("*/bin"), default=None)
        if self._programs is None:
            raise RuntimeError("postgresql is not installed: run `make nightly`")
        self._port = free_port()
        folder.mkdir()
        folder.chmod(0o777)  # it runs as a user of its own
        data, log = str(folder / "data"), folder / "log"
        words = ("-A", "trust", "-U", USER, "--no-locale", "-E", "UTF8", "--no-sync")
        self._run("initdb", "-D", data, *words)
        options = ("fsync=off", "max_connections=300", "unix_socket_directories=")
        self._server = subprocess.Popen(
            [
                *(self._programs / "postgres", "-D", data, "-h", "127.0.0.1"),
                *("-p", str(self._port), *(word for each in options for word in ("-c", each))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            cwd=folder,
            user="postgres",
            group="postgres",
            extra_groups=[],
        )
        until(
            lambda: "ready to accept connections" in log.read_text(),
            lambda: f"PostgreSQL\n{log.read_text()}",
            process=self._server,
        )

    def _run(self, program: str, *words: str) -> str:
        assert self._programs is not None
        return subprocess.run(
            [self._programs / program, *words],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            user="postgres",
            group="postgres",
            extra_groups=[],
        ).stdout

    def _ask(self, program: str, *words: str) -> str:
        where = ("-h", "127.0.0.1", "-p", str(self._port), "-U", USER)
        return self._run(program, *where, *words)

    def new(self, name: str) -> str:
        """Makes a database and returns its URL, as oslo.db has it."""
        self._ask("createdb", name)
        return f"postgresql+psycopg2://{USER}@127.0.0.1:{self._port}/{name}"

    def read(self, name: str, query: str) -> list[str]:
        """Returns the rows of a query of a database's, each with `|` between its columns."""
        words = ("-d", name, "--no-psqlrc", "--no-align", "--tuples-only", "-c", query)
        return self._ask("psql", *words).splitlines()

    def close(self) -> None:
        """Ends it and its children."""
        self._server.terminate()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:  # it waits for its clients
            self._server.kill()
            self._server.wait()
