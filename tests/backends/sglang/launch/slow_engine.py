"""An engine that reads at the last moment: a fake, for no real one can be made to wait. Speaks
the three orders of a publish; keeps what it read."""

from __future__ import annotations

import base64
import http.server
import json
import pickle
import threading
from collections.abc import Callable

import torch


class SlowEngine:
    """Listens on a port of its own. `before_reading(index)` is called with the handles open and
    nothing read yet; what it returns, if anything, is the refusal."""

    def __init__(self, before_reading: Callable[[int], str | None]) -> None:
        self.read: list[list[torch.Tensor]] = []
        """[buckets][engine ranks] the bytes that lay in the sender's memory."""
        self.orders: list[str] = []
        self.told: list[str] = []
        """`load_format` of the orders without tensors."""
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.orders.append(self.path.partition("?")[0])
                refusal = None
                if self.path == "/update_weights_from_tensor":
                    refusal = engine._update(body, before_reading)
                text = (refusal or "{}").encode()
                self.send_response(400 if refusal else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _update(self, body: dict, before_reading: Callable[[int], str | None]) -> str | None:
        values = [
            pickle.loads(base64.b64decode(payload)) for payload in body["serialized_named_tensors"]
        ]
        if isinstance(values[0], list):
            self.told.append(body["load_format"])
            return None
        opened = [value["flattened_tensor"] for value in values]
        refusal = before_reading(len(self.read))
        self.read.append([flat.clone() for flat in opened])
        return refusal

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
