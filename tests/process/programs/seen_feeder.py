"""Listens, says on which port, takes one connection, and sends a MiB into it for each line of its input."""

import socket
import sys

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    with connection:
        for _ in sys.stdin:
            connection.sendall(bytes(1 << 20))
