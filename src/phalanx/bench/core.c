/* The shared-memory core without Python: medians of what the ranks do together, alternated, in microseconds. Built and run by
 * core.py. With -DWITH_MPI the ranks are MPI's and its all_reduce is timed beside ours; else they are forked.
 *
 * Usage: core RANKS BYTES ITERATIONS */
#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef WITH_MPI
#include <mpi.h>
#endif

enum { PING_PONG, STAGED, RESIDENT, MEMCPY, MPI, WAYS };
static const char *const NAMES[] = {"ping_pong", "staged", "resident", "memcpy", "mpi"};

struct meeting { /* memory that the forked ranks share */
    _Atomic int arrived[8];
    int descriptor[64];
    pid_t pid[64];
    uint64_t control;
};

static struct meeting *meeting;
static int rank, size, step;

static void meet(void) {
#ifdef WITH_MPI
    MPI_Barrier(MPI_COMM_WORLD);
#else
    atomic_fetch_add(&meeting->arrived[step], 1);
    while (atomic_load(&meeting->arrived[step]) < size) usleep(100);
#endif
    step++;
}

static struct group *open_group(struct proc *p) {
    meeting->pid[rank] = getpid();
    meeting->descriptor[rank] = proc_start(p, NULL, (size_t)4 << 30, (uint64_t)rank + 1);
    if (rank == 0) {
        struct control *c = proc_allocate(p, control_bytes(size));
        memset(c, 0, control_bytes(size));
        c->size = (uint64_t)size, c->stamp = 1;
        meeting->control = offset_of(p, c);
    }
#ifdef WITH_MPI
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_INT, meeting->descriptor, 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_INT, meeting->pid, 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Bcast(&meeting->control, 8, MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
    meet();
    int peers[64], ranks[64];
    for (int i = 0; i < size; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", meeting->pid[i], meeting->descriptor[i]);
        ranks[i] = i;
        peers[i] = i == rank ? -1 : proc_attach(p, open(path, O_RDWR | O_CLOEXEC), (uint32_t)meeting->pid[i], (uint64_t)i + 1);
    }
    meet();
    const char *why;
    struct group *g = group_open(p, meeting->control, rank, size, peers, ranks, "bench", &why);
    if (!g) fprintf(stderr, "%s\n", why), exit(1);
    return g;
}

static void finish(struct op *o) {
    op_wait(o, -1);
    if (atomic_load(&o->state) != DONE) fprintf(stderr, "%s\n", o->error), exit(1);
    op_release(o);
}

static void all_reduce(struct group *g, float *x, size_t count) {
    struct op *o = op_new(g, ALL_REDUCE, 0, 60);
    o->dtype = PHX_F32, o->item = 4, o->count = count, o->kernel = phx_kernel(PHX_F32, PHX_SUM);
    for (int i = 0; i < size; i++) o->src[i] = o->dst[i] = (uint8_t *)x;
    op_issue(o);
    finish(o);
}

static void barrier(struct group *g) {
    struct op *o = op_new(g, BARRIER, 0, 60);
    op_issue(o);
    finish(o);
}

static void message(struct group *g, uint32_t kind, void *x, size_t bytes) {
    struct op *o = op_new(g, kind, 0, 60);
    o->peer = 1 - rank, o->bytes = bytes, o->src[0] = o->dst[0] = x;
    op_issue(o);
    finish(o);
}

static void ping_pong(struct group *g, void *x, size_t bytes) {
    if (rank == 0) message(g, SEND, x, bytes), message(g, RECV, x, bytes);
    if (rank == 1) message(g, RECV, x, bytes), message(g, SEND, x, bytes);
}

static int ascending(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

int main(int count, char **words) {
    if (count != 4) return 2;
    size = atoi(words[1]);
    size_t bytes = strtoull(words[2], NULL, 10), iterations = strtoull(words[3], NULL, 10);
    meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
#ifdef WITH_MPI
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
#else
    for (rank = 0; rank < size - 1; rank++)
        if (!fork()) break;
    rank = size - 1 - rank; /* the parent is rank 0 and prints */
#endif
    struct proc p;
    struct group *g = open_group(&p);
    float *private = aligned_alloc(64, bytes + 64), *copy = aligned_alloc(64, bytes + 64), *resident = proc_allocate(&p, bytes);
    memset(private, 0, bytes), memset(copy, 0, bytes), memset(resident, 0, bytes);
    double *times = malloc(WAYS * iterations * sizeof *times);
    for (size_t i = 0; i < iterations + 3; i++) {
        for (int way = 0; way < WAYS; way++) {
            barrier(g);
            double start = now();
            switch (way) {
            case PING_PONG: if (size == 2) ping_pong(g, private, bytes); break;
            case STAGED: all_reduce(g, private, bytes / 4); break;
            case RESIDENT: all_reduce(g, resident, bytes / 4); break;
            case MEMCPY: memcpy(copy, private, bytes); __asm__ volatile("" ::"r"(copy) : "memory"); break;
#ifdef WITH_MPI
            case MPI: MPI_Allreduce(MPI_IN_PLACE, private, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
#endif
            }
            float took = (float)(now() - start);
            /* the slowest rank's time counts */
            struct op *o = op_new(g, ALL_REDUCE, 0, 60);
            o->dtype = PHX_F32, o->item = 4, o->count = 1, o->reduce = PHX_MAX, o->kernel = phx_kernel(PHX_F32, PHX_MAX);
            for (int j = 0; j < size; j++) o->src[j] = o->dst[j] = (uint8_t *)&took;
            op_issue(o);
            finish(o);
            if (i >= 3) times[(size_t)way * iterations + i - 3] = took;
        }
    }
    if (rank == 0) {
        printf("{\"ranks\": %d, \"bytes\": %zu, \"iterations\": %zu", size, bytes, iterations);
        for (int way = 0; way < WAYS; way++) {
            double *t = times + (size_t)way * iterations;
            qsort(t, iterations, sizeof *t, ascending);
            printf(", \"%s\": [%.3f, %.3f, %.3f]", NAMES[way], 1e6 * t[iterations / 20], 1e6 * t[iterations / 2], 1e6 * t[iterations * 19 / 20]);
        }
        printf("}\n");
    }
    barrier(g);
    group_close(g);
    proc_stop(&p);
#ifdef WITH_MPI
    MPI_Finalize();
#else
    while (rank == 0 && wait(NULL) > 0) {}
#endif
    return 0;
}
