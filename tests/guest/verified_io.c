/*
 * I/O to a disk of which every block is known: nothing may be lost, stale or foreign.
 *
 * usage: verified_io DEVICE SEED THREADS DEPTH FOLDER
 *
 * The disk must read as zeros at the start. It is divided among THREADS, each on a CPU (and so a
 * virtqueue) of its own, which keeps up to DEPTH asynchronous requests of 4 KiB to 1 MiB in flight:
 * writes (some with FUA), reads, flushes, now and then UNMAP and WRITE SAME of zeros. The ledger
 * knows what each block has to hold; a block with a request in flight gets no second one. As soon
 * as a request is answered its buffer is filled with something else, so a write that is done again
 * later carries wrong data.
 *
 * A block is eight sectors, each 16 times this stamp of 32 bytes, in little-endian order:
 *   u64 seed ^ MAGIC, u64 sector, u64 generation, u64 check = sector * C1 ^ generation * C2 ^ seed
 * Generation 0 is a block of zeros. After UNMAP a block may hold zeros or what it held; the first
 * read settles it.
 *
 * FOLDER/status is there as soon as signals are taken. SIGUSR1 writes it anew and begins a new
 * measurement of the longest pause: the longest time without any completion. SIGTERM ends the I/O,
 * reads the whole disk and writes FOLDER/ledger (u32 generation of each block) and FOLDER/status
 * with finished=1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define SECTOR 512
#define STAMP 32
#define MOST_BLOCKS 256
#define MOST_DEPTH 64
#define MOST_THREADS 16
#define MAGIC 0x6f69646569666972ull
#define C1 0x9e3779b97f4a7c15ull
#define C2 0xc2b2ae3d27d4eb4full
#define RWF_DSYNC_BIT 0x2

enum kind { WRITE, WRITE_FUA, READ, FLUSH, UNMAP, ZERO, KINDS };
static const char *const KIND[KINDS] = {"write", "fua", "read", "flush", "unmap", "zero"};

struct request {
	struct iocb iocb;
	enum kind kind;
	uint64_t block, blocks;
	uint32_t generation;
	char *memory, *data;
};

struct worker {
	pthread_t thread;
	unsigned int number;
	uint64_t first, blocks, random;
	uint32_t generation;
	aio_context_t context;
	struct request requests[MOST_DEPTH];
	struct request *idle[MOST_DEPTH];
	unsigned int idles;
};

static int device;
static unsigned int threads, depth;
static uint64_t seed, blocks;
static const char *folder;
/* Each element belongs to the worker of its block. */
static uint32_t *ledger;
static uint8_t *busy, *maybe_zero;
static struct worker workers[MOST_THREADS];
static atomic_bool stopping;
static atomic_ullong done[KINDS], bytes, errors, wrong, last_done_us, longest_us, finished;
static pthread_mutex_t said = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

/* Counts a finding, and tells the first ones. */
static void found(atomic_ullong *counter, const char *form, ...)
{
	va_list list;

	if (atomic_fetch_add(counter, 1) >= 10)
		return;
	pthread_mutex_lock(&said);
	va_start(list, form);
	vprintf(form, list);
	va_end(list);
	printf("\n");
	fflush(stdout);
	pthread_mutex_unlock(&said);
}

static uint64_t draw(struct worker *w, uint64_t below)
{
	w->random ^= w->random >> 12;
	w->random ^= w->random << 25;
	w->random ^= w->random >> 27;
	return (w->random * 0x2545f4914f6cdd1dull >> 16) % below;
}

static void stamp(uint64_t to[4], uint64_t sector, uint64_t generation)
{
	to[0] = seed ^ MAGIC;
	to[1] = sector;
	to[2] = generation;
	to[3] = (sector * C1) ^ (generation * C2) ^ seed;
}

static void fill(char *data, uint64_t block, uint64_t count, uint32_t generation)
{
	for (uint64_t sector = 0; sector < count * (BLOCK / SECTOR); sector++) {
		uint64_t one[4];

		stamp(one, block * (BLOCK / SECTOR) + sector, generation);
		for (int i = 0; i < SECTOR / STAMP; i++)
			memcpy(data + sector * SECTOR + i * STAMP, one, STAMP);
	}
}

/* Whether `data` is what `block` holds at `generation`. */
static int holds(const char *data, uint64_t block, uint32_t generation)
{
	static const char zeros[BLOCK];
	char expected[BLOCK];

	if (generation == 0)
		return memcmp(data, zeros, BLOCK) == 0;
	fill(expected, block, 1, generation);
	return memcmp(data, expected, BLOCK) == 0;
}

static void check(const char *data, uint64_t block)
{
	if (maybe_zero[block]) {
		maybe_zero[block] = 0;
		if (holds(data, block, 0)) {
			ledger[block] = 0;
			return;
		}
	}
	if (holds(data, block, ledger[block]))
		return;
	for (uint64_t sector = 0; sector < BLOCK / SECTOR; sector++) {
		uint64_t want[4], got[4];

		stamp(want, block * (BLOCK / SECTOR) + sector, ledger[block]);
		memcpy(got, data + sector * SECTOR, STAMP);
		if (ledger[block] == 0)
			memset(want, 0, STAMP);
		if (memcmp(want, got, STAMP) == 0)
			continue;
		found(&wrong,
		      "WRONG block %llu sector %llu: want generation %u, found magic %llx sector %llu "
		      "generation %llu%s",
		      (unsigned long long)block, (unsigned long long)sector, ledger[block],
		      (unsigned long long)(got[0] ^ seed), (unsigned long long)got[1],
		      (unsigned long long)got[2],
		      got[3] == ((got[1] * C1) ^ (got[2] * C2) ^ seed) ? "" : " with a wrong check");
		return;
	}
	found(&wrong, "WRONG block %llu: torn within a sector", (unsigned long long)block);
}

/* What counts as the end of a request for the longest pause. */
static void completed(enum kind kind, uint64_t length)
{
	uint64_t now = now_us(), before = atomic_exchange(&last_done_us, now), longest;

	atomic_fetch_add(&done[kind], 1);
	atomic_fetch_add(&bytes, length);
	longest = atomic_load(&longest_us);
	while (now > before && now - before > longest &&
	       !atomic_compare_exchange_weak(&longest_us, &longest, now - before))
		;
}

/* Finds a range without a request in flight; 0 if chance did not. */
static int choose(struct worker *w, uint64_t *block, uint64_t *count)
{
	uint64_t most = (uint64_t[]){1, 1, 4, 4, 16, 16, 64, MOST_BLOCKS}[draw(w, 8)];

	for (int attempt = 0; attempt < 8; attempt++) {
		uint64_t i, length = 1 + draw(w, most < w->blocks ? most : w->blocks);
		uint64_t start = w->first + draw(w, w->blocks - length + 1);

		for (i = 0; i < length && !busy[start + i]; i++)
			;
		if (i == length) {
			*block = start;
			*count = length;
			return 1;
		}
	}
	return 0;
}

/* UNMAP and WRITE SAME have no asynchronous call; the requests in flight go on beside them. */
static void erase(struct worker *w, enum kind kind, uint64_t block, uint64_t count)
{
	uint64_t range[2] = {block * BLOCK, count * BLOCK};

	if (ioctl(device, kind == UNMAP ? BLKDISCARD : BLKZEROOUT, range) != 0) {
		found(&errors, "ERROR %s of block %llu count %llu: %s", KIND[kind],
		      (unsigned long long)block, (unsigned long long)count, strerror(errno));
		return;
	}
	completed(kind, 0);
	for (uint64_t i = block; i < block + count; i++) {
		if (kind == ZERO)
			ledger[i] = 0;
		maybe_zero[i] = kind == UNMAP;
	}
	(void)w;
}

static void submit(struct worker *w)
{
	uint64_t block = 0, count = 0, kind_number = draw(w, 100);
	enum kind kind = kind_number < 50   ? WRITE
			 : kind_number < 58 ? WRITE_FUA
			 : kind_number < 90 ? READ
			 : kind_number < 97 ? FLUSH
			 : kind_number < 99 ? UNMAP
					    : ZERO;
	struct request *r;
	struct iocb *list[1];

	if (kind != FLUSH && !choose(w, &block, &count))
		return;
	if (kind == UNMAP || kind == ZERO) {
		erase(w, kind, block, count);
		return;
	}
	r = w->idle[--w->idles];
	memset(&r->iocb, 0, sizeof(r->iocb));
	r->kind = kind;
	r->block = block;
	r->blocks = count;
	/* Not at a page's start: what one descriptor holds differs. */
	r->data = r->memory + draw(w, 8) * SECTOR;
	r->iocb.aio_data = (uintptr_t)r;
	r->iocb.aio_fildes = device;
	if (kind == FLUSH) {
		r->iocb.aio_lio_opcode = IOCB_CMD_FDSYNC;
	} else {
		r->iocb.aio_lio_opcode = kind == READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
		r->iocb.aio_rw_flags = kind == WRITE_FUA ? RWF_DSYNC_BIT : 0;
		r->iocb.aio_buf = (uintptr_t)r->data;
		r->iocb.aio_nbytes = count * BLOCK;
		r->iocb.aio_offset = block * BLOCK;
		if (kind != READ) {
			r->generation = ++w->generation;
			fill(r->data, block, count, r->generation);
		}
		memset(busy + block, 1, count);
	}
	list[0] = &r->iocb;
	if (syscall(SYS_io_submit, w->context, 1, list) != 1) {
		found(&errors, "ERROR io_submit of %s: %s", KIND[kind], strerror(errno));
		memset(busy + block, 0, count);
		w->idle[w->idles++] = r;
	}
}

static void answered(struct worker *w, struct request *r, int64_t result)
{
	int64_t want = r->kind == FLUSH ? 0 : (int64_t)(r->blocks * BLOCK);

	completed(r->kind, r->kind == FLUSH ? 0 : r->blocks * BLOCK);
	if (result != want)
		found(&errors, "ERROR %s of block %llu count %llu: result %lld", KIND[r->kind],
		      (unsigned long long)r->block, (unsigned long long)r->blocks, (long long)result);
	else if (r->kind == READ)
		for (uint64_t i = 0; i < r->blocks; i++)
			check(r->data + i * BLOCK, r->block + i);
	else if (r->kind != FLUSH)
		for (uint64_t i = 0; i < r->blocks; i++) {
			ledger[r->block + i] = r->generation;
			maybe_zero[r->block + i] = 0;
		}
	if (r->kind != FLUSH) {
		memset(busy + r->block, 0, r->blocks);
		/* What a request that is done twice would carry, or read into. */
		memset(r->data, 0xa5, r->blocks * BLOCK);
	}
	w->idle[w->idles++] = r;
}

static void collect(struct worker *w)
{
	struct io_event events[MOST_DEPTH];
	struct timespec timeout = {0, 100000000};
	long got = syscall(SYS_io_getevents, w->context, 1, depth, events, &timeout);

	for (long i = 0; i < got; i++)
		answered(w, (struct request *)(uintptr_t)events[i].data, events[i].res);
}

static void *work(void *argument)
{
	struct worker *w = argument;
	cpu_set_t cpu;

	CPU_ZERO(&cpu);
	CPU_SET(w->number % sysconf(_SC_NPROCESSORS_ONLN), &cpu);
	pthread_setaffinity_np(pthread_self(), sizeof(cpu), &cpu);
	while (!atomic_load(&stopping)) {
		/* Bursts: the queue is filled, and then partly emptied. */
		while (w->idles && draw(w, 8))
			submit(w);
		if (w->idles < depth)
			collect(w);
	}
	while (w->idles < depth)
		collect(w);
	for (uint64_t b = w->first; b < w->first + w->blocks; b += MOST_BLOCKS) {
		uint64_t left = w->first + w->blocks - b, count = left < MOST_BLOCKS ? left : MOST_BLOCKS;
		char *data = w->requests[0].memory;

		if (pread(device, data, count * BLOCK, b * BLOCK) != (ssize_t)(count * BLOCK)) {
			found(&errors, "ERROR the last read of block %llu: %s", (unsigned long long)b,
			      strerror(errno));
			continue;
		}
		for (uint64_t i = 0; i < count; i++)
			check(data + i * BLOCK, b + i);
	}
	return NULL;
}

static FILE *create(const char *name)
{
	char path[256];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	file = fopen(path, "w");
	if (!file) {
		perror(path);
		exit(2);
	}
	return file;
}

static void status(void)
{
	char from[256], to[256];
	FILE *file = create("status.new");
	uint64_t last = atomic_load(&last_done_us), now = now_us();

	for (int kind = 0; kind < KINDS; kind++)
		fprintf(file, "%s=%llu ", KIND[kind], (unsigned long long)atomic_load(&done[kind]));
	fprintf(file, "bytes=%llu errors=%llu wrong=%llu longest_us=%llu quiet_us=%llu finished=%llu\n",
		(unsigned long long)atomic_load(&bytes), (unsigned long long)atomic_load(&errors),
		(unsigned long long)atomic_load(&wrong),
		(unsigned long long)atomic_exchange(&longest_us, 0), (unsigned long long)(now > last ? now - last : 0),
		(unsigned long long)atomic_load(&finished));
	fclose(file);
	snprintf(from, sizeof(from), "%s/status.new", folder);
	snprintf(to, sizeof(to), "%s/status", folder);
	if (rename(from, to) != 0)
		perror(to);
}

static void prepare(struct worker *w, unsigned int number)
{
	w->number = number;
	w->blocks = blocks / threads;
	w->first = number * w->blocks;
	w->random = (seed + number + 1) * C1 | 1;
	if (syscall(SYS_io_setup, depth, &w->context) != 0) {
		perror("verified_io: io_setup");
		exit(2);
	}
	for (unsigned int i = 0; i < depth; i++) {
		struct request *r = &w->requests[i];

		r->memory = aligned_alloc(BLOCK, (MOST_BLOCKS + 1) * BLOCK);
		if (!r->memory) {
			perror("verified_io: memory");
			exit(2);
		}
		memset(r->memory, 0xa5, (MOST_BLOCKS + 1) * BLOCK);
		w->idle[w->idles++] = r;
	}
}

int main(int argc, char **argv)
{
	uint64_t size = 0;
	sigset_t signals;
	int number;

	if (argc != 6) {
		fprintf(stderr, "usage: verified_io DEVICE SEED THREADS DEPTH FOLDER\n");
		return 2;
	}
	seed = strtoull(argv[2], NULL, 10);
	threads = strtoul(argv[3], NULL, 10);
	depth = strtoul(argv[4], NULL, 10);
	folder = argv[5];
	device = open(argv[1], O_RDWR | O_DIRECT);
	if (device < 0 || ioctl(device, BLKGETSIZE64, &size) != 0) {
		perror(argv[1]);
		return 2;
	}
	blocks = size / BLOCK;
	if (!threads || threads > MOST_THREADS || !depth || depth > MOST_DEPTH || blocks < threads) {
		fprintf(stderr, "verified_io: 1 to %d threads, a depth of 1 to %d\n", MOST_THREADS,
			MOST_DEPTH);
		return 2;
	}
	ledger = calloc(blocks, sizeof(*ledger));
	busy = calloc(blocks, 1);
	maybe_zero = calloc(blocks, 1);
	if (!ledger || !busy || !maybe_zero) {
		perror("verified_io: memory");
		return 2;
	}
	sigemptyset(&signals);
	sigaddset(&signals, SIGUSR1);
	sigaddset(&signals, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &signals, NULL);
	for (unsigned int i = 0; i < threads; i++)
		prepare(&workers[i], i);
	atomic_store(&last_done_us, now_us());
	for (unsigned int i = 0; i < threads; i++)
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) {
			perror("verified_io: thread");
			return 2;
		}
	status();
	while (sigwait(&signals, &number) == 0 && number == SIGUSR1)
		status();
	atomic_store(&stopping, 1);
	for (unsigned int i = 0; i < threads; i++)
		pthread_join(workers[i].thread, NULL);
	FILE *file = create("ledger");
	fwrite(ledger, sizeof(*ledger), blocks, file);
	fclose(file);
	atomic_store(&finished, 1);
	status();
	return 0;
}
