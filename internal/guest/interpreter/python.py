"""The Python kernel of an AgentRun sandbox: one interpreter that runs cells.

The guest agent starts it with the reading end of a pipe of requests as
descriptor 3 and the writing end of a pipe of events as descriptor 4. It uses
the standard library of Python 3.8 and later, and imports what only some cells
need when they need it: a fork pays for every page.

A frame is a 32-bit little-endian length, then that many bytes: a type and a
payload in the encoding of internal/codec. docs/design/code.md has the table.
"""
import sys

# A file of the user's in the working folder must not replace what is imported
# here. The entry comes back below.
_path0 = sys.path.pop(0) if sys.path and sys.path[0] == "" else None

import ast
import builtins
import fcntl
import io
import linecache
import os
import signal
import stat
import symtable
import time
import traceback
import types
import _thread

DRIVER = "<agentrun>"
CONTROL = 200  # descriptors from here on are out of the way of closing loops

# Requests and events.
RUN, ENV, RESEED, NOTED = 1, 2, 3, 4
READY, BEGIN, EVENT, DONE, NOTE = 1, 2, 3, 4, 5
RESULT, DISPLAY, ERROR = 2, 3, 4
MODE_CODE, MODE_TEXT = 0, 1
OK, RAISED, INTERRUPTED, EXITED = 0, 1, 2, 3
PYTHON, SHELL = 0, 1

# Limits, in bytes.
MAX_EVENT = 4 << 20  # the agent kills a kernel that sends more
MAX_PLAIN = 1 << 20  # of text/plain; longer ones are cut
MAX_TRACEBACK = 256 << 10
MAX_ITEMS = 32
MAX_CELLS = 256  # whose source lines are kept for tracebacks


def uvarint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def varint(n):
    return uvarint(n << 1 if n >= 0 else (-n << 1) - 1)


def data(b):
    return uvarint(len(b)) + b


def text(s, limit=None):
    """A string as it is sent. Lone surrogates are escaped, a long one is cut."""
    # A subclass of str may lie about everything.
    b = str.encode(s, "utf-8", "backslashreplace")
    if limit is not None and len(b) > limit:
        note = "… (%d bytes in all)" % len(b)
        b = b[: limit - 64].decode("utf-8", "ignore").encode() + note.encode()
    return data(b)


class Reader:
    """Reads the fields of a request."""

    def __init__(self, b):
        self.b, self.at = b, 0

    def uvarint(self):
        n = shift = 0
        while True:
            c = self.b[self.at]
            self.at += 1
            n |= (c & 0x7F) << shift
            if c < 0x80:
                return n
            shift += 7

    def text(self):
        n = self.uvarint()
        b = self.b[self.at : self.at + n]
        self.at += n
        return b.decode("utf-8", "surrogateescape")

    def texts(self):
        return [self.text() for _ in range(self.uvarint())]


class Kernel:
    def __init__(self):
        self.requests = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, CONTROL)
        self.events = fcntl.fcntl(4, fcntl.F_DUPFD_CLOEXEC, CONTROL)
        os.close(3)
        os.close(4)
        # Cells may close or redirect 1 and 2; the next one gets them back.
        self.kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, CONTROL) for fd in (1, 2)]
        self.pid = os.getpid()
        self.main_thread = _thread.get_ident()
        self.lock = _thread.allocate_lock()  # for self.events
        self.closed_section = 0  # the main thread must not be interrupted now
        self.command = None  # the process that a cell waits for
        self.interrupts = 0  # that came while it did
        self.pending = False  # an interrupt came when none could be raised
        self.count = 0
        self.loop = None  # of cells with await
        self.cells = []
        self.showing = False  # figures are being shown
        self.own = [None, None]
        for i in (0, 1):
            self.open_stream(i)
        sys.stdin = open(0, "r", encoding="utf-8", errors="surrogateescape", closefd=False)
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = [""]
        self.names = main.__dict__
        self.names["__builtins__"] = builtins
        self.names["display"] = self.display
        builtins.input = no_input
        if _path0 is not None:
            sys.path.insert(0, _path0)
        os.environ.setdefault("MPLBACKEND", "Agg")
        sys.meta_path.insert(0, PyplotFinder(self))
        signal.signal(signal.SIGINT, self.on_interrupt)
        # Ignored by default, so that one that comes before this does no harm.
        signal.signal(signal.SIGURG, lambda *_: reseed())
        os.register_at_fork(before=self.flush, after_in_child=self.in_child)

    # Descriptors and streams.

    def open_stream(self, i):
        stream = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(i + 1, "w", closefd=False)),
            encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.own[i] = stream
        setattr(sys, ("stdout", "stderr")[i], stream)

    def restore_streams(self):
        for i, kept in enumerate(self.kept):
            try:
                ours, theirs = os.fstat(kept), None
                try:
                    theirs = os.fstat(i + 1)
                except OSError:
                    pass
                if theirs is None or (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
                    os.dup2(kept, i + 1)
            except OSError:
                os._exit(70)  # the cell has closed everything
            current = getattr(sys, ("stdout", "stderr")[i], None)
            if current is None or getattr(current, "closed", False) is True or self.own[i].closed:
                self.open_stream(i)

    def flush(self):
        for stream in (sys.stdout, sys.stderr, *self.own):
            try:
                stream.flush()
            except Exception:
                pass  # closed, or not a stream: it is the user's

    def in_child(self):
        """After fork(2): the child has no business with the agent."""
        for fd in (self.requests, self.events):
            try:
                os.close(fd)
            except OSError:
                pass
        self.requests = self.events = -1
        self.lock = _thread.allocate_lock()

    # The control pipes.

    def read(self, n):
        out = b""
        while len(out) < n:
            piece = os.read(self.requests, n - len(out))
            if not piece:
                os._exit(0)  # the agent has closed the kernel
            out += piece
        return out

    def request(self):
        frame = self.read(int.from_bytes(self.read(4), "little"))
        return frame[0], Reader(frame[1:])

    def send(self, kind, payload=b""):
        if os.getpid() != self.pid:
            return
        frame = memoryview((len(payload) + 1).to_bytes(4, "little") + bytes([kind]) + payload)
        ours = _thread.get_ident() == self.main_thread
        self.closed_section += ours
        try:
            with self.lock:
                while frame:
                    frame = frame[os.write(self.events, frame) :]
                if kind == NOTE:
                    self.request()  # the agent has noted how far the outputs were
        except OSError:
            os._exit(70)  # the pipe is gone: so is everybody who could ask
        finally:
            self.closed_section -= ours

    # Interrupts.

    def on_interrupt(self, _signum, frame):
        """Raises KeyboardInterrupt in the cell, and nowhere else.

        Where the cell runs is known from the stack, not from a flag: between
        setting a flag and the next instruction a signal could come.
        """
        if self.command is not None:
            # The command has got it too. One that does not care is killed.
            self.interrupts += 1
            if self.interrupts > 1:
                os.kill(self.command, signal.SIGKILL)
            return
        if not self.closed_section:
            while frame is not None:
                if frame.f_code is Kernel.user.__code__:
                    raise KeyboardInterrupt
                frame = frame.f_back
        self.pending = True

    def user(self, f, *args):
        """Calls what may run code of the user's. Interrupts are raised below here."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt
        return f(*args)

    # Running.

    def serve(self):
        self.send(READY, text("%d.%d.%d" % sys.version_info[:3]))
        while True:
            kind, r = self.request()
            if kind == RUN:
                mode, env, source = r.uvarint(), r.texts(), r.text()
                self.pending = False
                self.send(BEGIN)
                self.run(mode, env, source)
            elif kind == ENV:
                set_env(r.texts(), r.texts())
            elif kind == RESEED:
                reseed()

    def run(self, mode, env, source):
        self.restore_streams()
        # Only these come back: what else the cell sets is to stay.
        before = {name: os.environ.get(name) for name in (kv.partition("=")[0] for kv in env)}
        set_env(env, [])
        status, code, language = RAISED, 1, PYTHON
        try:
            status, code, language = self.user(self.dispatch, mode, source)
        except BaseException as e:
            status, code = self.failed(e, mode)
        try:
            self.user(self.show_figures)
        except BaseException as e:
            if status == OK:
                status, code = self.failed(e, mode)
        self.flush()
        if os.getpid() != self.pid:
            os._exit(code & 0xFF)  # a child of os.fork() has come to the cell's end
        set_env(["%s=%s" % kv for kv in before.items() if kv[1] is not None], [n for n, v in before.items() if v is None])
        self.pending = False
        self.send(DONE, uvarint(status) + varint(code) + uvarint(language))

    def dispatch(self, mode, source):
        if mode == MODE_TEXT and classify(source, self.names) == SHELL:
            return self.shell(source) + (SHELL,)
        self.count += 1
        value, show = self.cell(source)
        if show and value is not None:
            builtins._ = value
            self.publish(RESULT, value)
        return OK, 0, PYTHON

    def cell(self, source):
        """Runs the statements and returns the value of a last expression."""
        name = "<cell %d>" % self.count
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        self.cells.append(name)
        if len(self.cells) > MAX_CELLS:
            linecache.cache.pop(self.cells.pop(0), None)
        # Bytes: a str with surrogates cannot be compiled, these give the error.
        tree = compile(source.encode("utf-8", "surrogateescape"), name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        if tree.body:
            self.evaluate(compile(tree, name, "exec", flags, dont_inherit=True))
        if last is None:
            return None, False
        return self.evaluate(compile(last, name, "eval", flags, dont_inherit=True)), not muted(source, last)

    def evaluate(self, code):
        value = eval(code, self.names)
        if not code.co_flags & 0x80:  # inspect.CO_COROUTINE
            return value
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(value)
        try:
            return self.loop.run_until_complete(task)
        finally:
            if not task.done():  # interrupted: let it clean up
                task.cancel()
                self.loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    def shell(self, source):
        """Runs a command of its own; it changes nothing in the kernel."""
        self.flush()
        program = which("bash") or which("sh") or "/bin/sh"
        default = [signal.SIGINT, signal.SIGURG, signal.SIGPIPE, signal.SIGXFSZ]
        # Interrupts are counted here, not raised: whatever they cut off, somebody has
        # to wait for the command, once.
        self.closed_section += 1
        try:
            self.interrupts = 0
            pid = os.posix_spawn(program, [program, "-c", source], os.environ, setsigdef=default)
            self.command = pid
            if self.pending:  # it came before there was a command to get it
                self.pending, self.interrupts = False, 1
                os.kill(pid, signal.SIGINT)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self.command = None  # from here on the number may be another's
            status = os.waitpid(pid, 0)[1]
        finally:
            self.command = None
            self.closed_section -= 1
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return INTERRUPTED if self.interrupts else OK, code

    def failed(self, e, mode):
        """Tells about what a cell has raised."""
        if isinstance(e, SystemExit):
            return self.exited(e)
        name = type(e).__name__
        try:
            value, trace = self.user(describe, e)
        except BaseException as other:
            value, trace = "", "%s (and its description raised %s)\n" % (name, type(other).__name__)
        if len(trace) > MAX_TRACEBACK:
            half = MAX_TRACEBACK // 2
            trace = trace[:half] + "\n… (cut)\n" + trace[-half:]
        self.flush()
        self.send(EVENT, bytes([ERROR]) + uvarint(1) + text(name, 256) + text(value, 64 << 10) + text(trace, 2 * MAX_TRACEBACK))
        if mode == MODE_TEXT:
            self.complain(trace)
        if isinstance(e, KeyboardInterrupt):
            return INTERRUPTED, 130
        return RAISED, 1

    def exited(self, e):
        code = e.code
        if code is None:
            return EXITED, 0
        if isinstance(code, int):
            return EXITED, int(code) & 0xFF
        try:
            self.complain("%s\n" % self.user(str, code))
        except BaseException:
            pass  # what cannot be printed is not
        return EXITED, 1

    def complain(self, message):
        """Writes to standard error, whatever the cell has done to sys.stderr."""
        try:
            self.own[1].write(message)
            self.own[1].flush()
        except (OSError, ValueError):
            pass  # the cell has closed it

    # Showing values.

    def display(self, *values):
        """Shows values in their richest form."""
        for value in values:
            self.publish(DISPLAY, value)

    def publish(self, kind, value):
        self.publish_items(kind, bundle(value, self.complain))

    def publish_items(self, kind, items):
        body = b""
        count = 0
        for mime, content in items.items():
            item = text(mime, 256) + data(content)
            if len(body) + len(item) > MAX_EVENT - 1024 or count == MAX_ITEMS:
                self.complain("display: %s of %d bytes is left out: a result has at most %d bytes in %d forms\n"
                              % (mime, len(content), MAX_EVENT, MAX_ITEMS))
                continue
            body += item
            count += 1
        self.flush()
        ours = _thread.get_ident() == self.main_thread
        # In another thread nobody could tell the answer from the next request.
        self.send(NOTE if ours else EVENT, bytes([kind]) + uvarint(1) + uvarint(count) + body)
        if self.pending and ours:
            self.pending = False
            raise KeyboardInterrupt

    def show_figures(self, *_, **__):
        """Shows and closes matplotlib's open figures, if it has been imported."""
        plt = sys.modules.get("matplotlib.pyplot")
        if plt is None or self.showing or not hasattr(plt, "get_fignums"):
            return
        self.showing = True
        try:
            for number in plt.get_fignums():
                figure = plt.figure(number)
                out = io.BytesIO()
                figure.savefig(out, format="png", bbox_inches="tight")
                plt.close(figure)
                self.publish_items(DISPLAY, {"text/plain": repr(figure).encode(), "image/png": out.getvalue()})
        finally:
            self.showing = False


class PyplotFinder:
    """Makes pyplot.show() show, once somebody imports pyplot."""

    def __init__(self, kernel):
        self.kernel, self.busy = kernel, False

    def find_spec(self, name, path=None, target=None):
        if name != "matplotlib.pyplot" or self.busy:
            return None
        from importlib.util import find_spec

        self.busy = True
        try:
            spec = find_spec(name)
        finally:
            self.busy = False
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader, kernel = spec.loader, self.kernel
        run = loader.exec_module

        def exec_module(module):
            run(module)
            original = module.show

            def show(*args, **kwargs):
                if str(module.get_backend()).lower() != "agg":
                    return original(*args, **kwargs)
                kernel.show_figures()

            module.show = show
            sys.meta_path[:] = [f for f in sys.meta_path if f is not self]

        loader.exec_module = exec_module
        return spec


def muted(source, last):
    """Whether a semicolon follows the last expression."""
    lines = source.encode("utf-8", "surrogateescape").split(b"\n")
    node = last.body
    if node.end_lineno > len(lines):
        return False
    rest = lines[node.end_lineno - 1][node.end_col_offset :].lstrip(b" \t)")
    return rest.startswith(b";")


def no_input(prompt=""):
    raise EOFError("input() has nobody to ask in a kernel: pass the value as a variable, an environment variable or a file")


def describe(e):
    """The value and the traceback of an exception, without frames of ours."""
    try:
        value = str(e)
    except Exception:
        value = "<str() of the exception failed>"
    tb = e.__traceback__
    first = tb
    while first is not None and not first.tb_frame.f_code.co_filename.startswith("<cell "):
        first = first.tb_next
    if first is None:  # none of the cell's own: a syntax error, say
        first = tb
        while first is not None and first.tb_frame.f_code.co_filename in (DRIVER, "<string>"):
            first = first.tb_next
    whole = told = traceback.TracebackException(type(e), e, first)
    while told is not None:
        told.stack[:] = [f for f in told.stack if f.filename != DRIVER]
        told = told.__cause__ or told.__context__
    return value, "".join(whole.format())


PLAIN = "text/plain"
REPRS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
)


def bundle(value, complain):
    """The forms of a value: MIME type to bytes. There is always a plain one."""
    items = {PLAIN: None}
    # On the type: instances that answer to every name, and classes, are not meant.
    kind = type(value)
    rich = [] if isinstance(value, type) else [r for r in REPRS if getattr(kind, r[0], None) is not None]
    if not isinstance(value, type) and getattr(kind, "_repr_mimebundle_", None) is not None:
        try:
            got = value._repr_mimebundle_(include=None, exclude=None)
            got = got[0] if isinstance(got, tuple) else got
            for mime, content in (got or {}).items():
                items[str(mime)] = content_of(str(mime), content)
        except Exception as e:
            complain("_repr_mimebundle_ of %s failed: %s: %s\n" % (kind.__name__, type(e).__name__, e))
    for method, mime in rich:
        if items.get(mime) is not None:
            continue
        try:
            content = getattr(value, method)()
            content = content[0] if isinstance(content, tuple) else content
            if content is not None:
                items[mime] = content_of(mime, content)
        except Exception as e:
            complain("%s of %s failed: %s: %s\n" % (method, kind.__name__, type(e).__name__, e))
    if items[PLAIN] is None:
        items[PLAIN] = repr(value)
        if len(items[PLAIN]) > MAX_PLAIN:
            items[PLAIN] = items[PLAIN][:MAX_PLAIN] + "… (%d characters in all)" % len(items[PLAIN])
        items[PLAIN] = str.encode(items[PLAIN], "utf-8", "backslashreplace")
    return items


def content_of(mime, content):
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    if isinstance(content, str):
        if mime in ("image/png", "image/jpeg"):
            import base64

            return base64.b64decode(content)
        return str.encode(content, "utf-8", "backslashreplace")
    import json

    return json.dumps(content).encode()


def set_env(sets, unsets):
    for name in unsets:
        os.environ.pop(name, None)
    for kv in sets:
        name, _, value = kv.partition("=")
        os.environ[name] = value
    if any(kv.startswith("TZ=") for kv in sets) or "TZ" in unsets:
        time.tzset()


def reseed():
    """Makes generators that a fork has inherited go their own way.

    secrets, uuid4 and os.urandom draw from the kernel, which the agent reseeds.
    A generator that the user has made and seeded stays what it is.
    """
    # What is half imported, or is not what its name says, is left alone.
    for name, again in (
        ("random", lambda m: m.seed(os.urandom(64))),
        ("numpy.random", lambda m: m.seed(list(os.urandom(64)))),
        ("torch", lambda m: m.manual_seed(int.from_bytes(os.urandom(7), "little"))),
        ("_ssl", lambda m: m.RAND_add(os.urandom(48), 48.0)),
    ):
        module = sys.modules.get(name)
        if module is not None:
            try:
                again(module)
            except Exception:
                pass


def which(name):
    """Finds a command as a shell does."""
    if "/" in name:
        return name if executable(name) else None
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        full = os.path.join(folder or ".", name)
        if executable(full):
            return full
    return None


def executable(path):
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
    except (OSError, ValueError):
        return False
