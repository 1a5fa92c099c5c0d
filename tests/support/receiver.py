"""A server on this machine that takes notifications, and fails as real ones do."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class Receiver:
    """What was posted to it, and what it answers."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        """The path and the JSON of each."""
        self.answers: list[int] = []
        """The status of each next answer; 204 when there is none. 0 closes the connection."""
        self.location: str | None = None
        """The address that answers redirect to."""
        self.others: list[str] = []
        """The methods of other requests."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/s3cret"

    @property
    def events(self) -> list[str]:
        return [post["event"] for _, post in self.posts]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            receiver.posts.append((self.path, json.loads(body)))
            status = receiver.answers.pop(0) if receiver.answers else 204
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            if receiver.location is not None:
                self.send_header("Location", receiver.location)
            self.end_headers()

        def do_GET(self) -> None:
            receiver.others.append(self.command)
            self.send_response(204)
            self.end_headers()

        do_HEAD = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
