/* Operations: how they are queued, who carries them on, and how they are waited for.
 *
 * An operation is carried on by whoever waits, by the caller that issues it as far as it goes without waiting, and otherwise by the
 * one progress thread of the process. The progress thread stands aside while somebody waits, because two threads of one process
 * would only take the processor from each other. */
#define _GNU_SOURCE
#include "core.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define SPIN_PAUSES 50
#define SPIN_SECONDS 50e-6  /* of yielding before a waiter sleeps: pausing instead would keep a peer off this processor */
#define FUTILE_YIELDS 3     /* that let nobody run although a peer is on this processor: the scheduler owes this thread time */
#define SWITCH_SECONDS 2e-6 /* a yield that takes longer has let another thread run */
#define IDLE_YIELDS 4       /* of the progress thread, which competes with computing threads */
#define SLICE 0.1           /* seconds between looks at deadlines and dead peers */
#define DOZE 1.0            /* seconds without work after which the progress thread sleeps until told */
#define INLINE_BYTES 65536  /* larger operations are left to the progress thread */

static bool group_advance(struct group *g) {
    bool moved = false;
    if (!g->open) return false;
    if (g->first) moved = collectives_advance(g);
    if (g->sends || g->recvs) moved |= messages_advance(g);
    return moved;
}

/* The holder of the lock may have looked before what a sleeper waits for was published, and the sleeper could not look. */
static void unlock(struct group *g) {
    pthread_mutex_unlock(&g->lock);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&g->missed, memory_order_relaxed) && atomic_exchange(&g->missed, 0)) ring_bell(g->proc->head);
}

/* `last`: the caller sleeps if nothing moved. */
static bool try_advance(struct group *g, bool last) {
    if (!atomic_load_explicit(&g->pending, memory_order_relaxed)) return false;
    if (atomic_load_explicit(&g->asking, memory_order_relaxed)) { /* a mutex does not queue: who has just let go would have it again */
        sched_yield();
        return true;
    }
    if (pthread_mutex_trylock(&g->lock)) {
        if (!last) return false;
        atomic_store(&g->missed, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (pthread_mutex_trylock(&g->lock)) return false; /* the holder will see the mark after it */
    }
    bool moved = group_advance(g);
    unlock(g);
    return moved;
}

static bool advance_all(struct proc *p, bool last) {
    bool moved = false;
    for (struct group *g = atomic_load(&p->groups); g; g = g->next) moved |= try_advance(g, last);
    return moved;
}

static void inspect(struct group *g, double time) {
    if (!atomic_load_explicit(&g->pending, memory_order_relaxed) || pthread_mutex_trylock(&g->lock)) return;
    if (time - g->inspected >= SLICE / 2) {
        g->inspected = time;
        group_advance(g);
        collectives_inspect(g, time);
        messages_inspect(g, time);
    }
    unlock(g);
}

/* A rank that was missed in one group will be missed in all: those with nothing pending are told too, so that nobody waits for this
 * rank there, which may have given up on the first. */
static void mourn(struct group *g) {
    char reason[TEXT_MAX];
    if (!g->open || g->failure || pthread_mutex_trylock(&g->lock)) return;
    for (int i = 0; g->open && !g->failure && i < g->size; i++)
        if (i != g->rank && atomic_load(&g->peer[i]->missed) && !atomic_load(&g->control->member[i].closed) &&
            gone(g, i, reason, sizeof reason))
            group_fail(g, reason, true);
    unlock(g);
}

static void inspect_all(struct proc *p) {
    double time = now();
    bool missed = false;
    for (struct group *g = atomic_load(&p->groups); g; g = g->next) inspect(g, time);
    for (int i = 0; i < p->peer_count; i++) missed |= p->peers[i] && atomic_load(&p->peers[i]->missed);
    if (!missed) return;
    for (struct group *g = atomic_load(&p->groups); g; g = g->next) mourn(g);
}

/* ---- the progress thread ---- */

static void *progress(void *argument) {
    struct proc *p = argument;
    struct head *head = p->head;
    double last = now(), looked = last;
    int idle = 0;
    while (!atomic_load_explicit(&p->stopping, memory_order_relaxed)) {
        uint32_t bell = atomic_load(&head->bell_progress);
        bool active = atomic_load(&p->active) > 0, mine = active && !atomic_load(&p->waiting);
        if (mine) {
            atomic_store(&head->armed, 1);
            atomic_thread_fence(memory_order_seq_cst);
            bool moved = advance_all(p, idle == IDLE_YIELDS - 1);
            double time = now();
            if (atomic_load(&p->waiting)) ring_bell(head); /* hand over what this thread may have kept a waiter from */
            if (time - looked > SLICE) inspect_all(p), looked = time;
            if (moved) {
                last = time;
                idle = 0;
                continue;
            }
            if (++idle < IDLE_YIELDS) {
                sched_yield();
                continue;
            }
        }
        idle = 0;
        if (!active) { /* nothing to be woken for: whoever issues arms again, after it has counted itself */
            atomic_store(&head->armed, 0);
            if (atomic_load(&p->active)) continue;
        }
        bool doze = !active && now() - last > DOZE;
        if (doze) {
            atomic_store(&p->dozing, 1);
            if (atomic_load(&p->active)) doze = false;
        }
        futex_wait(&head->bell_progress, bell, doze ? 3600.0 : SLICE);
        atomic_store(&p->dozing, 0);
        if (active) last = now();
    }
    return NULL;
}

static void wake_progress(struct proc *p) {
    atomic_fetch_add(&p->head->bell_progress, 1);
    futex_wake(&p->head->bell_progress);
}

/* Leave what is pending to the progress thread. */
static void hand_over(struct proc *p, bool at_once) {
    if (!atomic_load(&p->progressing)) {
        pthread_mutex_lock(&p->lock);
        if (!atomic_load(&p->progressing)) {
            sigset_t all, before; /* signals are for Python's own threads */
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            if (pthread_create(&p->progress, NULL, progress, p) == 0) atomic_store(&p->progressing, 1);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
        }
        pthread_mutex_unlock(&p->lock);
        return;
    }
    atomic_store(&p->head->armed, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (at_once || atomic_load(&p->dozing)) wake_progress(p);
}

/* ---- operations ---- */

/* Those inside op_wait_any. Of the whole process: they may wait for operations of groups on a former segment and on the present one. */
static a32 passive, completions, nudged;

struct op *op_new(struct group *g, uint32_t kind, uint32_t site, double timeout) {
    struct op *o = calloc(1, sizeof *o + (size_t)g->size * (2 * sizeof(void *) + 2 * sizeof(uint64_t)));
    o->group = g;
    o->generation = g->generation;
    o->kind = kind;
    o->site = site;
    o->timeout = timeout;
    o->references = 1;
    o->item = 1;
    o->source = -1;
    o->src = (const uint8_t **)(o + 1);
    o->dst = (uint8_t **)(o->src + g->size);
    o->send_bytes = (uint64_t *)(o->dst + g->size);
    o->recv_bytes = o->send_bytes + g->size;
    return o;
}

void op_release(struct op *o) {
    if (atomic_fetch_sub(&o->references, 1) == 1) {
        free(o->error);
        free(o);
    }
}

void op_end(struct op *o, uint32_t state) {
    struct proc *p = o->group->proc;
    o->finished = now();
    atomic_store(&o->state, state);
    if (atomic_fetch_sub(&o->group->pending, 1) == 1) atomic_fetch_sub(&p->active, 1);
    if (atomic_load(&passive)) {
        atomic_fetch_add(&completions, 1);
        futex_wake(&completions);
    }
    if (atomic_load(&p->head->want)) { /* another thread of this process may sleep for it */
        atomic_fetch_add(&p->head->bell_waiters, 1);
        futex_wake(&p->head->bell_waiters);
    }
    op_release(o);
}

/* Two ranks on one processor: waiting must not keep the peer from running, and waking it may move it to an idle one. */
static void note_cpu(struct proc *p) {
    uint32_t cpu = (uint32_t)sched_getcpu() + 1;
    if (atomic_load_explicit(&p->head->cpu, memory_order_relaxed) != cpu) atomic_store_explicit(&p->head->cpu, cpu, memory_order_relaxed);
}

static bool shares_cpu(struct group *g) {
    uint32_t cpu = atomic_load_explicit(&g->proc->head->cpu, memory_order_relaxed);
    for (int i = 0; i < g->size; i++)
        if (i != g->rank && atomic_load_explicit(&g->heads[i]->cpu, memory_order_relaxed) == cpu) return true;
    return false;
}

void op_issue(struct op *o) {
    struct group *g = o->group;
    struct proc *p = g->proc;
    note_cpu(p);
    o->deadline = now() + o->timeout;
    atomic_fetch_add(&g->asking, 1);
    pthread_mutex_lock(&g->lock);
    atomic_fetch_sub(&g->asking, 1);
    atomic_fetch_add(&o->references, 1); /* the engine's own */
    if (atomic_fetch_add(&g->pending, 1) == 0) atomic_fetch_add(&p->active, 1);
    bool open = g->open && o->generation == g->generation;
    if (open && !g->failure && atomic_load_explicit(&g->control->failed, memory_order_acquire) == 2)
        group_fail(g, g->control->reason, false);
    if (!open) {
        o->error = strdup("the group is closed on this rank");
        op_end(o, FAILED);
    } else if (g->failure) {
        op_fail(o, g->failure);
    } else if (o->kind >= SEND) {
        messages_post(o);
        messages_advance(g);
    } else {
        o->number = g->number++;
        if (g->last) g->last->next = o; else g->first = o;
        g->last = o;
        if (g->first == o) collectives_advance(g);
    }
    unlock(g);
}

void op_leave(struct op *o) {
    struct group *g = o->group;
    if (atomic_load(&o->state) != PENDING) return;
    size_t bytes = o->kind >= SEND ? o->bytes : o->count * o->item;
    if (atomic_load(&g->proc->waiting)) { /* a waiter carries it on, but may sleep until a peer moves, and peers may be done */
        if (bytes > INLINE_BYTES) ring_bell(g->proc->head);
        return;
    }
    hand_over(g->proc, bytes > INLINE_BYTES);
    if (try_advance(g, true) && atomic_load(&o->state) == PENDING) wake_progress(g->proc); /* what came before it was armed */
}

static void sleep_for_peers(struct op *o, double until) {
    struct proc *p = o->group->proc;
    struct head *head = p->head;
    atomic_fetch_add(&head->want, 1);
    uint32_t bell = atomic_load(&head->bell_waiters);
    atomic_thread_fence(memory_order_seq_cst);
    bool moved = try_advance(o->group, true);
    if (atomic_load(&p->active) > 1) moved |= advance_all(p, true);
    if (!moved && atomic_load(&o->state) == PENDING) {
        double left = until - now();
        futex_wait(&head->bell_waiters, bell, left < 0 ? 0 : left < SLICE ? left : SLICE);
    }
    atomic_fetch_sub(&head->want, 1);
}

/* Now and then: deadlines and dead peers, of all operations; also before a wait ends, since waits in slices of SLICE would never
 * get to it. True if the caller has waited long enough. */
static bool over(struct op *o, double time, double until, double *looked) {
    if (time - *looked > SLICE || time > until || time > o->deadline) {
        inspect_all(o->group->proc);
        *looked = time;
    }
    return time > until;
}

void op_wait(struct op *o, double timeout) {
    struct group *g = o->group;
    struct proc *p = g->proc;
    if (atomic_load(&o->state) != PENDING) return;
    atomic_fetch_add(&p->waiting, 1);
    atomic_store(&p->head->armed, 0);
    double looked = now(), until = timeout < 0 ? 1e18 : looked + timeout, spinning = 0;
    int spins = 0, futile = 0;
    while (atomic_load_explicit(&o->state, memory_order_acquire) == PENDING) {
        bool moved = try_advance(g, false);
        if (atomic_load_explicit(&p->active, memory_order_relaxed) > 1) moved |= advance_all(p, false);
        if (moved) { /* perhaps for ever, on behalf of other operations */
            spins = 0;
            if (over(o, now(), until, &looked)) break;
            continue;
        }
        if (++spins <= SPIN_PAUSES) {
            relax();
            continue;
        }
        double time = now();
        if (spins == SPIN_PAUSES + 1) spinning = time;
        if (over(o, time, until, &looked)) break;
        if (time - spinning < SPIN_SECONDS && futile < FUTILE_YIELDS) {
            sched_yield();
            note_cpu(p);
            futile = now() - time < SWITCH_SECONDS && shares_cpu(g) ? futile + 1 : 0;
            continue;
        }
        futile = 0;
        sleep_for_peers(o, until < o->deadline ? until : o->deadline + 1e-3);
    }
    bool last = atomic_fetch_sub(&p->waiting, 1) == 1;
    if (last && atomic_load(&p->active)) hand_over(p, true);
}

int op_test(struct op *o) {
    if (atomic_load(&o->state) == PENDING) {
        try_advance(o->group, false);
        if (atomic_load(&o->state) == PENDING && now() > o->deadline) inspect(o->group, now());
    }
    return (int)atomic_load(&o->state);
}

int op_wait_any(struct op *const *ops, int count, double timeout) {
    double until = timeout < 0 ? 1e18 : now() + timeout;
    int found = -1;
    atomic_fetch_add(&passive, 1);
    for (;;) {
        uint32_t seen = atomic_load(&completions);
        for (int i = 0; i < count && found < 0; i++)
            if (atomic_load(&ops[i]->state) != PENDING) found = i;
        double left = until - now();
        if (found >= 0 || left <= 0 || atomic_exchange(&nudged, 0)) break;
        futex_wait(&completions, seen, left < 3600 ? left : 3600);
    }
    atomic_fetch_sub(&passive, 1);
    return found;
}

void op_nudge(void) {
    atomic_store(&nudged, 1);
    atomic_fetch_add(&completions, 1);
    futex_wake(&completions);
}
