"""The seam over SPDK's JSON-RPC client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pydataplane.client import Client
from pydataplane.errors import RpcError, TargetTimeout, TargetUnavailable


def serve(path: Path, answer: Callable[[socket.socket, dict[str, object]], None]) -> None:
    """Answers one connection on `path` with `answer(connection, request)`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        connection, _ = listener.accept()
        request = b""
        while True:
            request += connection.recv(4096)
            try:
                parsed = json.loads(request)
                break
            except ValueError:
                continue
        answer(connection, parsed)
        connection.close()
        listener.close()

    threading.Thread(target=run, daemon=True).start()


def test_a_result_comes_back_and_none_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def answer(connection: socket.socket, request: dict[str, object]) -> None:
        reply = {"jsonrpc": "2.0", "id": request["id"], "result": request["params"]}
        connection.sendall(json.dumps(reply).encode())

    serve(path, answer)
    assert Client(path).call_raw("m", a=1, b=None) == {"a": 1}


def test_a_character_split_over_two_reads_survives(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def answer(connection: socket.socket, request: dict[str, object]) -> None:
        data = json.dumps({"id": request["id"], "result": "größe"}, ensure_ascii=False).encode()
        cut = data.index(b"\xc3") + 1
        connection.sendall(data[:cut])
        time.sleep(0.05)
        connection.sendall(data[cut:])

    serve(path, answer)
    assert Client(path).call_raw("m") == "größe"


def test_an_error_keeps_its_code(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def answer(connection: socket.socket, request: dict[str, object]) -> None:
        error = {"code": -19, "message": "No such device"}
        connection.sendall(json.dumps({"id": request["id"], "error": error}).encode())

    serve(path, answer)
    with pytest.raises(RpcError) as caught:
        Client(path).call_raw("m")
    assert (caught.value.code, caught.value.message) == (-19, "No such device")


def test_the_time_out_counts_wall_clock(tmp_path: Path) -> None:
    path, over = tmp_path / "s", threading.Event()

    def says_nothing(connection: socket.socket, request: dict[str, object]) -> None:
        over.wait()

    serve(path, says_nothing)
    with pytest.raises(TargetTimeout, match=r"within 0\.2 s"):
        Client(path, timeout_s=0.2).call_raw("m")
    over.set()


def test_a_falsy_answer_and_a_wrong_id_are_not_taken_for_a_result(tmp_path: Path) -> None:
    path = tmp_path / "s"
    serve(path, lambda connection, request: connection.sendall(b'{"id": 77, "result": true}'))
    with pytest.raises(TargetUnavailable, match="another call's id"):
        Client(path).call_raw("m")


def test_no_target_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(TargetUnavailable, match="virtlun target start"):
        Client(tmp_path / "none").call_raw("m")


class Server:
    """Answers each request of each connection; counts both."""

    def __init__(self, path: Path) -> None:
        self.connections: list[socket.socket] = []
        self.requests = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        while request := connection.recv(65536):
            self.requests += 1
            reply = {"id": json.loads(request)["id"], "result": self.requests}
            connection.sendall(json.dumps(reply).encode() + b"\n")

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)


def test_a_connection_is_kept_for_the_next_call_where_that_is_asked_for(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    client = Client(tmp_path / "s", keep=1)
    assert [client.call_raw("m") for _ in range(3)] == [1, 2, 3]
    assert len(server.connections) == 1
    short = Client(tmp_path / "s")
    assert [short.call_raw("m") for _ in range(2)] == [4, 5]
    assert len(server.connections) == 3
    server.close()


def test_a_kept_connection_of_a_target_that_ended_is_not_used(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    client = Client(tmp_path / "s", keep=1)
    assert client.call_raw("m") == 1
    server.close()
    (tmp_path / "s").unlink()
    with pytest.raises(TargetUnavailable, match="no target answers"):
        client.call_raw("m")
    again = Server(tmp_path / "s")
    assert client.call_raw("m") == 1
    again.close()


def test_a_kept_connection_is_not_used_when_its_socket_is_elsewhere(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    client = Client(tmp_path / "s", keep=1)
    assert client.call_raw("m") == 1
    (tmp_path / "s").rename(tmp_path / "hidden")
    with pytest.raises(TargetUnavailable, match="no target answers"):
        client.call_raw("m")
    other = Server(tmp_path / "s")
    assert client.call_raw("m") == 1, "of the other"
    assert (server.requests, other.requests) == (1, 1)
    server.close()
    other.close()


def test_a_long_answer_is_not_parsed_for_each_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = [{"name": f"bdev {n}", "nested": {"a": [n]}} for n in range(20_000)]
    parsed: list[int] = []
    loads = json.loads

    def counting(text: bytes) -> object:
        parsed.append(len(text))
        return loads(text)

    def answer(connection: socket.socket, request: dict[str, object]) -> None:
        connection.sendall(json.dumps({"id": request["id"], "result": result}).encode())

    serve(tmp_path / "s", answer)
    monkeypatch.setattr("pydataplane.client.json.loads", counting)
    assert Client(tmp_path / "s").call_raw("m") == result
    # A piece may end with a bracket by chance; with each piece parsed it would be half of them all.
    assert sum(parsed) < 5 * len(json.dumps(result)), parsed


def test_many_calls_go_as_one_batch_and_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "s"
    given: list[dict[str, object]] = []

    def answer(connection: socket.socket, request: object) -> None:
        assert isinstance(request, list)
        given.extend(request)
        answers: list[dict[str, object]] = [{"id": r["id"], "result": r["method"]} for r in request]
        answers[1] = {"id": answers[1]["id"], "error": {"code": -19, "message": "No such device"}}
        connection.sendall(json.dumps(answers[::-1]).encode())

    serve(path, answer)
    found = Client(path).call_all([("a", {"x": 1, "y": None}), ("b", {}), ("c", {})])
    assert (found[0], found[2]) == ("a", "c")
    assert isinstance(found[1], RpcError) and (found[1].code, found[1].method) == (-19, "b")
    assert given[0]["params"] == {"x": 1}
    assert "params" not in given[1], "SPDK refuses any for a method that takes none"


def test_what_the_target_does_not_have_is_left_out_and_other_refusals_are_raised(
    tmp_path: Path,
) -> None:
    def serving(name: str, code: int) -> Client:
        def answer(connection: socket.socket, request: object) -> None:
            assert isinstance(request, list)
            answers: list[dict[str, object]] = [
                {"id": r["id"], "result": r["params"]["name"]} for r in request
            ]
            answers[1] = {"id": answers[1]["id"], "error": {"code": code, "message": "no"}}
            connection.sendall(json.dumps(answers).encode())

        serve(tmp_path / name, answer)
        return Client(tmp_path / name)

    found = serving("a", -19).call_for_each_raw("m", ["x", "y", "z"], lambda name: {"name": name})
    assert found == {"x": "x", "z": "z"}
    with pytest.raises(RpcError) as caught:
        serving("b", -5).call_for_each_raw("m", ["x", "y"], lambda name: {"name": name})
    assert (caught.value.code, caught.value.method) == (-5, "m")


def test_a_client_that_is_closed_keeps_no_connection_and_still_calls(tmp_path: Path) -> None:
    target = Server(tmp_path / "s")
    client = Client(tmp_path / "s", keep=2)
    assert client.call_raw("a") == 1
    client.close()
    assert [client.call_raw("a"), client.call_raw("a")] == [2, 3]
    assert len(target.connections) == 3, "one that was kept, and one for each call after it"
    target.close()


def test_a_target_that_takes_no_connection_is_waited_for_to_the_deadline(tmp_path: Path) -> None:
    """As one that is stopped, with a full queue: connecting to it blocks."""
    path = tmp_path / "t"
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as queue:
        listening.bind(str(path))
        listening.listen(0)
        with suppress(BlockingIOError):
            while True:
                waiting = queue.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        with pytest.raises(TargetTimeout, match=f"{path} took no connection within 0.1 s"):
            Client(path, timeout_s=0.1).call("spdk_get_version")


def test_a_question_that_is_not_taken_is_waited_for_to_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        names = [f"lvs0/{n:0200d}" for n in range(20_000)]
        with pytest.raises(TargetTimeout, match=f"no answer from {path} within 0.1 s"):
            Client(path, timeout_s=0.1).call("bdev_get_iostat", names=names)
