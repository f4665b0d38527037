"""A web server that tells which pod it is and who asks; it goes on answering while its pod is being taken down."""

import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Meanwhile the last proxy learns that this pod is going.
LINGER_SECONDS = float(os.environ.get("LINGER_SECONDS", "8"))


class Answer(BaseHTTPRequestHandler):
    """One request, one connection."""

    def do_GET(self) -> None:
        """Answer with JSON, whatever the path."""
        about = {
            "pod": socket.gethostname(),
            "client": self.client_address[0].removeprefix("::ffff:"),
            "forwarded_for": self.headers.get("X-Forwarded-For", ""),
        }
        body = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


class Server(ThreadingHTTPServer):
    """On all addresses of both families."""

    address_family = socket.AF_INET6
    request_queue_size = 128

    def server_bind(self) -> None:
        """IPv4 as well."""
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main() -> None:
    """Serve until told to stop, and a while longer."""

    def stop(*_: object) -> None:
        time.sleep(LINGER_SECONDS)
        os._exit(0)

    server = Server(("::", int(os.environ.get("PORT", "8080"))), Answer)
    signal.signal(signal.SIGTERM, stop)
    # A handler runs in the main thread, which therefore only waits.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
