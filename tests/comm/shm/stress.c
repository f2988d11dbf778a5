/* Ranks as threads of one process, each with a segment of its own, run one random program and check every result: for the
 * sanitizers, which cannot see from one process into another. Usage: stress RANKS OPERATIONS SEED */
#define _GNU_SOURCE
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define SEGMENT ((size_t)96 << 20)
#define LARGEST 200000
#define IN_FLIGHT 4

struct rank {
    int rank, size, operations;
    uint64_t seed;
    struct proc proc, *all;
    uint64_t *controls;
    pthread_barrier_t *barrier;
};

static uint64_t next(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static int32_t value(uint64_t operation, int rank, size_t i) { return (int32_t)((operation * 31 + (uint64_t)rank * 7 + i * 3) % 1000); }

#define CHECK(condition)                                                                                                  \
    do {                                                                                                                  \
        if (!(condition)) {                                                                                               \
            fprintf(stderr, "rank %d, operation %d: %s is false (kind %d, count %zu)\n", r->rank, at_op, #condition, kind, count); \
            abort();                                                                                                      \
        }                                                                                                                 \
    } while (0)

struct running {
    struct op *op;
    int at_op, kind, root;
    size_t count;
    int32_t *src, *dst;
    bool resident, in_place;
};

static void *memory(struct rank *r, size_t count, bool resident) {
    return resident ? proc_allocate(&r->proc, count * 4) : malloc(count * 4 + 4);
}

static void give_back(struct rank *r, void *address, bool resident) {
    if (resident) proc_free(&r->proc, address); else free(address);
}

static void finish(struct rank *r, struct running *f) {
    if (!f->op) return;
    int kind = f->kind, n = r->size, at_op = f->at_op;
    size_t count = f->count;
    op_wait(f->op, -1);
    if (atomic_load(&f->op->state) != DONE) fprintf(stderr, "%s\n", f->op->error);
    CHECK(atomic_load(&f->op->state) == DONE);
    op_release(f->op);
    f->op = NULL;
    for (size_t i = 0; i < count; i += count > 64 ? 1 + count / 61 : 1) {
        int64_t sum = 0;
        for (int j = 0; j < n; j++) sum += value(at_op, j, i);
        switch (kind) {
        case ALL_REDUCE: CHECK(f->dst[i] == sum); break;
        case REDUCE: CHECK(r->rank != f->root || f->dst[i] == sum); break;
        case BROADCAST: CHECK(f->dst[i] == value(at_op, f->root, i)); break;
        case REDUCE_SCATTER:
            sum = 0;
            for (int j = 0; j < n; j++) sum += value(at_op, j, (size_t)r->rank * count + i);
            CHECK(f->dst[i] == sum);
            break;
        case ALL_GATHER: for (int j = 0; j < n; j++) CHECK(f->dst[(size_t)j * count + i] == value(at_op, j, i)); break;
        case GATHER: for (int j = 0; j < n && r->rank == f->root; j++) CHECK(f->dst[(size_t)j * count + i] == value(at_op, j, i)); break;
        case SCATTER: CHECK(f->dst[i] == value(at_op, f->root, (size_t)r->rank * count + i)); break;
        case ALL_TO_ALL: for (int j = 0; j < n; j++) CHECK(f->dst[(size_t)j * count + i] == value(at_op, j, (size_t)r->rank * count + i)); break;
        case RECV: CHECK(f->dst[i] == value(at_op, (r->rank + n - 1) % n, i)); break;
        }
    }
    if (!f->in_place) give_back(r, f->src, f->resident);
    give_back(r, f->dst, f->resident);
}

static void *run(void *argument) {
    struct rank *r = argument;
    int n = r->size, peers[n], ranks[n];
    for (int i = 0; i < n; i++) {
        ranks[i] = i;
        peers[i] = i == r->rank ? -1 : proc_attach_memory(&r->proc, r->all[i].head, -1);
    }
    if (r->rank == 0) {
        for (int k = 0; k < 2; k++) {
            struct control *c = proc_allocate(&r->proc, control_bytes(n));
            memset(c, 0, control_bytes(n));
            c->size = (uint64_t)n, c->stamp = (uint64_t)k + 1;
            r->controls[k] = offset_of(&r->proc, c);
        }
    }
    pthread_barrier_wait(r->barrier);
    const char *why = NULL;
    struct group *groups[2];
    for (int k = 0; k < 2; k++) groups[k] = group_open(&r->proc, r->controls[k], r->rank, n, peers, ranks, k ? "second" : "first", &why);
    uint64_t shared = r->seed, own = r->seed + 1000 + (uint64_t)r->rank; /* every rank draws the same program, and its own memory and delays */
    struct running flight[IN_FLIGHT] = {0};
    for (int at_op = 1; at_op <= r->operations; at_op++) {
        int kind = (int)(next(&shared) % 11), root = (int)(next(&shared) % (uint64_t)n);
        size_t count = next(&shared) % 3 ? next(&shared) % 300 : next(&shared) % (LARGEST / (size_t)n);
        struct group *g = groups[next(&shared) % 2];
        if (kind == EXCHANGE) kind = BARRIER;
        if (kind == SEND) kind = RECV;
        bool many_in = kind == REDUCE_SCATTER || kind == SCATTER || kind == ALL_TO_ALL, many_out = kind == ALL_GATHER || kind == GATHER || kind == ALL_TO_ALL;
        struct running *f = &flight[at_op % IN_FLIGHT];
        finish(r, f);
        *f = (struct running){.at_op = at_op, .kind = kind, .root = root, .count = count, .resident = next(&own) % 2};
        if (kind == BARRIER) f->count = count = 0;
        size_t ins = many_in ? count * (size_t)n : count, outs = many_out ? count * (size_t)n : count;
        f->dst = memory(r, outs, f->resident);
        f->in_place = kind == ALL_REDUCE || kind == BROADCAST;
        f->src = f->in_place ? f->dst : memory(r, ins, f->resident);
        for (size_t i = 0; i < ins; i++) f->src[i] = value(at_op, r->rank, i);
        struct op *sent = NULL;
        if (kind == RECV) {
            struct op *o = sent = op_new(g, SEND, 0, 60);
            o->peer = (r->rank + 1) % n, o->tag = at_op, o->bytes = count * 4, o->src[0] = (uint8_t *)f->src;
            op_issue(o);
            op_leave(o);
            o = f->op = op_new(g, RECV, 0, 60);
            o->peer = next(&own) % 2 ? -1 : (r->rank + n - 1) % n, o->tag = at_op, o->bytes = count * 4, o->dst[0] = (uint8_t *)f->dst;
        } else {
            struct op *o = f->op = op_new(g, (uint32_t)kind, 0, 60);
            o->dtype = PHX_I32, o->item = 4, o->count = count, o->root = kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER ? (uint32_t)root : 0;
            if (kind <= REDUCE) o->kernel = phx_kernel(PHX_I32, PHX_SUM);
            for (int i = 0; i < n; i++) {
                o->src[i] = (uint8_t *)f->src + (many_in ? (size_t)i * count * 4 : 0);
                o->dst[i] = (uint8_t *)f->dst + (many_out ? (size_t)i * count * 4 : 0);
            }
            o->src_whole = true;
        }
        op_issue(f->op);
        op_leave(f->op);
        if (sent) { /* its memory is looked at until it is done */
            op_wait(sent, -1);
            CHECK(atomic_load(&sent->state) == DONE);
            op_release(sent);
        }
        uint64_t pause = next(&own) % 64;
        if (pause == 0) nanosleep(&(struct timespec){0, 200000}, NULL);
        if (pause < 16) finish(r, f);
    }
    for (int k = 0; k < IN_FLIGHT; k++) finish(r, &flight[k]);
    pthread_barrier_wait(r->barrier);
    for (int k = 0; k < 2; k++) group_close(groups[k]);
    proc_stop(&r->proc);
    return NULL;
}

int main(int count, char **words) {
    int n = count > 1 ? atoi(words[1]) : 3, operations = count > 2 ? atoi(words[2]) : 1000;
    uint64_t seed = count > 3 ? strtoull(words[3], NULL, 10) : 0, controls[2];
    struct rank ranks[n];
    struct proc procs[n];
    (void)procs;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)n);
    pthread_t threads[n];
    static struct proc all[64];
    for (int i = 0; i < n; i++) {
        ranks[i] = (struct rank){.rank = i, .size = n, .operations = operations, .seed = seed, .all = all, .controls = controls, .barrier = &barrier};
        void *base = mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        proc_init(&ranks[i].proc, base, SEGMENT, -1, (uint64_t)i + 1);
        all[i].head = ranks[i].proc.head;
    }
    for (int i = 0; i < n; i++) pthread_create(&threads[i], NULL, run, &ranks[i]);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    printf("%d ranks, %d operations, seed %llu: right\n", n, operations, (unsigned long long)seed);
    return 0;
}
