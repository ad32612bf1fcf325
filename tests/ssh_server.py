"""Run the commands that ssh_client.py sends to this host: `python ssh_server.py HOST`.

client -> server   a line of JSON, the command; then bytes for its standard input; then the end
server -> client   frames: kind 1 output, 2 error output, 3 exit code; length; bytes
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import IO

PORT = 22


def serve(connection: socket.socket) -> None:
    """Run one command; a lost connection closes its standard input, and kills nothing."""
    stream = connection.makefile("rb")
    command = json.loads(stream.readline())
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",  # like a home folder, not the caller's
    )
    lock = threading.Lock()

    def send(kind: int, data: bytes) -> None:
        try:
            with lock:
                connection.sendall(struct.pack("!BI", kind, len(data)) + data)
        except OSError:
            return  # the client has gone: the command writes on to nobody

    def pump(kind: int, source: IO[bytes]) -> None:
        while data := os.read(source.fileno(), 1 << 16):
            send(kind, data)

    def feed() -> None:
        target = process.stdin
        assert target is not None
        try:
            while data := stream.read1(1 << 16):
                target.write(data)
                target.flush()
        except OSError:
            pass  # either side has gone; the other side's end is closed below
        try:
            target.close()
        except OSError:
            pass  # the command has closed it first

    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=pump, args=(1, process.stdout)),
        threading.Thread(target=pump, args=(2, process.stderr)),
    ]
    threading.Thread(target=feed, daemon=True).start()
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(1.0)
    send(3, struct.pack("!i", code))
    connection.close()


def main() -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", PORT))
    listener.listen()
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
