/*
 * Draws random numbers without a pause and logs them:
 *
 *	draw FOLDER TASKS
 *
 * Each task calls getrandom(2) for 8 bytes again and again, and adds to its file
 * FOLDER/log.N, for each call, the time stamp counter before it and the bytes. The
 * first task draws without a pause, the others sleep for moments, or nothing else would
 * get to a machine's only processor.
 * FOLDER/begun appears when all tasks draw. They end when their logs are full, or
 * by
 *
 *	draw FOLDER
 *
 * which returns when all have ended, with 0 if none has failed.
 *
 * Whoever compares the logs of copies of a machine knows by the counter which
 * calls came after the copy: no two machines read the same.
 *
 * No C library: the root filesystem has none.
 */
typedef unsigned long u64;

enum { OPEN = 2, MMAP = 9, ACCESS = 21, NANOSLEEP = 35, FORK = 57, EXIT = 60, WAIT = 61, FTRUNCATE = 77, GETRANDOM = 318 };
enum { O_RDWR = 2, O_CREAT = 0100 };
enum { PROT_READ_WRITE = 3, MAP_SHARED = 1 };
enum { ENTRIES = 1 << 18, LOG = ENTRIES * 16 };
/* Between two calls, some 50 µs: a log is to hold what is drawn in ten seconds. */
enum { CYCLES = 150000, NANOSECONDS = 50000 };

static long call(long n, long a, long b, long c, long d, long e)
{
	long r;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = 0;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return r;
}

static u64 cycles(void)
{
	unsigned low, high;
	__asm__ volatile("lfence; rdtsc" : "=a"(low), "=d"(high) : : "memory");
	return (u64)high << 32 | low;
}

/* folder/name */
static const char *path(const char *folder, const char *name)
{
	static char full[256];
	u64 n = 0;
	for (; *folder && n < sizeof full / 2; folder++)
		full[n++] = *folder;
	full[n++] = '/';
	for (; *name && n < sizeof full - 1; name++)
		full[n++] = *name;
	full[n] = 0;
	return full;
}

static int make(const char *folder, const char *name)
{
	return (int)call(OPEN, (long)path(folder, name), O_RDWR | O_CREAT, 0644, 0, 0);
}

static int is(const char *folder, const char *name)
{
	return call(ACCESS, (long)path(folder, name), 0, 0, 0, 0) == 0;
}

static void nap(u64 nanoseconds)
{
	u64 time[2] = { 0, nanoseconds };
	call(NANOSLEEP, (long)time, 0, 0, 0, 0);
}

static int stop(const char *folder)
{
	make(folder, "stop");
	while (!is(folder, "done") && !is(folder, "failed"))
		nap(1000000);
	return is(folder, "failed");
}

static int draw(const char *folder, int task)
{
	char name[] = "log.0", ready[] = "ready.0";
	name[4] = ready[6] = (char)('0' + task);
	int file = make(folder, name);
	if (file < 0 || call(FTRUNCATE, file, LOG, 0, 0, 0) < 0)
		return 1;
	long at = call(MMAP, 0, LOG, PROT_READ_WRITE, MAP_SHARED, file);
	if (at < 0)
		return 1;
	volatile u64 *log = (volatile u64 *)at;
	u64 n = 0;
	for (; n < ENTRIES; n++) {
		if (n % 64 == 0 && is(folder, "stop"))
			break;
		u64 value, before = cycles();
		if (call(GETRANDOM, (long)&value, sizeof value, 0, 0, 0) != sizeof value)
			return 1;
		log[2 * n] = before;
		log[2 * n + 1] = value;
		if (n == 0)
			make(folder, ready);
		if (task > 0)
			nap(NANOSECONDS);
		while (cycles() - before < CYCLES)
			;
	}
	return call(FTRUNCATE, file, (long)(n * 16), 0, 0, 0) < 0;
}

__attribute__((noreturn, used)) static void start(long argc, char **argv)
{
	if (argc == 2)
		call(EXIT, stop(argv[1]), 0, 0, 0, 0);
	if (argc != 3 || argv[2][0] < '1' || argv[2][0] > '9')
		call(EXIT, 2, 0, 0, 0, 0);
	int tasks = argv[2][0] - '0';
	for (int i = 0; i < tasks; i++)
		if (call(FORK, 0, 0, 0, 0, 0) == 0)
			call(EXIT, draw(argv[1], i), 0, 0, 0, 0);
	for (int i = 0; i < tasks; i++) {
		char ready[] = "ready.0";
		ready[6] = (char)('0' + i);
		while (!is(argv[1], ready))
			nap(1000000);
	}
	make(argv[1], "begun");
	int failed = 0;
	for (int i = 0; i < tasks; i++) {
		int status = 0;
		call(WAIT, -1, (long)&status, 0, 0, 0);
		failed |= status;
	}
	make(argv[1], failed ? "failed" : "done");
	call(EXIT, failed != 0, 0, 0, 0, 0);
	__builtin_unreachable();
}

/* The stack holds argc and argv. */
__asm__(".globl _start\n_start:\n\tmov (%rsp), %rdi\n\tlea 8(%rsp), %rsi\n\tand $-16, %rsp\n\tcall start\n");
