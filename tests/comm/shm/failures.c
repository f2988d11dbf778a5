/* What fails in the C core, with ranks as threads of one process. Usage:
 *
 *   failures fuzz ITERATIONS   timeouts, aborts and closes at random moments under operations on tensors in segments: what is done must
 *                              be right, and memory of what has failed must be left alone
 *   failures dead ROUNDS       seconds until a rank that waits in slices of 0.1 s, as the Python module does, notices that its peer was
 *                              killed: the mean and the worst */
#define _GNU_SOURCE
#include "core.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3
#define SEGMENT ((size_t)64 << 20)
#define ROOM ((size_t)1 << 20) /* floats of a tensor */
#define OURS 99.0f

static struct proc procs[RANKS];
static pthread_barrier_t all;
static uint64_t control, iterations;
static _Atomic int done, wrong, failed, overwritten;

static void start(int n) {
    memset(procs, 0, sizeof procs);
    for (int i = 0; i < n; i++)
        proc_init(&procs[i], mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), SEGMENT, -1, (uint64_t)i + 1);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            if (i != j) proc_attach_memory(&procs[i], procs[j].head, -1);
}

static void make_control(int n) {
    static uint64_t stamps;
    struct control *c = proc_allocate(&procs[0], control_bytes(n));
    memset(c, 0, control_bytes(n));
    c->size = (uint64_t)n;
    c->stamp = ++stamps;
    control = offset_of(&procs[0], c);
}

static struct group *join(int rank, int n) {
    int peers[RANKS], ranks[RANKS], next = 0;
    for (int i = 0; i < n; i++) ranks[i] = i, peers[i] = i == rank ? -1 : next++;
    const char *why;
    return group_open(&procs[rank], control, rank, n, peers, ranks, "failures", &why);
}

static struct op *collective(struct group *g, uint32_t kind, float *x, size_t count, double timeout) {
    struct op *o = op_new(g, kind, 0, timeout);
    o->dtype = PHX_F32, o->item = 4, o->count = count;
    if (kind == ALL_REDUCE) o->kernel = phx_kernel(PHX_F32, PHX_SUM);
    for (int i = 0; i < g->size; i++) o->src[i] = o->dst[i] = (uint8_t *)x;
    o->src_whole = true;
    return o;
}

static struct op *message(struct group *g, uint32_t kind, int peer, float *x, size_t count, double timeout) {
    struct op *o = op_new(g, kind, 0, timeout);
    o->peer = peer, o->bytes = count * 4, o->src[0] = o->dst[0] = (uint8_t *)x;
    return o;
}

static uint64_t next(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static bool all_are(const float *x, size_t count, float value) {
    for (size_t i = 0; i < count; i++)
        if (x[i] != value) return false;
    return true;
}

static void fill(float *x, size_t count, float value) {
    for (size_t i = 0; i < count; i++) x[i] = value;
}

static void *troubled(void *argument) {
    int rank = (int)(intptr_t)argument, left = (rank + RANKS - 1) % RANKS;
    uint64_t shared = 3, own = (uint64_t)rank + 50;
    float *x[2] = {proc_allocate(&procs[rank], ROOM * 4), proc_allocate(&procs[rank], ROOM * 4)};
    for (uint64_t k = 0; k < iterations; k++) {
        if (rank == 0) make_control(RANKS);
        pthread_barrier_wait(&all);
        struct group *g = join(rank, RANKS);
        pthread_barrier_wait(&all);
        size_t count = next(&shared) % 2 ? 3000 + next(&shared) % 30000 : next(&shared) % ROOM;
        uint64_t kind = next(&shared) % 3, trouble = next(&own) % 4;
        usleep((unsigned)(next(&own) % 1500));
        double timeout = trouble == 0 ? 0.0005 : 0.5;
        fill(x[0], count, (float)(rank + 1));
        fill(x[1], count, -1);
        struct op *o[2] = {0};
        if (kind == 0) o[0] = collective(g, ALL_REDUCE, x[0], count, timeout);
        if (kind == 1) o[0] = collective(g, BROADCAST, x[0], count, timeout);
        if (kind == 2) o[0] = message(g, SEND, (rank + 1) % RANKS, x[0], count, timeout), o[1] = message(g, RECV, left, x[1], count, timeout);
        for (int i = 0; i < 2 && o[i]; i++) op_issue(o[i]), op_leave(o[i]);
        if (trouble == 1 || trouble == 2) usleep((unsigned)(next(&own) % 800));
        if (trouble == 1) group_close(g);
        if (trouble == 2) group_abort(g, "a rank gave up");
        float expected[] = {6, 1, (float)(left + 1)};
        for (int i = 0; i < 2 && o[i]; i++) {
            op_wait(o[i], -1);
            bool is_done = atomic_load(&o[i]->state) == DONE;
            atomic_fetch_add(is_done ? &done : &failed, 1);
            if (is_done && (kind < 2 || i == 1) && !all_are(x[i], count, expected[kind])) atomic_fetch_add(&wrong, 1);
            fill(x[i], count, OURS);
            op_release(o[i]);
        }
        group_close(g);
        pthread_barrier_wait(&all);
        for (int i = 0; i < 2 && o[i]; i++)
            if (!all_are(x[i], count, OURS)) atomic_fetch_add(&overwritten, 1);
    }
    return NULL;
}

static void fuzz(void) {
    start(RANKS);
    pthread_barrier_init(&all, NULL, RANKS);
    pthread_t threads[RANKS];
    for (intptr_t i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, troubled, (void *)i);
    for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) proc_stop(&procs[i]);
    printf("{\"done\": %d, \"wrong\": %d, \"failed\": %d, \"overwritten\": %d}\n", done, wrong, failed, overwritten);
}

static void dead(void) {
    double worst = 0, sum = 0;
    for (uint64_t k = 0; k < iterations; k++) {
        start(2);
        make_control(2);
        struct group *g = join(0, 2);
        join(1, 2);
        pid_t child = fork();
        if (!child) pause();
        procs[0].peers[0]->pidfd = (int)syscall(SYS_pidfd_open, child, 0);
        float x[4] = {0};
        struct op *o = collective(g, ALL_REDUCE, x, 4, 10);
        op_issue(o);
        op_wait(o, 0.1);
        kill(child, SIGKILL);
        double killed = now();
        while (atomic_load(&o->state) == PENDING) op_wait(o, 0.1);
        double took = now() - killed;
        sum += took;
        if (took > worst) worst = took;
        proc_stop(&procs[0]);
        waitpid(child, NULL, 0);
    }
    printf("{\"mean\": %.3f, \"worst\": %.3f}\n", sum / (double)iterations, worst);
}

int main(int count, char **words) {
    if (count != 3) return 2;
    iterations = strtoull(words[2], NULL, 10);
    if (!strcmp(words[1], "fuzz")) fuzz(); else dead();
    return 0;
}
