"""A tritonserver that serves nothing, as the environment variable FAKE_TRITON tells it to.

exit: code to exit with at once                      kill: signal to die of at once
listen_after_s: until it opens its port              reuse_port: whether it shares the port
index: response to the list of models                index_status: its HTTP status
instances: statuses to publish, each with a process  die_after_s: until the first instance dies
unload_after_s: until the first instance removes its status and ends
on_sigterm: exit code on SIGTERM; null ignores it    busy_s: how long after SIGTERM a batch is in flight
exit_after_sigterm_s: exits by itself then, with 1   starts: file that gets a line per start; beside it, instances
"""

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

told = json.loads(os.environ["FAKE_TRITON"])
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
folder = Path(os.environ["GRAPHKILN_RUN_FOLDER"])
port = int(flags["grpc-port" if flags.get("allow-http") == "false" else "http-port"])
prefix = next(a.rpartition("=")[2] for a in sys.argv if "shm-region-prefix-name" in a)
Path(f"/dev/shm/{prefix}0").write_text("tensors")
with Path(told["starts"]).open("a") as starts:
    starts.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}) + "\n")
if "exit" in told:
    sys.exit(told["exit"])
if "kill" in told:
    os.kill(os.getpid(), told["kill"])


def write(name, content):
    temporary = folder / "temporary"
    temporary.write_bytes(content)
    temporary.rename(folder / name)


def write_counters(name, begun, ended):
    write(f"{name}.counters", struct.pack("=qq", begun, ended))


def publish(index, status):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dies = told.get("die_after_s", told.get("unload_after_s", 60)) if index == 0 else 60
        time.sleep(dies)
        if "unload_after_s" in told and index == 0:
            (folder / f"m_{index}.{os.getpid()}.json").unlink()
        os._exit(0)
    with Path(told["starts"] + ".instances").open("a") as instances:
        instances.write(f"{pid}\n")
    status["pid"] = pid
    name = f"m_{index}.{pid}"
    write_counters(name, 1 if "busy_s" in told else 0, 0)
    write(f"{name}.json", json.dumps(status).encode())
    return name


def respond(connection):
    with connection:
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(4096)
            if not part:
                return
            received += part
        body = json.dumps(told.get("index", [])).encode()
        head = f"HTTP/1.1 {told.get('index_status', 200)} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)


def listen():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if told.get("reuse_port", True):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen()
    while True:
        threading.Thread(target=respond, args=(listener.accept()[0],), daemon=True).start()


stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(time.monotonic()))
names = [publish(index, status) for index, status in enumerate(told.get("instances", []))]
time.sleep(told.get("listen_after_s", 0))
threading.Thread(target=listen, daemon=True).start()
while True:
    time.sleep(0.01)
    if not stopping:
        continue
    passed = time.monotonic() - stopping[0]
    if told.get("on_sigterm") is not None:
        os._exit(told["on_sigterm"])
    if "busy_s" in told and passed > told["busy_s"]:
        write_counters(names[0], 1, 1)
    if passed > told.get("exit_after_sigterm_s", 60):
        os._exit(1)
