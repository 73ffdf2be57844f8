"""Connections between nodes: only programs with the driver's secret take part, and no byte can be changed unnoticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import xxhash

from spotune_trainer.checkpoint.memory.peer_connection import CHUNK_BYTES, PeerConnection, PeerError
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment

SECRET = b"of the driver"
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with server, client:
        yield server, client


def serve(connected: socket.socket, act: Callable[[PeerConnection], None], errors: list[PeerError]) -> threading.Thread:
    """Take the server's part in a thread."""

    def run() -> None:
        try:
            with PeerConnection(connected, SECRET, serves=True) as connection:
                act(connection)
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def content(size: int, byte: int = 7) -> tuple[Segment, Label]:
    """A labelled segment."""
    segment = Segment.create()
    segment.resize(size)
    data = bytes([byte]) * size
    with segment.map() as mapped:
        mapped[LABEL_BYTES:] = data
    label = Label("step-5", "rank-0", size, xxhash.xxh3_64(data).hexdigest())
    segment.label = label
    return segment, label


def test_both_sides_know_the_secret_and_exchange_messages_and_content(ends: Ends) -> None:
    segment, label = content(2 * CHUNK_BYTES + 17)
    errors: list[PeerError] = []

    def answer(connection: PeerConnection) -> None:
        connection.send({"heard": connection.receive()["text"]})
        connection.send_content(segment, label)

    thread = serve(ends[0], answer, errors)
    with PeerConnection(ends[1], SECRET, serves=False) as connection:
        connection.send({"text": "hello"})
        assert connection.receive() == {"heard": "hello"}
        copy = Segment.create()
        copy.resize(label.size)
        connection.receive_content(copy, label)
    thread.join()
    assert errors == []
    with segment.map() as sent, copy.map() as received:
        assert sent[LABEL_BYTES:] == received[LABEL_BYTES:]
    assert copy.label is None, "the receiver labels what it keeps"


def test_program_without_the_secret_is_refused(ends: Ends) -> None:
    errors: list[PeerError] = []
    thread = serve(ends[0], lambda connection: connection.send(connection.receive()), errors)
    with pytest.raises(PeerError), PeerConnection(ends[1], b"guessed", serves=False) as connection:
        connection.receive()
    thread.join()
    assert [str(error) for error in errors] == ["a program without the secret of this job connected"]


def test_client_refuses_a_server_without_the_secret(ends: Ends) -> None:
    def impostor() -> None:
        ends[0].sendall(bytes(32))
        ends[0].recv(64)
        ends[0].sendall(bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PeerError, match="does not have the secret"):
        PeerConnection(ends[1], SECRET, serves=False)
    thread.join()


def test_garbage_is_refused(ends: Ends) -> None:
    errors: list[PeerError] = []
    thread = serve(ends[0], lambda connection: connection.send(connection.receive()), errors)
    ends[1].sendall(b"GET / HTTP/1.1\r\n".ljust(64))
    thread.join()
    assert [str(error) for error in errors] == ["a program without the secret of this job connected"]


@pytest.mark.parametrize("position", [5, -1], ids=["text", "code"])
def test_message_that_was_changed_on_its_way_is_refused(ends: Ends, position: int) -> None:
    errors: list[PeerError] = []
    thread = serve(ends[0], lambda connection: connection.send(connection.receive()), errors)
    with PeerConnection(ends[1], SECRET, serves=False) as connection:
        written = bytearray()
        connection._send_all = written.extend  # type: ignore[method-assign, assignment]
        connection.send({"request": "find"})
        written[position] ^= 1
        ends[1].sendall(written)
        thread.join()
    assert [str(error) for error in errors] == ["a message was changed on its way"]


def test_message_that_is_sent_twice_is_refused(ends: Ends) -> None:
    errors: list[PeerError] = []

    def receive_two(connection: PeerConnection) -> None:
        connection.receive()
        connection.receive()

    thread = serve(ends[0], receive_two, errors)
    with PeerConnection(ends[1], SECRET, serves=False) as connection:
        written = bytearray()
        connection._send_all = written.extend  # type: ignore[method-assign, assignment]
        connection.send({"request": "find"})
        ends[1].sendall(written + written)
        thread.join()
    assert [str(error) for error in errors] == ["a message was changed on its way"]


def test_content_with_a_changed_bit_is_refused(ends: Ends) -> None:
    segment, label = content(3 * CHUNK_BYTES)
    with segment.map() as mapped:
        mapped[LABEL_BYTES + 2 * CHUNK_BYTES] ^= 1
    thread = serve(ends[0], lambda connection: connection.send_content(segment, label), [])
    with PeerConnection(ends[1], SECRET, serves=False) as connection:
        copy = Segment.create()
        copy.resize(label.size)
        with pytest.raises(PeerError, match="rank-0 of step-5 arrived with checksum"):
            connection.receive_content(copy, label)
    thread.join()


def test_cut_connection_is_an_error_for_the_receiver(ends: Ends) -> None:
    segment, label = content(3 * CHUNK_BYTES)

    def cut(sent: int) -> None:
        if sent == CHUNK_BYTES:
            raise PeerError("cut")

    errors: list[PeerError] = []
    thread = serve(ends[0], lambda connection: connection.send_content(segment, label, before_chunk=cut), errors)
    with PeerConnection(ends[1], SECRET, serves=False) as connection:
        copy = Segment.create()
        copy.resize(label.size)
        with pytest.raises(PeerError, match="closed the connection"):
            connection.receive_content(copy, label)
    thread.join()
    assert [str(error) for error in errors] == ["cut"]


@pytest.mark.parametrize("replaced_by", ["relabelled", "freed"])
def test_content_that_is_replaced_while_it_is_sent_is_not_sent_to_the_end(ends: Ends, replaced_by: str) -> None:
    """A rank may begin its next commit in the segment: the other node must not take the mixture for either of them."""
    segment, label = content(3 * CHUNK_BYTES)

    def replace(sent: int) -> None:
        if sent == CHUNK_BYTES:
            segment.label = None
            if replaced_by == "freed":
                segment.free()

    errors: list[PeerError] = []
    thread = serve(ends[0], lambda connection: connection.send_content(segment, label, before_chunk=replace), errors)
    with suppress(PeerError), PeerConnection(ends[1], SECRET, serves=False) as connection:
        connection.receive_bytes(label.size)
        pytest.fail("all of it was sent")
    thread.join()
    assert [str(error) for error in errors] == ["rank-0 of step-5 was replaced while it was sent"]
