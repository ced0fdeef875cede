'use strict';
// The Node kernel of an AgentRun sandbox. It evaluates what it is sent as
// Node's own REPL does, top-level await and redeclarations included, and speaks
// the frames of docs/design/code.md on descriptors 3 and 4. Standard modules only.
const crypto = process.versions.openssl ? require('crypto') : null;
const fs = require('fs');
const net = require('net');
const repl = require('repl');
const util = require('util');
const { PassThrough, Writable } = require('stream');

const RUN = 1, ENV = 2, RESEED = 3;
const READY = 1, BEGIN = 2, EVENT = 3, DONE = 4;
const RESULT = 2, DISPLAY = 3, ERROR = 4;
const OK = 0, RAISED = 1, INTERRUPTED = 2, EXITED = 3;
const MAX_EVENT = 4 << 20, MAX_PLAIN = 1 << 20, MAX_STACK = 256 << 10;

function uvarint(n) {
  const out = [];
  for (; n > 0x7f; n = Math.floor(n / 128)) out.push((n % 128) | 0x80);
  out.push(n);
  return Buffer.from(out);
}
const data = (b) => Buffer.concat([uvarint(b.length), b]);
function text(s, limit = 1024) {
  let b = Buffer.from(String(s), 'utf8');
  if (b.length > limit) b = Buffer.concat([b.subarray(0, limit - 64), Buffer.from('… (' + b.length + ' bytes in all)')]);
  return data(b);
}

function send(kind, ...payload) {
  const body = Buffer.concat([Buffer.from([kind]), ...payload]);
  const head = Buffer.alloc(4);
  head.writeUInt32LE(body.length);
  writeAll(4, Buffer.concat([head, body]));
}

function writeAll(fd, b) {
  while (b.length > 0) {
    try {
      b = b.subarray(fs.writeSync(fd, b));
    } catch (e) {
      if (e.code !== 'EAGAIN') throw e; // a child has made the pipe non-blocking
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
    }
  }
}

// Node's own streams for pipes hang for ever if a script is terminated between a
// write and its callback. These have no state that could be left behind.
for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
  const stream = new Writable({ decodeStrings: false });
  stream.fd = fd;
  stream.write = (chunk, encoding, done) => {
    if (typeof encoding === 'function') [encoding, done] = [undefined, encoding];
    writeAll(fd, typeof chunk === 'string' ? Buffer.from(chunk, encoding) : Buffer.from(chunk));
    if (done) process.nextTick(done);
    return true;
  };
  Object.defineProperty(process, name, { value: stream, configurable: true, enumerable: true });
}

class Reader {
  constructor(b) { this.b = b; this.at = 0; }
  uvarint() {
    let n = 0;
    for (let scale = 1; ; scale *= 128) {
      const c = this.b[this.at++];
      n += (c & 0x7f) * scale;
      if (c < 0x80) return n;
    }
  }
  text() {
    const n = this.uvarint();
    this.at += n;
    return this.b.toString('utf8', this.at - n, this.at);
  }
  texts() { return Array.from({ length: this.uvarint() }, () => this.text()); }
}

// What process.exit throws: the kernel lives.
class Exit extends Error {
  constructor(code) { super('exit ' + code); this.name = 'Exit'; this.code = code; }
}
let running = null; // ends the execution under way
process.exit = (code) => { throw new Exit(Number(code === undefined ? process.exitCode || 0 : code) & 0xff); };

function complain(e) {
  if (!(e instanceof Exit)) process.stderr.write('Uncaught ' + trace(e) + '\n');
  else if (running) running(e);
}
process.on('uncaughtException', complain);
process.on('unhandledRejection', complain);

function forms(value) {
  const items = new Map();
  const show = Symbol.for('Jupyter.display');
  try {
    if (value !== null && typeof value === 'object' && typeof value[show] === 'function') {
      for (const [mime, v] of Object.entries(value[show]())) {
        items.set(mime, Buffer.from(typeof v === 'string' || v instanceof Uint8Array ? v : JSON.stringify(v)));
      }
    }
  } catch (e) {
    process.stderr.write('Jupyter.display failed: ' + e + '\n');
  }
  if (!items.has('text/plain')) {
    let plain = util.inspect(value);
    if (plain.length > MAX_PLAIN) plain = plain.slice(0, MAX_PLAIN) + '… (' + plain.length + ' characters in all)';
    items.set('text/plain', Buffer.from(plain));
  }
  return items;
}

function publish(kind, value) {
  const body = [];
  let size = 0, count = 0;
  for (const [mime, content] of forms(value)) {
    const item = Buffer.concat([text(mime, 256), data(content)]);
    if (size + item.length > MAX_EVENT - 1024 || count === 32) {
      process.stderr.write('display: ' + mime + ' of ' + content.length + ' bytes is left out: a result has at most ' + MAX_EVENT + ' bytes in 32 forms\n');
      continue;
    }
    body.push(item);
    size += item.length;
    count++;
  }
  send(EVENT, Buffer.from([kind]), uvarint(1), uvarint(count), ...body);
}

// The stack of an error, without frames of Node and of this file.
function trace(e) {
  if (!(e instanceof Error) && !(e && typeof e.stack === 'string')) return util.inspect(e);
  return String(e.stack).split('\n').filter((l) => !/^\s+at (.*[( ])?(node:|<agentrun>)/.test(l)).join('\n');
}

// Random bytes, numbers and UUIDs come from the machine's generator, which is
// another one in every fork. Node's come from OpenSSL, and some of them from
// caches that were filled before: all forks would draw the same. No function of
// Node's reseeds OpenSSL. Its own functions are called nevertheless: they check
// the arguments.
const urandom = fs.openSync('/dev/urandom');
function fill(array, start = 0, size = array.byteLength - start) {
  const b = ArrayBuffer.isView(array) ? Buffer.from(array.buffer, array.byteOffset + start, size) : Buffer.from(array, start, size);
  for (let at = 0; at < b.length;) at += fs.readSync(urandom, b, at, Math.min(b.length - at, 1 << 20), null);
  return array;
}
function uuid() {
  const b = fill(Buffer.alloc(16));
  b[6] = (b[6] & 0x0f) | 0x40;
  b[8] = (b[8] & 0x3f) | 0x80;
  return b.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
}
function drawFromTheMachine() {
  const { randomBytes, randomFill, randomFillSync, randomInt, randomUUID } = crypto;
  const refill = (array, offset = 0, size) => { // both in elements
    const unit = array.BYTES_PER_ELEMENT || 1;
    return fill(array, offset * unit, size === undefined ? undefined : size * unit);
  };
  const mine = {
    randomBytes(size, done) {
      if (typeof done !== 'function') return fill(randomBytes(size, done));
      return randomBytes(size, function (e, b) { done.call(this, e, e ? b : fill(b)); });
    },
    randomFillSync(array, ...part) { return refill(randomFillSync(array, ...part), ...part); },
    randomFill(array, ...part) {
      const done = part.pop();
      if (typeof done !== 'function') return randomFill(array, ...part, done); // which throws
      return randomFill(array, ...part, function (e, b) { done.call(this, e, e ? b : refill(b, ...part)); });
    },
    randomInt(...args) {
      const done = args.find((a) => typeof a === 'function');
      args = args.filter((a) => a !== done);
      randomInt(...args);
      const [min, max] = args.length === 1 ? [0, args[0]] : args; // done, or undefined, is gone
      const all = 2 ** 48, range = max - min;
      let n = all;
      while (n >= all - (all % range)) n = fill(Buffer.alloc(6)).readUIntBE(0, 6);
      n = (n % range) + min;
      if (!done) return n;
      process.nextTick(done, undefined, n);
      return undefined;
    },
    randomUUID(options) {
      randomUUID(options);
      return uuid();
    },
  };
  // Some look at how many arguments a function takes.
  const instead = (f, of) => Object.defineProperty(f, 'length', { value: of.length });
  for (const name of Object.keys(mine)) if (crypto[name]) crypto[name] = instead(mine[name], crypto[name]);
  for (const name of ['rng', 'prng', 'pseudoRandomBytes']) if (crypto[name]) crypto[name] = mine.randomBytes;
  if (crypto.webcrypto) {
    const web = Object.getPrototypeOf(crypto.webcrypto), bytes = web.getRandomValues, text = web.randomUUID;
    web.getRandomValues = instead(function getRandomValues() { return fill(bytes.apply(this, arguments)); }, bytes);
    if (text) web.randomUUID = function randomUUID() { text.apply(this, arguments); return uuid(); };
  }
  require('module').syncBuiltinESMExports();
}
if (crypto) drawFromTheMachine();

// Math.random is V8's own.
function reseed() {
  const s = fill(new Uint32Array(4));
  const next = () => { // sfc32
    const t = (s[0] + s[1] + s[3]++) | 0;
    s[0] = s[1] ^ (s[1] >>> 9);
    s[1] = s[2] + (s[2] << 3);
    s[2] = ((s[2] << 21) | (s[2] >>> 11)) + t;
    return t >>> 0;
  };
  for (let i = 0; i < 12; i++) next();
  Math.random = function random() { return (next() * 0x200000 + (next() >>> 11)) / 0x20000000000000; };
}

const nowhere = new Writable({ write(chunk, encoding, done) { done(); } });
const session = repl.start({ input: new PassThrough(), output: nowhere, prompt: '', terminal: false, useGlobal: true, breakEvalOnSigint: true });
if (session._domain) {
  // Errors are to come to the callback of eval; a domain would take them away.
  session._domain.enter = session._domain.exit = () => {};
}
// Ends an await, also if it comes just before that; Node's listener would close
// the session instead. While a script runs, V8 is interrupted by a watch of
// Node's own, which the removal of a listener after its start takes away with it.
const onInterrupt = () => {
  if (running) running(Object.assign(new Error('interrupted'), { code: 'ERR_SCRIPT_EXECUTION_INTERRUPTED' }));
};
session.removeAllListeners('SIGINT');
session.on('SIGINT', onInterrupt);
process.on('SIGINT', onInterrupt);
process.on('SIGURG', reseed);
globalThis.display = (...values) => { for (const v of values) publish(DISPLAY, v); };

let count = 0;
function run(source) {
  return new Promise((resolve) => {
    running = (e) => resolve([e, undefined]);
    count++;
    // Not from a microtask: V8 forgets those that wait when a script is terminated.
    setImmediate(() => {
      process.removeListener('SIGINT', onInterrupt);
      try {
        session.eval(source + '\n', session.context, '<cell ' + count + '>', (e, value) => resolve([e, value]));
      } catch (e) {
        resolve([e, undefined]);
      } finally {
        process.on('SIGINT', onInterrupt);
      }
    });
  }).then(([e, value]) => {
    running = null;
    if (e instanceof Exit) return [EXITED, e.code];
    if (e === null || e === undefined) {
      if (value !== undefined) {
        try { publish(RESULT, value); } catch (failed) { e = failed; }
      }
      if (!e) return [OK, 0];
    }
    if (e instanceof repl.Recoverable) e = e.err;
    const interrupted = e && e.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
    const name = (e && e.name) || typeof e;
    const value2 = e && e.message !== undefined ? e.message : util.inspect(e);
    send(EVENT, Buffer.from([ERROR]), uvarint(1), text(name, 256), text(value2, 64 << 10), text(trace(e), MAX_STACK));
    return interrupted ? [INTERRUPTED, 130] : [RAISED, 1];
  });
}

async function handle(frame) {
  const r = new Reader(frame.subarray(1));
  if (frame[0] === RESEED) return reseed();
  if (frame[0] === ENV) {
    const set = r.texts();
    for (const name of r.texts()) delete process.env[name];
    for (const kv of set) process.env[kv.slice(0, kv.indexOf('='))] = kv.slice(kv.indexOf('=') + 1);
    return undefined;
  }
  r.uvarint();
  r.texts();
  const source = r.text();
  send(BEGIN);
  const [status, code] = await run(source);
  send(DONE, uvarint(status), uvarint(code * 2), uvarint(0));
  return undefined;
}

let waiting = Buffer.alloc(0);
let turn = Promise.resolve();
const requests = new net.Socket({ fd: 3, readable: true, writable: false });
const leave = process.reallyExit.bind(process);
requests.on('end', () => leave(0));
requests.on('error', () => leave(70));
requests.on('data', (piece) => {
  waiting = Buffer.concat([waiting, piece]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE()) {
    const frame = waiting.subarray(4, 4 + waiting.readUInt32LE());
    waiting = waiting.subarray(4 + frame.length);
    turn = turn.then(() => handle(frame)).catch(() => leave(70));
  }
});
send(READY, text(process.versions.node, 64));
