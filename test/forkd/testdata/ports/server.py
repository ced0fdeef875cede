"""What tests speak to in a sandbox: HTTP, server-sent events and a WebSocket that
echoes, all of the standard library."""
import base64, hashlib, http.server, json, struct, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            self.websocket()
        elif self.path.startswith("/big/"):
            left = int(self.path[5:])
            self.send_response(200)
            self.send_header("Content-Length", str(left))
            self.end_headers()
            block = bytes(range(256)) * 256
            while left:
                n = min(left, len(block))
                self.wfile.write(block[:n])
                left -= n
        elif self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for i in range(3):
                self.wfile.write(b"data: %d\n\n" % i)
                self.wfile.flush()
            self.close_connection = True
        else:
            self.answer(json.dumps({"name": sys.argv[2], "path": self.path, "headers": self.headers.items()}).encode())

    def do_POST(self):
        sum, size = hashlib.sha256(), 0
        for block in self.body():
            sum.update(block)
            size += len(block)
        self.answer(json.dumps({"size": size, "sha256": sum.hexdigest()}).encode())

    def body(self):
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            while True:
                n = int(self.rfile.readline(), 16)
                block = self.rfile.read(n)
                self.rfile.readline()
                if n == 0:
                    return
                yield block
        left = int(self.headers.get("Content-Length", "0"))
        while left:
            block = self.rfile.read(min(left, 1 << 16))
            left -= len(block)
            yield block

    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                size, = struct.unpack(">H", self.rfile.read(2))
            elif size == 127:
                size, = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(size)))
            head = bytes([first])
            if size < 126:
                head += bytes([size])
            elif size < 1 << 16:
                head += b"\x7e" + struct.pack(">H", size)
            else:
                head += b"\x7f" + struct.pack(">Q", size)
            self.wfile.write(head + data)
            if first & 15 == 8:
                return

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
