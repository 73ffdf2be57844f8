"""Connections to a port of a pod, from a real server: quiet ones stay, silent ones end."""

import shutil
import ssl
from pathlib import Path

import pytest

from spotune.errors import KubernetesError, RefusedError
from spotune_testcluster.pki import Authority
from tests.client.support.streaming_server import Stream, streaming_cluster


def test_a_quiet_connection_stays_while_pings_are_answered(tmp_path: Path) -> None:
    stream = Stream("a", pongs=20, rest="b")  # 12 pings without an answer end it
    with streaming_cluster(lambda *_: stream, tmp_path) as cluster, cluster.connect("pod", 8090) as connection:
        assert [connection.read(10), connection.read(10), connection.read(10)] == [b"a", b"b", b""]


def test_a_silent_connection_is_an_error(tmp_path: Path) -> None:
    stream = Stream("a", pongs=3, end="silence")
    with streaming_cluster(lambda *_: stream, tmp_path) as cluster, cluster.connect("pod", 8090) as connection:
        assert connection.read(10) == b"a"
        with pytest.raises(TimeoutError, match="no answer for"):
            connection.read(10)


def test_a_request_that_is_not_answered_is_an_error(tmp_path: Path) -> None:
    with (
        streaming_cluster(lambda *_: Stream(end="refuse"), tmp_path) as cluster,
        pytest.raises(KubernetesError, match="does not answer"),
    ):
        cluster.connect("pod", 8090)


def test_what_is_no_websocket_frame_ends_the_stream(tmp_path: Path) -> None:
    stream = Stream("a", end="garbage")
    with streaming_cluster(lambda *_: stream, tmp_path) as cluster, cluster.connect("pod", 8090) as connection:
        assert [connection.read(10), connection.read(10)] == [b"a", b""]


def test_certificates_of_server_and_user_are_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "own")
    authority.issue("server", "server", addresses=["127.0.0.1"])
    authority.issue("client", "client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "own" / "server.crt", tmp_path / "own" / "server.key")
    with streaming_cluster(lambda *_: Stream("a"), tmp_path / "own", context) as cluster:
        assert cluster.connect("pod", 8090).read(10) == b"a"
    shutil.copy(Authority(tmp_path / "other").certificate, authority.certificate)
    with (
        streaming_cluster(lambda *_: Stream("a"), tmp_path / "own", context) as cluster,
        pytest.raises(RefusedError, match="another certificate than the kubeconfig expects"),
    ):
        cluster.connect("pod", 8090)
