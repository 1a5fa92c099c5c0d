"""The status server of Kubeflow Trainer 2.2 (KEP 2779), as pods see it."""

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class TrainerServer:
    """Takes what pods post; it has a certificate of its own and asks for a token."""

    def __init__(self, folder: Path) -> None:
        self.posts: list[tuple[str, str, Any]] = []
        self.answer = 200
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt")]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        subprocess.run([*command, *subject, *files], check=True, capture_output=True)
        posts, server = self.posts, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posts.append((self.path, self.headers["Authorization"], json.loads(body)))
                self.send_response(server.answer)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.environ = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.http.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }
        (folder / "token").write_text("first\n")

    def __enter__(self) -> "TrainerServer":
        """Begin to answer."""
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.http.shutdown()
        self.http.server_close()
