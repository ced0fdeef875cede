/*
 * Writes to memory when told and says how long that took:
 *
 *	touch-pages MIB STRIDE
 *
 * The memory is MIB of pages that lie STRIDE pages apart. Each byte on standard
 * input is a command: 'p' is one pass over it, 'l' is passes for about a second and a
 * half. The answer is a line: the longest write and the longest pass, in
 * nanoseconds.
 *
 * No C library: the root filesystem has none.
 */
typedef unsigned long u64;

enum { READ = 0, WRITE = 1, MMAP = 9, EXIT = 60, CLOCK_GETTIME = 228 };
enum { PROT_RW = 3, MAP_PRIVATE_ANONYMOUS = 0x22, MONOTONIC = 1, PAGE = 4096 };

static long call(long n, long a, long b, long c, long d, long e, long f)
{
	long r;
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return r;
}

static u64 now(void)
{
	u64 t[2];
	call(CLOCK_GETTIME, MONOTONIC, (long)t, 0, 0, 0, 0);
	return t[0] * 1000000000UL + t[1];
}

static u64 ticks(void)
{
	unsigned lo, hi;
	__asm__ volatile("lfence\n\trdtsc\n\tlfence" : "=a"(lo), "=d"(hi)::"memory");
	return (u64)hi << 32 | lo;
}

static u64 number(const char *s)
{
	u64 n = 0;
	for (; *s >= '0' && *s <= '9'; s++)
		n = n * 10 + (u64)(*s - '0');
	return n;
}

static int decimal(char *to, u64 n)
{
	char digits[20];
	int k = 0, i = 0;
	do
		digits[k++] = (char)('0' + n % 10);
	while (n /= 10);
	while (k)
		to[i++] = digits[--k];
	return i;
}

__attribute__((noreturn, used)) static void start(long argc, char **argv)
{
	if (argc != 3)
		call(EXIT, 2, 0, 0, 0, 0, 0);
	u64 pages = (number(argv[1]) << 20) / PAGE, stride = number(argv[2]), round = 0;
	volatile char *m = (char *)call(MMAP, 0, (long)(pages * stride * PAGE), PROT_RW, MAP_PRIVATE_ANONYMOUS, -1, 0);
	if ((long)m < 0 && (long)m > -4096)
		call(EXIT, 1, 0, 0, 0, 0, 0);
	for (u64 i = 0; i < pages; i++)
		m[i * stride * PAGE] = 1;
	char command;
	while (call(READ, 0, (long)&command, 1, 0, 0, 0) == 1) {
		u64 began = now(), ticked = ticks(), longest = 0, pass = 0;
		do {
			u64 passed = now();
			round++;
			for (u64 i = 0; i < pages; i++) {
				u64 before = ticks();
				*(volatile u64 *)(m + i * stride * PAGE) = round;
				u64 took = ticks() - before;
				if (took > longest)
					longest = took;
			}
			passed = now() - passed;
			if (passed > pass)
				pass = passed;
		} while (command == 'l' && now() - began < 1500000000UL);
		u64 ns = now() - began, all = ticks() - ticked;
		char line[64];
		int n = decimal(line, (u64)((double)longest * (double)ns / (double)all));
		line[n++] = ' ';
		n += decimal(line + n, pass);
		line[n++] = '\n';
		call(WRITE, 1, (long)line, n, 0, 0, 0);
	}
	call(EXIT, 0, 0, 0, 0, 0, 0);
	__builtin_unreachable();
}

__asm__(".globl _start\n"
	"_start:\n"
	"	mov (%rsp), %rdi\n"
	"	lea 8(%rsp), %rsi\n"
	"	and $-16, %rsp\n"
	"	call start\n");
