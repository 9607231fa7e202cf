"""Answers as NCCL's RAS thread does, from files. Prints its port, then lives until stdin ends.

usage: ras_server.py PORT ANSWERS MODE [--maps FILE] [--as PID,PID] [--ipv6]
ANSWERS: a path without its suffix: .json is the answer to those who SET FORMAT json, .txt to others; a form that has
no file is not known to this version. @0@ and @1@ in them become the pids. MODE: "speak", "silent" (accepts, never
answers), "hello" (says hello and nothing more), "nonsense" (another server), "drip" (the answer never ends).
"""

import argparse
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("port", type=int)
options.add_argument("answers")
options.add_argument("mode")
options.add_argument("--maps")
options.add_argument("--as", dest="pids", default="")
options.add_argument("--ipv6", action="store_true")
options = options.parse_args()
asked = []


def body(suffix):
    path = Path(options.answers + suffix)
    if not path.exists():
        return None
    pids = options.pids.split(",") if options.pids else [str(os.getpid())] * 2
    return path.read_text().replace("@0@", pids[0]).replace("@1@", pids[1])


def answer(line, form):
    command = line.lower()
    if command.startswith("client protocol "):
        return "SERVER PROTOCOL 2\n"
    if command.startswith("timeout "):
        return "OK\n"
    if command == "set format json":
        if body(".json") is None:
            return "ERROR: Unknown command SET FORMAT json\n"
        form.append(".json")
        return "OK\n"
    return f"ERROR: Unknown command {line}\n"


def serve(connection):
    form = [".txt"]
    with connection, connection.makefile("r", newline="\n") as lines:
        for raw in lines:
            line = raw.rstrip("\r\n")
            asked.append(line)
            if options.mode == "nonsense":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            if line.lower() == "verbose status":
                print("asked", flush=True)
                if options.mode == "hello":
                    time.sleep(60)
                while options.mode == "drip":
                    connection.sendall(b" " * 4096)
                    time.sleep(0.05)
                connection.sendall((body(form[-1]) or "").encode())
                return
            connection.sendall(answer(line, form).encode())


mapped = None
if options.maps:
    with open(options.maps, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
listener = socket.socket(socket.AF_INET6 if options.ipv6 else socket.AF_INET)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("::1" if options.ipv6 else "127.0.0.1", options.port))
listener.listen(64)


def accept():
    while True:
        connection, _ = listener.accept()
        if options.mode == "silent":
            asked.append(connection)  # kept open
        else:
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


threading.Thread(target=accept, daemon=True).start()
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
os._exit(0)
