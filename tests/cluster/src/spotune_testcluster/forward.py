"""Forwards 127.0.0.1:PORT of the host to a cluster's API server: `python -m spotune_testcluster.forward FOLDER PORT`.

A socket belongs to the network namespace in which it was created. So the process creates its listening socket on the
host, then enters the cluster's namespace and connects from there. It needs no link, route or rule of the host. The
command returns once it listens; its background process exits when the cluster ends.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

from spotune_testcluster import cgroups, linux, network
from spotune_testcluster.home import ClusterFiles
from spotune_testcluster.init import process_id


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:  # the peer has closed; the pump of the other direction ends too
        writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection(network.CONTROL_PLANE, network.API_PORT)
    except OSError:  # the API server is down: close this connection, too
        writer.close()
        return
    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    far_writer.close()
    writer.close()


async def _forward(listener: socket.socket, pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    cluster_ended = loop.create_future()

    def end() -> None:
        loop.remove_reader(pidfd)
        cluster_ended.set_result(None)

    loop.add_reader(pidfd, end)
    await asyncio.start_server(_serve, sock=listener)
    await cluster_ended


def main() -> None:
    """Listen, continue in the background, and forward until the cluster ends."""
    files, port = ClusterFiles(Path(sys.argv[1])), int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it; asyncio sets none
    pid = process_id(files.socket)
    if pid is None:
        sys.exit(f"cluster {files.name} is not running")
    pidfd = os.pidfd_open(pid)
    if os.fork():
        return
    os.setsid()
    cgroups.join(files.group)
    linux.enter(pid, linux.Namespace.NET)
    asyncio.run(_forward(listener, pidfd))
    os._exit(0)


if __name__ == "__main__":
    main()
