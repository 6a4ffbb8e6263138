"""A model hub on loopback: lists repos, serves files with ETag and Range, and can cut a transfer in the middle."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """``repos``: owner/repo -> {file: bytes}. ``cut_after`` bytes, the first ``cuts`` file GETs lose their connection."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.cuts = 0
        self.cut_after = 0
        self.gets: list[tuple[str, str | None]] = []  # (file, Range header)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(send_body=False)

            def do_GET(self) -> None:
                self._answer(send_body=True)

            def _answer(self, send_body: bool) -> None:
                listing = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/\w+(?:\?.*)?", self.path)
                file = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/\w+/([^?]+)(?:\?.*)?", self.path)
                if listing and listing[1] in hub.repos:
                    files = [{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in hub.repos[listing[1]].items()]
                    self._send(200, json.dumps(files).encode(), {}, send_body)
                elif file and file[2] in hub.repos.get(file[1], {}):
                    self._file(file[2], hub.repos[file[1]][file[2]], send_body)
                else:
                    self._send(404, b'{"error": "not found"}', {"X-Error-Code": "EntryNotFound"}, send_body)

            def _file(self, name: str, data: bytes, send_body: bool) -> None:
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                wanted = self.headers.get("Range")
                if send_body:
                    hub.gets.append((name, wanted))
                status = 200
                if wanted:
                    start = int(wanted.removeprefix("bytes=").split("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                    data, status = data[start:], 206
                if send_body and hub.cuts > 0:
                    hub.cuts -= 1
                    self.send_response(status)
                    for key, value in {**headers, "Content-Length": str(len(data))}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(data[: hub.cut_after])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(status, data, headers, send_body)

            def _send(self, status: int, body: bytes, headers: dict[str, str], send_body: bool) -> None:
                self.send_response(status)
                for key, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if send_body:
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
