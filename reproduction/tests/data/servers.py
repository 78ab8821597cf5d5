"""A web server on 127.0.0.1 whose answers a test chooses."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves ``files`` (path -> bytes); the first ``broken`` answers stop half-way.

    ``gate``, if given, is waited for in the middle of each answer.
    """

    def __init__(self):
        self.files, self.requests, self.broken, self.gate = {}, [], 0, None
        self.half_sent = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=[0.02], daemon=True)
        self._thread.start()

    def close(self):
        if self.gate:
            self.gate.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.requests.append(self.path)
                data = server.files.get(self.path)
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header(
                    "Content-Type", "text/html" if self.path.endswith("/") else "application/json"
                )
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                server.half_sent.set()
                if server.broken > 0:
                    server.broken -= 1
                    return
                if server.gate:
                    server.gate.wait(20)
                try:
                    self.wfile.write(data[len(data) // 2 :])
                except OSError:  # the client was killed
                    pass

            def log_message(self, *args):
                pass

        return Handler


@contextmanager
def serving():
    server = Server()
    try:
        yield server
    finally:
        server.close()
