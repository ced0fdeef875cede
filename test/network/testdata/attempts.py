"""Attempts of a program in a sandbox to reach what its policy does not allow.

Standard input has a JSON list of attempts, each a list: a function below and its
arguments. Standard output gets a JSON list of what came of them.
"""
import errno
import json
import socket
import ssl
import struct
import sys

PATIENCE = 20  # for connections, which are refused at once
QUIET = 1  # for datagrams and packets, of which nothing may come back


def outcome(e):
    """Name how a system call has failed."""
    if isinstance(e, (socket.timeout, TimeoutError)):
        return "timeout"
    if isinstance(e, socket.gaierror):
        return "unknown name"
    if isinstance(e, ssl.SSLError):
        return "TLS: " + (e.reason or "")
    return errno.errorcode.get(e.errno, str(e))


def connect(host, port):
    """Connect to the first address alone, as a program does that knows what it wants."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    s = socket.socket(family, kind, proto)
    s.settimeout(PATIENCE)
    s.connect(address)
    return s


def drain(s):
    data = b""
    while True:
        try:
            b = s.recv(1 << 16)
        except OSError as e:
            return data.decode("latin-1") + outcome(e)
        if not b:
            return data.decode("latin-1")
        data += b


def tcp(host, port, text=""):
    """Send text, and return what comes until the end of the connection."""
    with connect(host, port) as s:
        if text:
            s.sendall(text.encode("latin-1"))
        return "connected " + drain(s)


def udp(host, port, text="x"):
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.settimeout(QUIET)
        s.connect(address)
        s.send(text.encode("latin-1"))
        return "answered " + s.recv(1 << 16).decode("latin-1")


def hello(name):
    """Return the ClientHello for a name; None is without a name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    c = context.wrap_bio(into, out, server_hostname=name)
    try:
        c.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def tls(host, name, size=1 << 20, extra=0):
    """Begin a handshake for a name, in pieces of some size. A server answers it."""
    with connect(host, 443) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = hello(name)
        if extra:  # in several records of one message
            body = data[5:]
            data = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(body[i:i + extra])) + body[i:i + extra] for i in range(0, len(body), extra))
        for i in range(0, len(data), size):
            s.sendall(data[i:i + size])
        got = s.recv(5)
        return "connected " + ("handshake" if got[:1] == b"\x16" else repr(got))


def question(name, kind, klass=1):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label)
    return struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, klass)


def verdict(answer):
    _, flags, _, answers, _, _ = struct.unpack("!HHHHHH", answer[:12])
    return "rcode %d, %d answers" % (flags & 15, answers)


def dns(server, name, kind):
    """Ask a server over UDP."""
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(PATIENCE if server == "10.255.255.1" else QUIET)
        s.connect((server, 53))
        s.send(question(name, kind))
        return verdict(s.recv(4096))


def dns_stream(server, name, kind):
    """Ask a server over TCP."""
    q = question(name, kind)
    with connect(server, 53) as s:
        s.sendall(struct.pack("!H", len(q)) + q)
        answer = s.makefile("rb")
        return verdict(answer.read(*struct.unpack("!H", answer.read(2))))


def resolve(name):
    return " ".join(sorted({a[4][0] for a in socket.getaddrinfo(name, 80)}))


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ping(address, patience=QUIET):
    """Send an ICMP echo request."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
        s.settimeout(patience)
        body = struct.pack("!BBHHH", 8, 0, 0, 77, 1) + b"abcdefgh"
        s.sendto(body[:2] + struct.pack("!H", checksum(body)) + body[4:], (address, 0))
        while True:
            got, sender = s.recvfrom(4096)
            if sender[0] == address and got[20] == 0 and got[24:26] == struct.pack("!H", 77):
                return "answered"


def packet(source, target, protocol, body, options=b"", fragment=0):
    head = struct.pack("!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 20 + len(options) + len(body), 9, fragment, 64, protocol, 0,
                       socket.inet_aton(source), socket.inet_aton(target)) + options
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def segment(source, target, port, flags=2):
    """Return a TCP segment: a SYN."""
    bare = struct.pack("!HHIIBBHHH", 4321, port, 1000, 0, 5 << 4, flags, 65535, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, 6, len(bare))
    return bare[:16] + struct.pack("!H", checksum(pseudo + bare)) + bare[18:]


def datagram(source, target, port, text):
    bare = struct.pack("!HHHH", 4321, port, 8 + len(text), 0) + text
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, 17, len(bare))
    return bare[:6] + struct.pack("!H", checksum(pseudo + bare)) + bare[8:]


INSIDE, GATEWAY = bytes.fromhex("02a9e7000002"), bytes.fromhex("02a9e7000001")


def frame(data, source=INSIDE, target=GATEWAY, kind=0x0800, patience=QUIET):
    """Put a frame on the wire, and wait for what the gateway sends back."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as s:
        s.bind(("eth0", 0))
        s.settimeout(patience)
        s.send(target + source + struct.pack("!H", kind) + data)
        while True:
            try:
                got = s.recv(1 << 16)
            except socket.timeout:
                return "sent, no answer"
            if got[6:12] == GATEWAY and got[12:14] == b"\x08\x00" and got[23] == 6:
                return "answered by %s with TCP flags %d" % (socket.inet_ntoa(got[26:30]), got[47])


def raw(data, patience=QUIET):
    """Send an IP packet, and wait for a TCP segment that comes back."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as answers, \
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as s:
        answers.settimeout(patience)
        s.sendto(data, (socket.inet_ntoa(data[16:20]), 0))
        while True:
            try:
                got = answers.recv(1 << 16)
            except socket.timeout:
                return "sent, no answer"
            if got[22:24] == struct.pack("!H", 4321):
                return "answered by %s with TCP flags %d" % (socket.inet_ntoa(got[12:16]), got[33])


SENDERS = {"frame": frame, "raw": raw}


def plain(how, target, port):
    """Send a SYN as a kernel does, and wait for its answer."""
    return SENDERS[how](packet("10.255.255.2", target, 6, segment("10.255.255.2", target, port)), patience=PATIENCE)


def spoofed(how, source, target, port):
    """Send a SYN from an address that the sandbox does not have."""
    return SENDERS[how](packet(source, target, 6, segment(source, target, port)))


def spoofed_udp(how, source, target, port):
    return SENDERS[how](packet(source, target, 17, datagram(source, target, port, b"x")))


def fragments(how, target, port):
    """Send a SYN in two fragments."""
    whole = segment("10.255.255.2", target, port)
    SENDERS[how](packet("10.255.255.2", target, 6, whole[:8], fragment=0x2000))
    return SENDERS[how](packet("10.255.255.2", target, 6, whole[8:], fragment=1))


def routed(how, target, through, port):
    """Send a SYN with a loose source route (RFC 791)."""
    options = struct.pack("!BBB4sB", 131, 7, 4, socket.inet_aton(target), 0)
    return SENDERS[how](packet("10.255.255.2", through, 6, segment("10.255.255.2", through, port), options=options))


def tunnelled(how, target, port):
    """Send a SYN inside of IP-in-IP."""
    inner = packet("10.255.255.2", target, 6, segment("10.255.255.2", target, port))
    return SENDERS[how](packet("10.255.255.2", target, 4, inner))


def foreign(target, port):
    """Send a SYN from another MAC."""
    return frame(packet("10.255.255.2", target, 6, segment("10.255.255.2", target, port)), source=bytes.fromhex("020000000099"))


def tagged(target, port):
    """Send a SYN in a VLAN."""
    return frame(struct.pack("!HH", 5, 0x0800) + packet("10.255.255.2", target, 6, segment("10.255.255.2", target, port)), kind=0x8100)


def main():
    results = []
    for name, *arguments in json.load(sys.stdin):
        try:
            results.append(str(globals()[name](*arguments)))
        except OSError as e:
            results.append(outcome(e))
        except Exception as e:  # a defect of this program
            results.append("%s: %s" % (type(e).__name__, e))
    json.dump(results, sys.stdout)


main()
