"""A web server that returns its pod's name and the client's address, and keeps serving while its pod terminates."""

import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Time for all proxies to remove this pod from their rules.
LINGER_SECONDS = float(os.environ.get("LINGER_SECONDS", "8"))


class Answer(BaseHTTPRequestHandler):
    """Handles one request per connection."""

    def do_GET(self) -> None:
        """Respond with JSON to every path."""
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
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Listens on all addresses of both families."""

    address_family = socket.AF_INET6
    request_queue_size = 128

    def server_bind(self) -> None:
        """Accept IPv4, too."""
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main() -> None:
    """Serve until SIGTERM and LINGER_SECONDS longer."""

    def stop(*_: object) -> None:
        time.sleep(LINGER_SECONDS)
        os._exit(0)

    server = Server(("::", int(os.environ.get("PORT", "8080"))), Answer)
    signal.signal(signal.SIGTERM, stop)
    # Python runs signal handlers in the main thread, so the main thread only waits.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
