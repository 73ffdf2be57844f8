"""The port of a service on one machine, between the choice of it and the start of its gateways, seconds later."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from spotune_serve.deployment.local import free_port, reserved_port

HOST = "127.0.0.1"
pytestmark = pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "given"])


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_is_kept_for_its_gateways(chosen: bool, is_shared: bool) -> None:
    with reserved_port(HOST, 0 if chosen else free_port(HOST), is_shared=is_shared) as number:
        with closing(socket.socket()) as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((HOST, number))
        with socket.create_server((HOST, number), reuse_port=is_shared):
            pass


def test_a_shared_port_is_kept_from_servers_that_share_none(chosen: bool) -> None:
    with (
        reserved_port(HOST, 0 if chosen else free_port(HOST), is_shared=True) as number,
        pytest.raises(OSError, match="Address already in use"),
    ):
        socket.create_server((HOST, number))
