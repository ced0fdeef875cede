/*
 * diskwriter DEVICE INDEX STATUS STOP: writes a region of a disk again and again,
 * past the page cache, and reads back before each write what the pass before has
 * written. The number of passes goes to the file STATUS. When the file STOP is
 * there, it reads all of its region once more and ends.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CHUNK = 64 << 10, CHUNKS = 8, WORDS = CHUNK / 8 };

static uint64_t *buffer;

static off_t place(long index, long chunk)
{
	return (off_t)(index * CHUNKS + chunk) * CHUNK;
}

static uint64_t word(uint64_t pass, long chunk, long i)
{
	return pass << 32 | (uint64_t)chunk << 16 | (uint64_t)i;
}

static void check(int disk, long index, uint64_t pass, long chunk)
{
	if (pread(disk, buffer, CHUNK, place(index, chunk)) != CHUNK)
		err(1, "read chunk %ld in pass %" PRIu64, chunk, pass);
	for (long i = 0; i < WORDS; i++)
		if (buffer[i] != word(pass, chunk, i))
			errx(1, "chunk %ld, word %ld is %#" PRIx64 ", and pass %" PRIu64 " wrote %#" PRIx64,
			     chunk, i, buffer[i], pass, word(pass, chunk, i));
}

int main(int argc, char **argv)
{
	if (argc != 5)
		errx(2, "usage: diskwriter DEVICE INDEX STATUS STOP");
	long index = atol(argv[2]);
	int disk = open(argv[1], O_RDWR | O_DIRECT);
	int status = open(argv[3], O_WRONLY | O_CREAT, 0644);
	if (disk < 0 || status < 0 || posix_memalign((void **)&buffer, 4096, CHUNK))
		err(1, "open");
	for (uint64_t pass = 1;; pass++) {
		for (long chunk = 0; chunk < CHUNKS; chunk++) {
			if (pass > 1)
				check(disk, index, pass - 1, chunk);
			for (long i = 0; i < WORDS; i++)
				buffer[i] = word(pass, chunk, i);
			if (pwrite(disk, buffer, CHUNK, place(index, chunk)) != CHUNK || fsync(disk))
				err(1, "write chunk %ld in pass %" PRIu64, chunk, pass);
		}
		if (dprintf(status, "%" PRIu64 "\n", pass) < 0 || lseek(status, 0, SEEK_SET) < 0)
			err(1, "status");
		if (access(argv[4], F_OK) == 0) {
			for (long chunk = 0; chunk < CHUNKS; chunk++)
				check(disk, index, pass, chunk);
			return 0;
		}
	}
}
