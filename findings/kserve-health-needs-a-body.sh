#!/usr/bin/env bash
# kserve 0.21.0: is_server_live and is_server_ready of InferenceRESTClient raise JSONDecodeError where health has no body.
#
# Triton answers `GET /v2/health/live` and `/v2/health/ready` with a status and an empty body. The client, which has read
# the status by then, parses the body; is_model_ready beside it reads the status alone. Ask by InferenceGRPCClient, or
# read the status of a plain GET.
#
# Installs into a temporary folder; ends with failure if the client reads the status.
#
# Seen, with a server that answers 200 and an empty body:
#   is_model_ready: True
#   is_server_live: JSONDecodeError
#   is_server_ready: JSONDecodeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check kserve==0.21.0
"$folder/venv/bin/python" - <<'P'
import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from kserve import InferenceRESTClient
from kserve.inference_client import RESTConfig


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


async def outcome(question):
    try:
        return str(await question)
    except Exception as error:
        return type(error).__name__


async def main(url):
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        model = await outcome(client.is_model_ready(url, "any"))
        server = [await outcome(client.is_server_live(url)), await outcome(client.is_server_ready(url))]
    print(f"is_model_ready: {model}\nis_server_live: {server[0]}\nis_server_ready: {server[1]}")
    raise SystemExit((model, *server) != ("True", "JSONDecodeError", "JSONDecodeError"))


server = HTTPServer(("127.0.0.1", 0), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(main(f"http://127.0.0.1:{server.server_port}"))
P
