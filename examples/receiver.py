"""A receiver of callbacks: checks the signature of each (Standard Webhooks) and prints what came. Python alone.

    CALLBACK_KEY=example-key python examples/receiver.py        # listens on 127.0.0.1:8765 until Ctrl-C

Copy `verified` into a service of your own: it compares in constant time and refuses what is older than five minutes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8765
LARGEST_BYTES = 1 << 20
OLDEST_SECONDS = 300


def verified(headers: Mapping[str, str], body: bytes, key: str) -> bool:
    """Return whether the body was signed with the key, within the last five minutes."""
    moment = headers.get("webhook-timestamp", "")
    if not moment.isdecimal() or abs(time.time() - int(moment)) > OLDEST_SECONDS:
        return False
    signed = f"{headers.get('webhook-id', '')}.{moment}.".encode() + body
    wanted = "v1," + base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(wanted, given) for given in headers.get("webhook-signature", "").split())


class Receiver(BaseHTTPRequestHandler):
    """Answers 204 to what is signed, 401 to what is not."""

    def do_POST(self) -> None:
        """Take one callback."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_BYTES:
            self.send_error(413)
            return
        body = self.rfile.read(length)
        right = verified(dict(self.headers.items()), body, os.environ["CALLBACK_KEY"])
        self.send_response(204 if right else 401)
        self.end_headers()
        what = json.dumps(json.loads(body), sort_keys=True) if right else "refused: the signature is wrong or missing"
        print(f"{self.path}: {what}", flush=True)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing of its own."""


def main() -> int:
    """Listen until Ctrl-C."""
    if not os.environ.get("CALLBACK_KEY"):
        print("receiver: CALLBACK_KEY is not set; give the key that the callback is signed with", file=sys.stderr)
        return 2
    with ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", PORT))), Receiver) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
