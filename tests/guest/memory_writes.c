/*
 * Writes to guest memory that are counted: does each of them outlive a live migration?
 *
 * usage: memory_writes MIB
 *
 * Each page of MIB mebibytes holds the number of the pass that wrote it last. Each pass looks for
 * its predecessor's number in every page before it writes its own; a page with another one has
 * lost a write. After each pass it prints "memory pass N lost M" to its standard output, M counted
 * since its start.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

int main(int argc, char **argv)
{
	uint64_t pages, page, pass, lost = 0;
	volatile char *memory;

	if (argc != 2 || (pages = strtoull(argv[1], NULL, 10) * (1 << 20) / PAGE) == 0) {
		fprintf(stderr, "usage: memory_writes MIB\n");
		return 2;
	}
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED) {
		perror("memory_writes: mmap");
		return 2;
	}
	/* Others in the guest have to get on, too. */
	if (nice(10) == -1)
		perror("memory_writes: nice");
	for (pass = 1;; pass++) {
		for (page = 0; page < pages; page++) {
			volatile uint64_t *number = (volatile uint64_t *)(memory + page * PAGE);

			if (*number != pass - 1)
				lost++;
			*number = pass;
		}
		printf("memory pass %llu lost %llu\n", (unsigned long long)pass,
		       (unsigned long long)lost);
		fflush(stdout);
	}
}
