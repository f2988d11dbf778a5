/* Groups: how they are opened, left and given back, how everything on one fails, and what is said about it. */
#define _GNU_SOURCE
#include "core.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OUTWAIT 5.0 /* seconds for a peer to come out of a tensor of this rank */

/* ---- what is said ---- */

static const char *const OPS[] = {"all_reduce", "reduce_scatter", "reduce",     "all_gather", "broadcast", "gather",
                                  "scatter",    "all_to_all",     "barrier",    "all_to_all", "send",      "recv"};
static const char *const REDUCTIONS[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
static const char *const TYPES[] = {"float32", "float64", "float16", "bfloat16", "int8",      "uint8",
                                    "int16",   "int32",   "int64",   "bool",     "complex64", "complex128"};

int type_text(char *text, size_t room, uint32_t dtype) {
    if (dtype < PHX_OPAQUE) return snprintf(text, room, "%s", TYPES[dtype]);
    return snprintf(text, room, "bytes (type %u)", dtype - PHX_OPAQUE);
}

void describe(char *text, size_t room, uint32_t kind, uint32_t reduce, uint32_t dtype, uint32_t root_rank, uint64_t count) {
    int n = snprintf(text, room, "%s", OPS[kind]);
    if (kind == BARRIER) return;
    if (kind <= REDUCE) n += snprintf(text + n, room - n, "(%s)", REDUCTIONS[reduce]);
    n += snprintf(text + n, room - n, " of ");
    if (kind != EXCHANGE) n += snprintf(text + n, room - n, "%llu ", (unsigned long long)count);
    n += type_text(text + n, room - n, dtype);
    if (kind == EXCHANGE) n += snprintf(text + n, room - n, " with split sizes");
    if (kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER) snprintf(text + n, room - n, " with root %u", root_rank);
}

const char *site_text(struct head *head, uint32_t site) { return site ? (const char *)at(head, (uint64_t)site * LINE) : "an unknown line"; }

static void group_text(struct group *g, char *text, size_t room) {
    int n = snprintf(text, room, "group '%s' (ranks ", g->name);
    for (int i = 0; i < g->size && n < (int)room - 16; i++) n += snprintf(text + n, room - n, "%s%d", i ? ", " : "", g->ranks[i]);
    snprintf(text + n, room - n, ")");
}

/* ---- failing ---- */

void op_fail(struct op *o, const char *reason) {
    struct group *g = o->group;
    char what[256], where[512], text[TEXT_MAX + 1024];
    if (o->kind >= SEND) {
        int n = snprintf(what, sizeof what, "%s of %llu bytes %s ", OPS[o->kind], (unsigned long long)o->bytes, o->kind == SEND ? "to" : "from");
        if (o->peer < 0) n += snprintf(what + n, sizeof what - n, "anybody");
        else n += snprintf(what + n, sizeof what - n, "rank %d", g->ranks[o->peer]);
        if (o->tag) snprintf(what + n, sizeof what - n, " with tag %d", o->tag);
    } else {
        describe(what, sizeof what, o->kind, o->reduce, o->dtype, (uint32_t)g->ranks[o->root], o->count);
    }
    group_text(g, where, sizeof where);
    snprintf(text, sizeof text, "rank %d: %s on %s at %s failed: %s", g->ranks[g->rank], what, where, site_text(g->proc->head, o->site), reason);
    o->error = strdup(text);
    op_end(o, FAILED);
}

/* Peers read and write tensors in segments. Whoever fails an operation, and so gives its memory back, first says so (failed or
 * closed), then waits for who is inside; whoever enters says so first, then looks whether it is too late. All four accesses are
 * sequentially consistent, so one of the two sees the other. */
bool enter(struct group *g, int position) {
    struct control *c = g->control;
    atomic_store(&c->member[g->rank].inside, 1);
    bool may = !atomic_load(&c->failed);
    for (int i = 0; may && i < g->size; i++) may = (position >= 0 && i != position) || !atomic_load(&c->member[i].closed);
    if (!may) leave(g);
    return may;
}

void leave(struct group *g) { atomic_store(&g->control->member[g->rank].inside, 0); }

static void outwait(struct group *g) {
    double until = now() + OUTWAIT;
    for (int i = 0; i < g->size; i++) {
        while (i != g->rank && atomic_load(&g->control->member[i].inside) && peer_alive(g->peer[i])) {
            if (now() > until) {
                g->proc->frozen = true;
                return;
            }
            sched_yield();
        }
    }
}

/* Everything on the group fails from now on; with `tell`, on all its ranks, and the first to say why is the one they believe. */
void group_fail(struct group *g, const char *reason, bool tell) {
    if (g->failure) return;
    char text[TEXT_MAX];
    snprintf(text, sizeof text, "%s", reason);
    if (tell) {
        uint32_t none = 0;
        if (atomic_compare_exchange_strong(&g->control->failed, &none, 1)) {
            snprintf(g->control->reason, sizeof g->control->reason, "%s", reason);
            atomic_store(&g->control->failed, 2);
        } else {
            for (int i = 0; i < 1000 && atomic_load(&g->control->failed) != 2; i++) sched_yield();
            if (atomic_load(&g->control->failed) == 2) snprintf(text, sizeof text, "%s", g->control->reason);
        }
    }
    outwait(g);
    g->failure = strdup(text);
    if (tell) last_words(g->proc, text);
    while (g->first) {
        struct op *o = g->first;
        g->first = o->next;
        op_fail(o, g->failure);
    }
    g->last = NULL;
    while (g->sends) {
        struct op *o = g->sends;
        g->sends = o->next;
        op_fail(o, g->failure);
    }
    while (g->recvs) {
        struct op *o = g->recvs;
        g->recvs = o->next;
        op_fail(o, g->failure);
    }
    g->sends_tail = g->recvs_tail = NULL;
    for (int i = 0; i < g->size; i++) g->channel[i].grants = NULL;
    if (tell) publish(g);
}

void publish(struct group *g) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int i = 0; i < g->size; i++)
        if (i != g->rank) ring_bell(g->heads[i]);
}

void publish_to(struct group *g, int position) {
    atomic_thread_fence(memory_order_seq_cst);
    ring_bell(g->heads[position]);
}

void whereabouts(struct group *g, int position, char *text, size_t room) {
    struct member *m = &g->control->member[position];
    uint64_t latest = 0;
    int parity = -1;
    for (int i = 0; i < 2; i++)
        if (atomic_load(&m->print[i]) && m->signature[i].number >= latest) latest = m->signature[i].number, parity = i;
    if (parity < 0 || !atomic_load(&m->arrived)) {
        snprintf(text, room, "it has not made a collective call here");
        return;
    }
    struct signature s = m->signature[parity];
    char what[256];
    describe(what, sizeof what, s.op, s.reduce, s.dtype, s.root < (uint32_t)g->size ? (uint32_t)g->ranks[s.root] : s.root, s.count);
    snprintf(text, room, "its last collective here, number %llu, was %s at %s", (unsigned long long)s.number + 1, what, site_text(g->heads[position], s.site));
}

void miss_the_dead(struct group *g) {
    for (int i = 0; i < g->size; i++)
        if (i != g->rank && !atomic_load(&g->control->member[i].closed) && !peer_alive(g->peer[i])) atomic_store(&g->peer[i]->missed, 1);
}

bool gone(struct group *g, int position, char *reason, size_t room) {
    bool alive = peer_alive(g->peer[position]);
    if (alive && !atomic_load(&g->control->member[position].closed)) return false;
    char where[1024], before[TEXT_MAX] = "";
    whereabouts(g, position, where, sizeof where);
    if (atomic_load(&g->heads[position]->has_words) == 2)
        snprintf(before, sizeof before, "; before that it had failed: %.600s", g->heads[position]->last_words);
    snprintf(reason, room, "rank %d (process %u) %s; %.700s%.700s", g->ranks[position], g->heads[position]->pid,
             alive ? "has left the group" : "died", where, before);
    return true;
}

/* ---- opening and leaving ---- */

size_t control_bytes(int size) {
    return sizeof(struct control) + (size_t)size * sizeof(struct member) + 5 * (size_t)size * (size_t)size * sizeof(a64);
}

a64 *control_rings(struct control *c) { return (a64 *)(c->member + c->size); }

a64 *control_splits(struct control *c, int parity, int expected) {
    return control_rings(c) + (size_t)(1 + 2 * parity + expected) * c->size * c->size;
}

/* Give back the memory of groups that all members have left. */
static void reap(struct proc *p) {
    for (struct group *g = atomic_load(&p->groups); g; g = g->next) {
        if (g->reaped || pthread_mutex_trylock(&g->lock)) continue; /* the lock: another thread may be in the middle of closing it */
        bool left = !g->open;
        bool given_back = atomic_load(&g->control->stamp) != g->stamp;
        for (int i = 0; left && !given_back && i < g->size; i++)
            if (i != g->rank && atomic_load(&g->control->member[i].closed) != 2 && peer_alive(g->peer[i])) left = false;
        if (left) {
            messages_close(g);
            if (g->slots[g->rank]) proc_free(p, g->slots[g->rank]);
            if (g->owns_control) {
                atomic_store(&g->control->stamp, 0);
                proc_free(p, g->control);
            }
            free(g->slots), free(g->ranks), free(g->peer), free(g->heads), free(g->name), free(g->failure);
            g->reaped = true;
        }
        pthread_mutex_unlock(&g->lock);
    }
}

struct group *group_open(struct proc *p, uint64_t offset, int rank, int size, const int *peers, const int *ranks, const char *name,
                         const char **why) {
    for (int i = 0; i < size; i++) {
        if (i != rank && (peers[i] < 0 || peers[i] >= p->peer_count)) {
            *why = "a peer number is out of range";
            return NULL;
        }
    }
    struct head *owner = rank == 0 ? p->head : p->peers[peers[0]]->head;
    struct control *control = at(owner, offset);
    if (offset + control_bytes(size) > owner->size || control->size != (uint64_t)size) {
        *why = "the control block is for another group";
        return NULL;
    }
    pthread_mutex_lock(&p->opening);
    reap(p);
    struct group *g = atomic_load(&p->groups);
    while (g && !g->reaped) g = g->next;
    if (!g) {
        g = calloc(1, sizeof *g);
        pthread_mutex_init(&g->lock, NULL);
        g->proc = p;
        g->next = atomic_load(&p->groups);
        atomic_store(&p->groups, g);
    }
    pthread_mutex_lock(&g->lock); /* threads may be passing by */
    memset((char *)g + offsetof(struct group, open), 0, sizeof *g - offsetof(struct group, open));
    g->generation++;
    g->rank = rank;
    g->size = size;
    g->control = control;
    g->stamp = atomic_load(&control->stamp);
    g->owns_control = rank == 0;
    g->name = strdup(name);
    g->ranks = malloc((size_t)size * sizeof *g->ranks);
    memcpy(g->ranks, ranks, (size_t)size * sizeof *ranks);
    g->peer = calloc((size_t)size, sizeof *g->peer);
    g->heads = calloc((size_t)size, sizeof *g->heads);
    g->slots = calloc((size_t)size, sizeof *g->slots);
    g->channel = calloc((size_t)size, sizeof *g->channel);
    for (int i = 0; i < size; i++) {
        g->peer[i] = i == rank ? NULL : p->peers[peers[i]];
        g->heads[i] = i == rank ? p->head : g->peer[i]->head;
    }
    g->chunk = (size_t)size * 16384 > CHUNK ? (size_t)size * 16384 : CHUNK;
    g->open = true;
    pthread_mutex_unlock(&g->lock);
    pthread_mutex_unlock(&p->opening);
    return g;
}

void group_close(struct group *g) {
    pthread_mutex_lock(&g->lock);
    if (g->open) {
        a32 *closed = &g->control->member[g->rank].closed;
        atomic_store(closed, 1);
        group_fail(g, "the group was closed on this rank", false);
        g->open = false;
        publish(g);
        atomic_store(closed, 2); /* the control block may be gone after this */
    }
    pthread_mutex_unlock(&g->lock);
}

void group_abort(struct group *g, const char *reason) {
    pthread_mutex_lock(&g->lock);
    if (g->open) group_fail(g, reason, true);
    pthread_mutex_unlock(&g->lock);
}
