"""Listens on an address and a port (0: any), says which port, and sleeps for ever."""

import socket
import sys
import time

host, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in host else socket.AF_INET
with socket.socket(family, socket.SOCK_STREAM) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    while True:
        time.sleep(1000)
