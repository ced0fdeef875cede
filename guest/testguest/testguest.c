/*
 * The bare test guest: the smallest thing a VMM can boot, told by its host
 * over I/O ports what to do. It exists so that fork, snapshot, dirty tracking
 * and stall tests need no Linux, and a failure points at the VMM.
 *
 * Entry: as a 64-bit Linux kernel (Documentation/x86/boot.rst, "64-bit boot
 * protocol"): long mode, the first 4 GiB identity mapped, rsi = boot_params.
 * It sets its own stack, and uses no interrupts, IDT, SSE or heap.
 * Loaded at 16 MiB; it touches nothing below 16 MiB or above its own image
 * (less than 64 KiB) unless a command names the page.
 *
 * Ports, all 32 bits wide:
 *   0x510  out: results. The first is 0x41475254 ("AGRT") = booted
 *   0x514  in:  the next command
 *   0x518  in:  the next argument of that command
 *   0x600  out (8 bits): ACPI sleep control register
 *
 * Commands, their arguments, and what is written to 0x510:
 *   0 nothing    -                           - (asks again)
 *   1 ping       value                       value
 *   2 dirty      start count stride value    count
 *   3 check      start count stride value    pages which hold what 2 wrote
 *   4 read       start count stride          xor of all 8-byte words, folded to 32 bits
 *   5 timed      start count stride value    longest write in TSC ticks: low, high; count
 *   6 spin       count                       longest gap between two rdtsc: low, high
 *   7 power off  -                           (outb 0x34 to 0x600, then halts)
 *   8 triple fault -                         (does not return)
 *   9 halt       -                           (cli, hlt forever)
 *  10 jump       address                     (runs whatever is there)
 *  11 classes    start count stride value least
 *                                            as 5, and before the count how many writes took
 *                                            that many ticks, for each of 128 classes
 *   others       -                           0xffffffff
 *
 * start is a page number (4 KiB pages), the i-th page is start + i*stride, and
 * the 8 bytes at the start of page p become
 *   (value << 32 | p & 0xffffffff) * 0x9e3779b97f4a7c15   (mod 2^64)
 * so a host can compute them as well.
 *
 * Of writes that take least ticks or more, those of 4 << o | p << o to the next
 * are in class 4 * o + p, p being 0 to 3: an octave has four classes.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum { RESULT = 0x510, COMMAND = 0x514, ARGUMENT = 0x518, SLEEP_CONTROL = 0x600 };

static inline void outl(u16 port, u32 v) { __asm__ volatile("outl %0, %1" ::"a"(v), "d"(port) : "memory"); }
static inline void outb(u16 port, u8 v) { __asm__ volatile("outb %0, %1" ::"a"(v), "d"(port) : "memory"); }
static inline u32 inl(u16 port)
{
	u32 v;
	__asm__ volatile("inl %1, %0" : "=a"(v) : "d"(port) : "memory");
	return v;
}

/* lfence on both sides: the write being timed must not move across it. */
static inline u64 ticks(void)
{
	u32 lo, hi;
	__asm__ volatile("lfence\n\trdtsc\n\tlfence" : "=a"(lo), "=d"(hi)::"memory");
	return (u64)hi << 32 | lo;
}

static inline u32 arg(void) { return inl(ARGUMENT); }
static inline volatile u64 *page(u64 n) { return (volatile u64 *)(n << 12); }
static inline u64 pattern(u32 value, u64 n) { return ((u64)value << 32 | (u32)n) * 0x9e3779b97f4a7c15UL; }

struct range {
	u64 start, count, stride;
};

static struct range range(void)
{
	struct range r;
	r.start = arg();
	r.count = arg();
	r.stride = arg();
	return r;
}

static void dirty(void)
{
	struct range r = range();
	u32 value = arg();
	for (u64 i = 0, n = r.start; i < r.count; i++, n += r.stride)
		*page(n) = pattern(value, n);
	outl(RESULT, r.count);
}

static void check(void)
{
	struct range r = range();
	u32 value = arg(), good = 0;
	for (u64 i = 0, n = r.start; i < r.count; i++, n += r.stride)
		good += *page(n) == pattern(value, n);
	outl(RESULT, good);
}

static void read(void)
{
	struct range r = range();
	u64 x = 0;
	for (u64 i = 0, n = r.start; i < r.count; i++, n += r.stride)
		x ^= *page(n);
	outl(RESULT, (u32)x ^ (u32)(x >> 32));
}

static void timed(void)
{
	struct range r = range();
	u32 value = arg();
	u64 longest = 0;
	for (u64 i = 0, n = r.start; i < r.count; i++, n += r.stride) {
		u64 before = ticks();
		*page(n) = pattern(value, n);
		/* Fenced by ticks(): a store is only in the store buffer, but
		 * the fault which a stall is made of happens before it retires. */
		u64 took = ticks() - before;
		if (took > longest)
			longest = took;
	}
	outl(RESULT, (u32)longest);
	outl(RESULT, (u32)(longest >> 32));
	outl(RESULT, r.count);
}

enum { CLASSES = 128 };
static u32 classes[CLASSES];

static void classify(u64 took)
{
	u32 octave = 63 - (u32)__builtin_clzl(took | 4) - 2;
	u32 class = 4 * octave + (u32)(took >> octave & 3);
	classes[class < CLASSES ? class : CLASSES - 1]++;
}

static void timed_classes(void)
{
	struct range r = range();
	u32 value = arg();
	u64 least = arg(), longest = 0;
	for (int i = 0; i < CLASSES; i++)
		classes[i] = 0;
	for (u64 i = 0, n = r.start; i < r.count; i++, n += r.stride) {
		u64 before = ticks();
		*page(n) = pattern(value, n);
		u64 took = ticks() - before;
		if (took > longest)
			longest = took;
		if (took >= least)
			classify(took);
	}
	outl(RESULT, (u32)longest);
	outl(RESULT, (u32)(longest >> 32));
	for (int i = 0; i < CLASSES; i++)
		outl(RESULT, classes[i]);
	outl(RESULT, r.count);
}

static void spin(void)
{
	u64 count = arg(), longest = 0, last = ticks();
	for (u64 i = 0; i < count; i++) {
		u64 now = ticks();
		if (now - last > longest)
			longest = now - last;
		last = now;
	}
	outl(RESULT, (u32)longest);
	outl(RESULT, (u32)(longest >> 32));
}

__attribute__((noreturn)) static void halt(void)
{
	for (;;)
		__asm__ volatile("cli\n\thlt");
}

__attribute__((noreturn)) static void triple_fault(void)
{
	struct {
		u16 limit;
		u64 base;
	} __attribute__((packed)) empty = { 0, 0 };
	/* A page fault: a KVM that emulates its guests knows no int3 or ud2. */
	__asm__ volatile("lidt %0\n\tmovb $0, (%1)" ::"m"(empty), "r"(1UL << 40) : "memory");
	halt();
}

/* To where nothing is, for instance: KVM cannot emulate a fetch from there. */
__attribute__((noreturn)) static void jump(void)
{
	u64 to = arg();
	__asm__ volatile("jmp *%0" ::"r"(to));
	__builtin_unreachable();
}

/* ACPI 6.4 §4.8.3.7: SLP_TYPx in bits 2..4, SLP_EN is bit 5. S5 is type 5. */
__attribute__((noreturn)) static void power_off(void)
{
	outb(SLEEP_CONTROL, 5 << 2 | 1 << 5);
	halt();
}

__attribute__((noreturn, used)) static void guest_main(void)
{
	outl(RESULT, 0x41475254);
	for (;;) {
		switch (inl(COMMAND)) {
		case 0: break;
		case 1: outl(RESULT, arg()); break;
		case 2: dirty(); break;
		case 3: check(); break;
		case 4: read(); break;
		case 5: timed(); break;
		case 6: spin(); break;
		case 7: power_off();
		case 8: triple_fault();
		case 9: halt();
		case 10: jump();
		case 11: timed_classes(); break;
		default: outl(RESULT, 0xffffffff);
		}
	}
}

__attribute__((used)) static u8 stack[16384] __attribute__((aligned(16)));

__asm__(".section .text.start,\"ax\",@progbits\n"
	".globl _start\n"
	"_start:\n"
	"	cli\n"
	"	cld\n"
	"	lea stack+16384(%rip), %rsp\n"
	"	xor %ebp, %ebp\n"
	"	call guest_main\n"
	".previous\n");
