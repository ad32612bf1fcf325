"""Stand in for ssh: `python ssh_client.py [-o OPTION ...] [-T ...] [USER@]HOST COMMAND ...`.

Like ssh, it joins the words of the command with spaces, copies the three streams, exits with the
command's code, and with 255 and one line if it cannot connect. It knows the option ConnectTimeout.
"""

import json
import os
import socket
import struct
import sys
import threading

PORT = 22


def main() -> int:
    words, limit_s = sys.argv[1:], 60.0
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-o", "-p", "-l", "-i", "-F", "-b", "-L", "-R"):
            value = words.pop(0)
            if value.startswith("ConnectTimeout"):
                limit_s = float(value.partition("=")[2])
    host, *command = words
    host = host.rpartition("@")[2]
    try:
        connection = socket.create_connection((host, PORT), limit_s)
    except OSError as error:
        sys.stderr.write(f"ssh: connect to host {host} port {PORT}: {error.strerror or error}\n")
        return 255
    connection.settimeout(None)
    connection.sendall(json.dumps(" ".join(command)).encode() + b"\n")

    def feed() -> None:
        try:
            while data := os.read(0, 1 << 16):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the server has gone, which the main thread reports

    threading.Thread(target=feed, daemon=True).start()
    stream = connection.makefile("rb")
    try:
        while len(head := stream.read(5)) == 5:
            kind, size = struct.unpack("!BI", head)
            data = stream.read(size)
            if kind == 3:
                code = struct.unpack("!i", data)[0]
                return code if code >= 0 else 128 - code
            view = memoryview(data)
            while view:
                view = view[os.write(kind, view) :]
    except OSError as error:
        sys.stderr.write(f"client_loop: {error}\n")
    return 255


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
