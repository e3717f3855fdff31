"""A tritonserver that serves nothing, as the environment variable FAKE_TRITON tells it to.

exit: code to exit with at once                      kill: signal to die of at once
later: the same, from the second start on: {"exit": code} or {"kill": signal}
listen_after_s: until it opens its port              listen_when: file that it waits for before
index: response to the list of models                index_status: its HTTP status
instances: statuses to publish, each with a process  die_after_s: until the first instance dies
bad_model: whether a model cannot be loaded
unload_after_s: until the first instance removes its status and ends
silent: instances do not beat                        computes_s: for how long a batch is in flight already
fault: what an instance computes wrongly             loading: whether an instance loads without end before it listens
deaf: it accepts connections, and responds to none   slow_s: how long a response takes
on_sigterm: exit code on SIGTERM, or minus a signal to die of; null ignores it
   busy_s: how long after the start a batch is in flight
exit_after_sigterm_s: exits by itself then, with 1   starts: file that gets a line per start; beside it, instances
"""

import http.server
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

if "--help" in sys.argv:
    print("  --http-port <integer>")
    sys.exit()
options = json.loads(os.environ["FAKE_TRITON"])
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
folder = Path(os.environ["GRAPHKILN_RUN_FOLDER"])
port = int(flags["grpc-port" if flags.get("allow-http") == "false" else "http-port"])
prefix = next(a.rpartition("=")[2] for a in sys.argv if "shm-region-prefix-name" in a)
Path(f"/dev/shm/{prefix}0").write_text("tensors")
with Path(options["starts"]).open("a") as starts:
    starts.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}) + "\n")
if "later" in options and len(Path(options["starts"]).read_text().splitlines()) > 1:
    options |= options["later"]
if "bad_model" in options and "--exit-on-error=true" in sys.argv:
    sys.exit(1)
if "exit" in options:
    sys.exit(options["exit"])
if "kill" in options:
    os.kill(os.getpid(), options["kill"])


def write(name, content):
    temporary = folder / "temporary"
    temporary.write_bytes(content)
    temporary.rename(folder / name)


def write_counters(name, begun, ended):
    now = time.monotonic()
    beaten = now - (100 if "silent" in options else 0)
    write(f"{name}.counters", struct.pack("=dqqd", now - options.get("computes_s", 0), begun, ended, beaten))


def beat(name, seconds):
    """Lives for some time, and shows it."""
    end = time.monotonic() + seconds
    path = folder / f"{name}.counters"
    while (now := time.monotonic()) < end:
        if "silent" not in options and path.exists():
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), struct.pack("=d", now), 24)
        time.sleep(min(0.1, end - now))


def publish(index, status):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dies = options.get("die_after_s", options.get("unload_after_s", 60)) if index == 0 else 60
        beat(f"m_{index}.{os.getpid()}", dies)
        if "unload_after_s" in options and index == 0:
            (folder / f"m_{index}.{os.getpid()}.json").unlink()
        os._exit(0)
    with Path(options["starts"] + ".instances").open("a") as instances:
        instances.write(f"{pid}\n")
    status["pid"] = pid
    name = f"m_{index}.{pid}"
    write_counters(name, 1 if "busy_s" in options or "computes_s" in options else 0, 0)
    write(f"{name}.json", json.dumps(status).encode())
    if "fault" in options:
        write(f"{name}.fault", options["fault"].encode())
    return name


def load():
    """Waits for an instance that never finishes loading, as Triton does."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    loading = {"pid": pid, "model": "endless", "version": 1, "since": time.monotonic()}
    write(f"endless_0.{pid}.loading", json.dumps(loading).encode())
    os.waitpid(pid, 0)


class Handler(http.server.BaseHTTPRequestHandler):
    """Keeps connections alive, as Triton does."""

    protocol_version = "HTTP/1.1"

    def handle(self):
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        self.close_connection = False
        while not self.close_connection:
            poll.poll()  # as event loops do: a blocking read would not notice that it should pause
            self.handle_one_request()

    def do_GET(self):
        time.sleep(options.get("slow_s", 0))
        body = b"served"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def respond(connection):
    with connection:
        if options.get("deaf"):
            time.sleep(60)
        if connection.recv(3, socket.MSG_PEEK) == b"GET":
            Handler(connection, ("", 0), None)
            return
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(4096)
            if not part:
                return
            received += part
        body = json.dumps(options.get("index", [])).encode()
        head = (
            f"HTTP/1.1 {options.get('index_status', 200)} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode() + body)


def listen():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen()
    while True:
        threading.Thread(target=respond, args=(listener.accept()[0],), daemon=True).start()


stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(time.monotonic()))
names = [publish(index, status) for index, status in enumerate(options.get("instances", []))]
if "loading" in options:
    load()
time.sleep(options.get("listen_after_s", 0))
while "listen_when" in options and not Path(options["listen_when"]).exists():
    time.sleep(0.01)
threading.Thread(target=listen, daemon=True).start()
began = time.monotonic()
while True:
    time.sleep(0.01)
    if "busy_s" in options and time.monotonic() - began > options["busy_s"]:
        write_counters(names[0], 1, 1)
    if not stopping:
        continue
    passed = time.monotonic() - stopping[0]
    if options.get("on_sigterm") is not None:
        if options["on_sigterm"] < 0:
            signal.signal(-options["on_sigterm"], signal.SIG_DFL)
            os.kill(os.getpid(), -options["on_sigterm"])
        os._exit(options["on_sigterm"])
    if passed > options.get("exit_after_sigterm_s", 60):
        os._exit(1)
