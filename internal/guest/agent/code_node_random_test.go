package agent

import "testing"

// TestNodeRandom: the functions that draw from the kernel instead of OpenSSL behave
// like Node's own, in results, refusals and callbacks, and for modules of either
// kind. That forks draw differently is TestNodeForks in test/gvisor.
func TestNodeRandom(t *testing.T) {
	r, _ := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	wantOK(t, inNode(t, c, `
const crypto = require("crypto");
const code = (f) => { try { return String(f()); } catch (e) { return e.code || e.name; } };
const later = (f) => new Promise((r) => f((e, v) => r(e || v)));
const zeros = (b) => b.filter((x) => x === 0).length;
undefined`))
	for _, tt := range []struct{ source, result string }{
		{"[crypto.randomBytes(0).length, crypto.randomBytes(3 << 20).length, zeros(crypto.randomBytes(4096)) < 64]", "[ 0, 3145728, true ]"},
		{"[crypto.rng, crypto.prng, crypto.pseudoRandomBytes].every((f) => f === crypto.randomBytes)", "true"},
		{"[crypto.randomBytes, crypto.randomFill, crypto.randomFillSync, crypto.randomInt, crypto.randomUUID, crypto.webcrypto.getRandomValues].map((f) => f.name + f.length).join()",
			"'randomBytes2,randomFill4,randomFillSync1,randomInt3,randomUUID1,getRandomValues1'"},
		{"[-1, 'x', undefined, 2 ** 31].map((n) => code(() => crypto.randomBytes(n)))", "[\n  'ERR_OUT_OF_RANGE',\n  'ERR_INVALID_ARG_TYPE',\n  'ERR_INVALID_ARG_TYPE',\n  'ERR_OUT_OF_RANGE'\n]"},
		{"code(() => crypto.randomBytes(1, 'x'))", "'ERR_INVALID_ARG_TYPE'"},
		{"(await later((f) => crypto.randomBytes(2000, f))).length", "2000"},
		// A part, in elements; the rest stays as it is.
		{"const w = crypto.randomFillSync(new Uint32Array(64), 32, 16); [zeros(w.subarray(0, 32)), zeros(w.subarray(32, 48)), zeros(w.subarray(48))]", "[ 32, 0, 16 ]"},
		{"const w2 = await later((f) => crypto.randomFill(new Uint32Array(64), 32, 16, f)); [zeros(w2.subarray(0, 32)), zeros(w2.subarray(32, 48)), zeros(w2.subarray(48))]", "[ 32, 0, 16 ]"},
		{"const w3 = await later((f) => crypto.randomFill(new Uint32Array(64), 32, f)); [zeros(w3.subarray(0, 32)), zeros(w3.subarray(32))]", "[ 32, 0 ]"},
		{"zeros(new Uint32Array(await later((f) => crypto.randomFill(new ArrayBuffer(64), f))))", "0"},
		{"zeros(new Uint32Array(crypto.randomFillSync(new ArrayBuffer(64))))", "0"},
		{"[code(() => crypto.randomFillSync([])), code(() => crypto.randomFillSync(new Uint8Array(4), 5)), code(() => crypto.randomFill(new Uint8Array(4)))]", "[ 'ERR_INVALID_ARG_TYPE', 'ERR_OUT_OF_RANGE', 'ERR_INVALID_ARG_TYPE' ]"},
		{"const ints = Array.from({length: 2000}, () => crypto.randomInt(-3, 4)); [Math.min(...ints), Math.max(...ints), new Set(ints).size]", "[ -3, 3, 7 ]"},
		{"[crypto.randomInt(1), crypto.randomInt(5, 6), crypto.randomInt(1, undefined), await later((f) => crypto.randomInt(1, f)), await later((f) => crypto.randomInt(7, 8, f))]", "[ 0, 5, 0, 0, 7 ]"},
		{"[crypto.randomInt(2 ** 48 - 1) < 2 ** 48, code(() => crypto.randomInt(2 ** 48)), code(() => crypto.randomInt(3, 3)), code(() => crypto.randomInt(0.5)), code(() => crypto.randomInt(1, 2, 'x')), code(() => crypto.randomInt(() => {}))]",
			"[\n  true,\n  'ERR_OUT_OF_RANGE',\n  'ERR_OUT_OF_RANGE',\n  'ERR_INVALID_ARG_TYPE',\n  'ERR_INVALID_ARG_TYPE',\n  'ERR_INVALID_ARG_TYPE'\n]"},
		{"const ids = Array.from({length: 300}, (_, i) => i % 2 ? crypto.randomUUID() : crypto.webcrypto.randomUUID()); [ids.every((u) => /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/.test(u)), new Set(ids).size]", "[ true, 300 ]"},
		{"[crypto.randomUUID({ disableEntropyCache: true }).length, code(() => crypto.randomUUID({ disableEntropyCache: 1 })), code(() => crypto.randomUUID(1))]", "[ 36, 'ERR_INVALID_ARG_TYPE', 'ERR_INVALID_ARG_TYPE' ]"},
		{"[zeros(crypto.webcrypto.getRandomValues(new Uint32Array(16))), code(() => crypto.webcrypto.getRandomValues(new Float64Array(1))), code(() => crypto.webcrypto.getRandomValues(new Uint8Array(65537)))]", "[ 0, 17, 22 ]"},
		{"const esm = await import('node:crypto'); [esm.randomBytes === crypto.randomBytes, esm.randomUUID === require('crypto').randomUUID]", "[ true, true ]"},
	} {
		if o := inNode(t, c, tt.source); o.result(t) != tt.result {
			t.Errorf("%s: %s, not %s (%+v)", tt.source, o.result(t), tt.result, o.failure(t))
		}
	}
}
