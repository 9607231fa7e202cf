"""Connects to the port that it reads from a FIFO, or once for each ``+``; receives for ever, and says so.

With ``loopback`` it first switches on the loopback device of the network namespace that it is in.
"""

import fcntl
import socket
import struct
import sys

path, *more = sys.argv[1:]
if "loopback" in more:
    with socket.socket() as any_socket:
        SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
print("up", flush=True)
with open(path) as fifo:
    port = int(fifo.read())
with socket.create_connection(("127.0.0.1", port)) as connection:
    print("connected", connection.getsockname()[1], flush=True)
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
        if received % (1 << 20) == 0:
            print("received", received, flush=True)
