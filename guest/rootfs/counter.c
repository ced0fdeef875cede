/*
 * Counts in memory and on a disk in step, and says when the two do not agree:
 *
 *	counter DEVICE OFFSET STATUS
 *
 * Round n writes n to 64 pages of memory and then, past the page cache, to
 * block n % 64 of the disk from OFFSET (in MiB) on. Before it does, the pages must hold
 * n - 1, the blocks before must hold what earlier rounds wrote, and the block
 * to be written must be 64 rounds old: memory and disk of different instants
 * show, whichever is the older one. After each round STATUS gets
 * "<n> <what went wrong, 0 for nothing>\n", 12 and 4 digits wide.
 *
 *	counter STATUS ROUNDS
 *
 * prints the line that is there, waits until so many more rounds are done or
 * something went wrong, and prints the line of then.
 *
 * No C library: the root filesystem has none.
 */
typedef unsigned long u64;

enum { WRITE = 1, OPEN = 2, PREAD = 17, PWRITE = 18, NANOSLEEP = 35, EXIT = 60 };
enum { O_RDWR = 2, O_CREAT = 0100, O_DIRECT = 040000 };
enum { PAGE = 4096, WORDS = PAGE / 8, BLOCKS = 64, PAGES = 64 };

static long call(long n, long a, long b, long c, long d)
{
	long r;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return r;
}

static volatile u64 memory[PAGES][WORDS] __attribute__((aligned(PAGE)));
static u64 block[WORDS] __attribute__((aligned(PAGE)));
static u64 base;
static int disk, status;

static u64 number(const char *s)
{
	u64 n = 0;
	for (; *s >= '0' && *s <= '9'; s++)
		n = n * 10 + (u64)(*s - '0');
	return n;
}

enum { LINE = 18, WRONG = 13 };

static void report(u64 n, u64 wrong)
{
	char line[LINE];
	line[17] = '\n';
	line[12] = ' ';
	for (int i = 16; i > 12; i--, wrong /= 10)
		line[i] = (char)('0' + wrong % 10);
	for (int i = 11; i >= 0; i--, n /= 10)
		line[i] = (char)('0' + n % 10);
	call(PWRITE, status, (long)line, sizeof line, 0);
}

static int holds(u64 round, u64 want)
{
	if (call(PREAD, disk, (long)block, PAGE, (long)(base + round % BLOCKS * PAGE)) != PAGE)
		return 0;
	for (int i = 0; i < WORDS; i++)
		if (block[i] != want)
			return 0;
	return 1;
}

static u64 wrong(u64 n)
{
	for (int p = 0; p < PAGES; p++)
		for (int i = 0; i < WORDS; i += 64)
			if (memory[p][i] != n - 1)
				return 1;
	for (u64 back = 1; back <= 8 && back < n; back++)
		if (!holds(n - back, n - back))
			return 2;
	if (!holds(n, n > BLOCKS ? n - BLOCKS : 0))
		return 3;
	return 0;
}

/* Prints the status once there is one that is good enough; returns its round. */
static u64 await(u64 least)
{
	static const u64 millisecond[2] = { 0, 1000000 };
	char line[LINE + 1] = { 0 };
	for (;;) {
		if (call(PREAD, status, (long)line, LINE, 0) == LINE && (number(line) >= least || number(line + WRONG)))
			break;
		call(NANOSLEEP, (long)millisecond, 0, 0, 0);
	}
	call(WRITE, 1, (long)line, LINE, 0);
	return number(line);
}

__attribute__((noreturn, used)) static void start(long argc, char **argv)
{
	if (argc == 3) {
		status = (int)call(OPEN, (long)argv[1], 0, 0, 0);
		if (status < 0)
			call(EXIT, 1, 0, 0, 0);
		await(await(0) + number(argv[2]));
		call(EXIT, 0, 0, 0, 0);
	}
	if (argc != 4)
		call(EXIT, 2, 0, 0, 0);
	disk = (int)call(OPEN, (long)argv[1], O_RDWR | O_DIRECT, 0, 0);
	base = number(argv[2]) << 20;
	status = (int)call(OPEN, (long)argv[3], O_RDWR | O_CREAT, 0644, 0);
	if (disk < 0 || status < 0)
		call(EXIT, 1, 0, 0, 0);
	for (u64 n = 1;; n++) {
		u64 what = wrong(n);
		for (int p = 0; p < PAGES; p++)
			for (int i = 0; i < WORDS; i += 64)
				memory[p][i] = n;
		for (int i = 0; i < WORDS; i++)
			block[i] = n;
		if (!what && call(PWRITE, disk, (long)block, PAGE, (long)(base + n % BLOCKS * PAGE)) != PAGE)
			what = 4;
		report(n, what);
		if (what)
			call(EXIT, 3, 0, 0, 0);
	}
}

__asm__(".globl _start\n"
	"_start:\n"
	"	mov (%rsp), %rdi\n"
	"	lea 8(%rsp), %rsi\n"
	"	and $-16, %rsp\n"
	"	call start\n");
