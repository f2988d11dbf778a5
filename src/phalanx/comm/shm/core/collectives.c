/* Collectives in rounds. In each round a rank stages what others need of its input in its slot (arrived), reduces its own section
 * of what all have staged (reduced), and collects the sections of the others (freed). A slot is used again after SLOTS rounds, once
 * all have freed it, so up to SLOTS rounds are in flight and ranks seldom wait for each other.
 *
 * The first round carries the signature of the operation: all ranks compare all signatures before any of them reads a byte of
 * another or writes one of its result. Sums run in the order of the ranks whatever the algorithm, so every rank gets the same bits.
 *
 * Traffic of a staged all_reduce of S bytes on n ranks: (5 - 2/n) S loads and stores a rank, since its own section is not staged. If
 * all inputs lie in segments, nothing is staged: a rank reduces its section of everybody's tensor into everybody's, 2 S. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 16                /* of an operation before others get their turn: a few hundred microseconds */
#define PIECE ((size_t)1 << 20) /* a step without staging */
#define STREAM ((size_t)8 << 20) /* results beyond this are stored around the caches, which they would only flush */

static struct member *self(struct group *g) { return &g->control->member[g->rank]; }

static size_t min(size_t a, size_t b) { return a < b ? a : b; }

static bool all_at(struct group *g, size_t which, uint64_t round) {
    for (int i = 0; i < g->size; i++) {
        if (i == g->rank) continue;
        a64 *counter = (a64 *)((char *)&g->control->member[i] + which);
        if (atomic_load_explicit(counter, memory_order_acquire) < round) return false;
    }
    return true;
}
#define ALL(g, counter, round) all_at(g, offsetof(struct member, counter), round)

static uint8_t *slot(struct group *g, int position, uint64_t round) {
    if (!g->slots[position]) {
        uint64_t offset = atomic_load_explicit(&g->control->member[position].slots, memory_order_acquire);
        g->slots[position] = at(g->heads[position], offset);
    }
    return g->slots[position] + (size_t)(round % SLOTS) * g->chunk;
}

/* ---- what a round holds ---- */

static bool one_shot(const struct op *o) {
    return (o->kind == ALL_REDUCE || o->kind == REDUCE) && o->count * o->item <= ONE_SHOT && o->count * o->item * (size_t)o->group->size <= 4 * ONE_SHOT;
}

static bool sectioned(const struct op *o) { return o->kind == REDUCE_SCATTER || o->kind == SCATTER || o->kind == ALL_TO_ALL || o->kind == EXCHANGE; }

/* Bytes of one section of a slot: what one rank has for one other. */
static size_t section_room(const struct op *o) { return o->group->chunk / (size_t)o->group->size / LINE * LINE; }

/* The range of the tensor that round k moves, in bytes. For kinds with sections: of each piece. */
static size_t range(const struct op *o, uint64_t k, size_t *start) {
    size_t room = sectioned(o) ? section_room(o) : o->group->chunk, total = o->count * o->item;
    *start = (size_t)k * room;
    return *start < total ? min(room, total - *start) : 0;
}

/* Section i of a range that all_reduce and reduce share out among the ranks, in bytes. */
static size_t section(const struct op *o, size_t length, int i, size_t *start) {
    size_t n = (size_t)o->group->size, each = ((length + n - 1) / n + LINE - 1) / LINE * LINE;
    *start = min((size_t)i * each, length);
    return min(each, length - *start);
}

static size_t exchange_range(const struct op *o, uint64_t k, size_t total, size_t *start) {
    *start = (size_t)k * section_room(o);
    return *start < total ? min(section_room(o), total - *start) : 0;
}

static uint64_t rounds_of(struct op *o) {
    struct group *g = o->group;
    if (o->kind == BARRIER || one_shot(o)) return 1;
    size_t total = o->count * o->item, room = sectioned(o) ? section_room(o) : g->chunk;
    if (o->kind == EXCHANGE) {
        a64 *splits = control_splits(g->control, (int)(o->number & 1), 0);
        for (int i = 0; i < g->size * g->size; i++) {
            size_t bytes = (size_t)atomic_load_explicit(&splits[i], memory_order_relaxed);
            if (bytes > total) total = bytes;
        }
    }
    return total ? (total + room - 1) / room : 1;
}

/* ---- staging ---- */

static void stage(struct op *o, uint64_t k) {
    struct group *g = o->group;
    if (o->kind == BARRIER) return;
    uint8_t *to = slot(g, g->rank, o->base + k);
    size_t start, length = range(o, k, &start), part, place;
    bool stream = (o->kind == EXCHANGE ? o->send_bytes[g->rank] : o->count * o->item) * (size_t)g->size >= STREAM; /* what stays here */
    if (one_shot(o)) {
        phx_copy(to, o->src[0], o->count * o->item, 0);
        return;
    }
    switch (o->kind) {
    case ALL_REDUCE:
    case REDUCE:
        for (int i = 0; i < g->size; i++)
            if (i != g->rank && (part = section(o, length, i, &place))) phx_copy(to + place, o->src[0] + start + place, part, 0);
        break;
    case ALL_GATHER:
        phx_copy(to, o->src[0] + start, length, 0);
        if (o->dst[g->rank] != o->src[0]) phx_copy(o->dst[g->rank] + start, o->src[0] + start, length, stream);
        break;
    case BROADCAST:
        if (g->rank == (int)o->root) {
            phx_copy(to, o->src[0] + start, length, 0);
            if (o->dst[0] && o->dst[0] != o->src[0]) phx_copy(o->dst[0] + start, o->src[0] + start, length, stream);
        }
        break;
    case GATHER:
        if (g->rank != (int)o->root) phx_copy(to, o->src[0] + start, length, 0);
        else if (o->dst[g->rank] != o->src[0]) phx_copy(o->dst[g->rank] + start, o->src[0] + start, length, stream);
        break;
    case REDUCE_SCATTER:
        for (int i = 0; i < g->size; i++)
            if (i != g->rank) phx_copy(to + (size_t)i * section_room(o), o->src[i] + start, length, 0);
        break;
    case SCATTER:
        if (g->rank != (int)o->root) break;
        for (int i = 0; i < g->size; i++) {
            if (i != g->rank) phx_copy(to + (size_t)i * section_room(o), o->src[i] + start, length, 0);
            else if (o->dst[0] != o->src[i]) phx_copy(o->dst[0] + start, o->src[i] + start, length, stream);
        }
        break;
    case ALL_TO_ALL:
    case EXCHANGE:
        for (int i = 0; i < g->size; i++) {
            if (o->kind == EXCHANGE) length = exchange_range(o, k, (size_t)o->send_bytes[i], &start);
            if (!length) continue;
            if (i != g->rank) phx_copy(to + (size_t)i * section_room(o), o->src[i] + start, length, 0);
            else if (o->dst[i] != o->src[i]) phx_copy(o->dst[i] + start, o->src[i] + start, length, stream);
        }
        break;
    }
}

/* ---- reducing: this rank's section, in the order of the ranks ---- */

static bool reduces(const struct op *o) { return o->kind == ALL_REDUCE || o->kind == REDUCE || o->kind == REDUCE_SCATTER; }

static void combine(struct op *o, uint64_t k) {
    struct group *g = o->group;
    const void *in[g->size];
    void *out[2];
    int outs = 0;
    size_t start, length = range(o, k, &start), place = 0, part = length;
    if (one_shot(o)) {
        if (o->kind == REDUCE && g->rank != (int)o->root) return;
        for (int i = 0; i < g->size; i++) in[i] = slot(g, i, o->base);
        out[0] = o->dst[0];
        o->kernel(out, 1, in, g->size, o->count);
        return;
    }
    if (o->kind == REDUCE_SCATTER) {
        for (int i = 0; i < g->size; i++) in[i] = slot(g, i, o->base + k) + (size_t)g->rank * section_room(o);
        in[g->rank] = o->src[g->rank] + start;
        out[outs++] = o->dst[0] + start;
    } else {
        part = section(o, length, g->rank, &place);
        for (int i = 0; i < g->size; i++) in[i] = slot(g, i, o->base + k) + place;
        in[g->rank] = o->src[0] + start + place;
        if (o->kind == ALL_REDUCE || g->rank != (int)o->root) out[outs++] = slot(g, g->rank, o->base + k) + place;
        if (o->kind == ALL_REDUCE || g->rank == (int)o->root) out[outs++] = o->dst[0] + start + place;
    }
    if (part) o->kernel(out, outs, in, g->size, part / o->item);
}

/* ---- collecting what the others have for this rank ---- */

static bool collects(const struct op *o) { return o->kind != REDUCE_SCATTER && o->kind != BARRIER && !one_shot(o); }

static void collect(struct op *o, uint64_t k) {
    struct group *g = o->group;
    size_t start, length = range(o, k, &start), part, place;
    switch (o->kind) {
    case ALL_REDUCE:
    case REDUCE:
        if (o->kind == REDUCE && g->rank != (int)o->root) return;
        for (int i = 0; i < g->size; i++)
            if (i != g->rank && (part = section(o, length, i, &place))) phx_copy(o->dst[0] + start + place, slot(g, i, o->base + k) + place, part, 0);
        return;
    case ALL_GATHER:
    case GATHER:
        if (o->kind == GATHER && g->rank != (int)o->root) return;
        for (int i = 0; i < g->size; i++)
            if (i != g->rank) phx_copy(o->dst[i] + start, slot(g, i, o->base + k), length, o->count * o->item * (size_t)g->size >= STREAM);
        return;
    case BROADCAST:
        if (g->rank != (int)o->root) phx_copy(o->dst[0] + start, slot(g, (int)o->root, o->base + k), length, o->count * o->item >= STREAM);
        return;
    case SCATTER:
        if (g->rank != (int)o->root)
            phx_copy(o->dst[0] + start, slot(g, (int)o->root, o->base + k) + (size_t)g->rank * section_room(o), length, o->count * o->item >= STREAM);
        return;
    case ALL_TO_ALL:
    case EXCHANGE:
        for (int i = 0; i < g->size; i++) {
            size_t total = o->count * o->item;
            if (o->kind == EXCHANGE) total = (size_t)o->recv_bytes[i], length = exchange_range(o, k, total, &start);
            if (i != g->rank && length)
                phx_copy(o->dst[i] + start, slot(g, i, o->base + k) + (size_t)g->rank * section_room(o), length, total * (size_t)g->size >= STREAM);
        }
        return;
    }
}

/* ---- without staging: all inputs lie in segments ---- */

/* What this rank publishes as its source: others may read the input there. */
static uint64_t direct_source(const struct op *o) {
    struct group *g = o->group;
    size_t bytes = o->count * o->item;
    if (bytes <= 4096 || g->size == 1) return 0; /* the second meeting costs more than the copy */
    const uint8_t *src = o->src[0];
    switch (o->kind) {
    case ALL_REDUCE: return src == o->dst[0] && proc_contains(g->proc, src, bytes) ? 1 + offset_of(g->proc, src) : 0;
    case REDUCE_SCATTER:
    case ALL_TO_ALL: return o->src_whole && proc_contains(g->proc, src, bytes * (size_t)g->size) ? 1 + offset_of(g->proc, src) : 0;
    case ALL_GATHER: return proc_contains(g->proc, src, bytes) ? 1 + offset_of(g->proc, src) : 0;
    case BROADCAST: return g->rank != (int)o->root ? ANYWHERE : proc_contains(g->proc, src, bytes) ? 1 + offset_of(g->proc, src) : 0;
    case GATHER: return g->rank == (int)o->root ? ANYWHERE : proc_contains(g->proc, src, bytes) ? 1 + offset_of(g->proc, src) : 0;
    case SCATTER:
        if (g->rank != (int)o->root) return ANYWHERE;
        return o->src_whole && proc_contains(g->proc, src, bytes * (size_t)g->size) ? 1 + offset_of(g->proc, src) : 0;
    default: return 0;
    }
}

/* One piece of it; true when that was the last. */
static bool run_direct(struct op *o) {
    struct group *g = o->group;
    size_t bytes = o->count * o->item, place = 0, part = bytes;
    if (o->kind == ALL_REDUCE) part = section(o, bytes, g->rank, &place);
    size_t start = o->moved, piece = min(part - start, PIECE);
    o->moved += piece;
    bool stream = bytes * (size_t)g->size >= STREAM;
    int parity = (int)(o->number & 1), me = g->rank, root = (int)o->root;
    uint8_t *src[g->size];
    const void *in[g->size];
    void *out[g->size];
    for (int i = 0; i < g->size; i++) {
        uint64_t offset = atomic_load_explicit(&g->control->member[i].source[parity], memory_order_relaxed);
        src[i] = offset == ANYWHERE ? NULL : (uint8_t *)at(g->heads[i], offset - 1) + start;
    }
    if (piece) switch (o->kind) {
    case ALL_REDUCE:
        for (int i = 0; i < g->size; i++) in[i] = out[i] = src[i] + place;
        o->kernel(out, g->size, in, g->size, piece / o->item);
        break;
    case REDUCE_SCATTER:
        for (int i = 0; i < g->size; i++) in[i] = src[i] + (size_t)me * bytes;
        out[0] = o->dst[0] + start;
        o->kernel(out, 1, in, g->size, piece / o->item);
        break;
    case ALL_GATHER:
    case GATHER:
        if (o->kind == GATHER && me != root) break;
        for (int i = 0; i < g->size; i++) {
            const uint8_t *from = i == me ? o->src[0] + start : src[i];
            if (o->dst[i] + start != from) phx_copy(o->dst[i] + start, from, piece, stream);
        }
        break;
    case BROADCAST:
        if (o->dst[0] && o->dst[0] + start != src[root]) phx_copy(o->dst[0] + start, src[root], piece, bytes >= STREAM);
        break;
    case SCATTER: {
        const uint8_t *from = src[root] + (size_t)me * bytes;
        if (o->dst[0] + start != from) phx_copy(o->dst[0] + start, from, piece, bytes >= STREAM);
        break;
    }
    case ALL_TO_ALL:
        for (int i = 0; i < g->size; i++) {
            const uint8_t *from = src[i] + (size_t)me * bytes;
            if (o->dst[i] + start != from) phx_copy(o->dst[i] + start, from, piece, stream);
        }
        break;
    }
    return o->moved == part;
}

/* ---- the operation ---- */

static uint64_t fingerprint(const struct op *o) {
    uint64_t h = 0x9e3779b97f4a7c15ull, parts[] = {o->kind, o->reduce, o->dtype, o->root, o->kind == EXCHANGE ? 0 : o->count, o->number};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        h ^= parts[i] + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
        h *= 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    return h | 1;
}

static bool begin(struct op *o) {
    struct group *g = o->group;
    struct member *m = self(g);
    int parity = (int)(o->number & 1);
    o->base = g->round;
    if (!g->slots[g->rank]) {
        g->slots[g->rank] = proc_allocate(g->proc, SLOTS * g->chunk);
        if (!g->slots[g->rank]) {
            group_fail(g, "there is no room for staging in the shared segment", true);
            return false;
        }
        atomic_store_explicit(&m->slots, offset_of(g->proc, g->slots[g->rank]), memory_order_release);
    }
    /* The slot of this round, as that of any other, is free once all have freed it. */
    if (o->base >= SLOTS && !ALL(g, freed, o->base + 1 - SLOTS)) return false;
    uint64_t source = direct_source(o);
    m->signature[parity] = (struct signature){o->kind, o->reduce, o->dtype, o->root, o->site, o->count, o->number};
    atomic_store_explicit(&m->source[parity], source, memory_order_relaxed);
    atomic_store_explicit(&m->print[parity], fingerprint(o), memory_order_relaxed);
    if (o->kind == EXCHANGE) {
        a64 *sends = control_splits(g->control, parity, 0) + g->rank * g->size, *expects = control_splits(g->control, parity, 1) + g->rank * g->size;
        for (int i = 0; i < g->size; i++) {
            atomic_store_explicit(&sends[i], o->send_bytes[i], memory_order_relaxed);
            atomic_store_explicit(&expects[i], o->recv_bytes[i], memory_order_relaxed);
        }
    }
    if (!source) stage(o, 0);
    o->staged = 1;
    atomic_store_explicit(&m->arrived, o->base + 1, memory_order_release);
    publish(g);
    o->begun = true;
    return true;
}

static void end(struct op *o, uint64_t rounds) {
    struct group *g = o->group;
    g->round = o->base + rounds;
    g->first = o->next;
    if (!g->first) g->last = NULL;
}

static void signature_text(struct group *g, int position, int parity, char *text, size_t room) {
    struct signature s = g->control->member[position].signature[parity];
    char what[256];
    describe(what, sizeof what, s.op, s.reduce, s.dtype, s.root < (uint32_t)g->size ? (uint32_t)g->ranks[s.root] : s.root, s.count);
    snprintf(text, room, "rank %d called %s at %s", g->ranks[position], what, site_text(g->heads[position], s.site));
}

/* Why the ranks cannot go on with this operation, if they cannot; the same text on all of them. */
static bool mismatch(struct op *o, char *reason, size_t room) {
    struct group *g = o->group;
    int parity = (int)(o->number & 1), other = -1;
    uint64_t first = atomic_load_explicit(&g->control->member[0].print[parity], memory_order_relaxed);
    for (int i = 1; i < g->size && other < 0; i++)
        if (atomic_load_explicit(&g->control->member[i].print[parity], memory_order_relaxed) != first) other = i;
    if (other >= 0) {
        char one[512], two[512];
        signature_text(g, 0, parity, one, sizeof one);
        signature_text(g, other, parity, two, sizeof two);
        snprintf(reason, room, "the ranks do not agree on call %llu of this group: %s; %s", (unsigned long long)o->number + 1, one, two);
        return true;
    }
    if (o->kind != EXCHANGE) return false;
    a64 *sent = control_splits(g->control, parity, 0), *expected = control_splits(g->control, parity, 1);
    for (int i = 0; i < g->size; i++) {
        for (int j = 0; j < g->size; j++) {
            uint64_t sends = atomic_load_explicit(&sent[i * g->size + j], memory_order_relaxed);
            uint64_t expects = atomic_load_explicit(&expected[j * g->size + i], memory_order_relaxed);
            if (sends == expects) continue;
            char one[512], two[512];
            signature_text(g, i, parity, one, sizeof one);
            signature_text(g, j, parity, two, sizeof two);
            snprintf(reason, room, "rank %d sends %llu bytes to rank %d, which expects %llu: %s; %s", g->ranks[i], (unsigned long long)sends,
                     g->ranks[j], (unsigned long long)expects, one, two);
            return true;
        }
    }
    return false;
}

/* Returns 0 if it must wait, 1 if something moved, 2 when this rank has nothing left to do, 3 if it is the turn of others. */
static int advance(struct op *o) {
    struct group *g = o->group;
    struct member *m = self(g);
    if (!o->begun && !begin(o)) return 0;
    if (!o->announced) {
        if (!ALL(g, arrived, o->base + 1)) return 0;
        char reason[TEXT_MAX];
        if (mismatch(o, reason, sizeof reason)) {
            atomic_store_explicit(&m->freed, o->base + 1, memory_order_release);
            end(o, 1);
            op_fail(o, reason);
            publish(g);
            return 1;
        }
        int parity = (int)(o->number & 1), resident = 0, staged = 0;
        for (int i = 0; i < g->size; i++) {
            uint64_t source = atomic_load_explicit(&g->control->member[i].source[parity], memory_order_relaxed);
            staged += !source;
            resident += source && source != ANYWHERE;
        }
        o->announced = true;
        o->direct = !staged;
        o->rounds = o->direct ? 1 : rounds_of(o);
        if (!o->direct && !resident && atomic_load_explicit(&m->source[parity], memory_order_relaxed)) stage(o, 0); /* gives nothing, but may keep something */
        if (!o->direct && resident) { /* some inputs are resident and some are not: all are staged, from the next round on */
            atomic_store_explicit(&m->freed, o->base + 1, memory_order_release);
            o->base++;
            o->staged = 0;
        }
    }
    if (o->direct && !o->collected) {
        if (!enter(g, -1)) return 0; /* somebody has failed this operation, and inspection will */
        bool last = run_direct(o);
        leave(g);
        if (!last) return 3;
        o->collected = 1;
        atomic_store_explicit(&m->freed, o->base + 1, memory_order_release);
        publish(g);
        return 1;
    }
    if (o->direct) { /* others may still read this rank's memory, or write their section of the result there */
        if (!ALL(g, freed, o->base + 1)) return 0;
        end(o, 1);
        return 2;
    }
    bool reducing = reduces(o), collecting = collects(o);
    for (int steps = 0;; steps++) {
        if (steps == STEPS || atomic_load_explicit(&g->asking, memory_order_relaxed)) return 3;
        if (collecting && o->collected < o->combined && (!reducing || ALL(g, reduced, o->base + o->collected + 1))) {
            collect(o, o->collected++);
            atomic_store_explicit(&m->freed, o->base + o->collected, memory_order_release);
            publish(g);
        } else if (o->combined < o->staged && ALL(g, arrived, o->base + o->combined + 1)) {
            if (reducing) combine(o, o->combined);
            o->combined++;
            if (reducing) atomic_store_explicit(&m->reduced, o->base + o->combined, memory_order_release);
            if (!collecting) {
                o->collected = o->combined;
                atomic_store_explicit(&m->freed, o->base + o->collected, memory_order_release);
            }
            publish(g);
        } else if (o->staged < o->rounds && o->staged - o->collected < SLOTS &&
                   (o->base + o->staged < SLOTS || ALL(g, freed, o->base + o->staged + 1 - SLOTS))) {
            stage(o, o->staged++);
            atomic_store_explicit(&m->arrived, o->base + o->staged, memory_order_release);
            publish(g);
        } else if (o->collected == o->rounds) {
            end(o, o->rounds);
            return 2;
        } else {
            return 0;
        }
    }
}

bool collectives_advance(struct group *g) {
    bool moved = false;
    while (g->first) {
        struct op *o = g->first;
        uint64_t before = o->staged + o->combined + o->collected;
        int result = advance(o);
        if (result == 2) op_end(o, DONE);
        if (result == 3) return true;
        if (!result) return moved || g->first != o || o->staged + o->combined + o->collected != before;
        moved = true;
    }
    return moved;
}

/* Fail what has waited too long, or for somebody who will not come. */
void collectives_inspect(struct group *g, double time) {
    struct op *o = g->first;
    if (!o) return;
    char reason[TEXT_MAX], where[1024];
    if (atomic_load(&g->control->failed) == 2) {
        miss_the_dead(g);
        snprintf(reason, sizeof reason, "%s", g->control->reason);
        group_fail(g, reason, false);
        return;
    }
    uint64_t needed = o->base + (o->announced ? o->rounds : 1);
    int missing = -1;
    for (int i = 0; i < g->size; i++) {
        struct member *m = &g->control->member[i];
        if (i == g->rank) continue;
        bool left = gone(g, i, reason, sizeof reason); /* asked first: what it did before it left counts */
        uint64_t there = o->announced ? atomic_load(&m->freed) : o->begun ? atomic_load(&m->arrived) : atomic_load(&m->freed);
        if (there >= (o->begun ? needed : o->base + 1 - SLOTS)) continue;
        /* Of several who are gone, one that said nothing before is the first. */
        if (left && (missing < 0 || atomic_load(&g->heads[missing]->has_words))) missing = i;
    }
    if (missing >= 0) {
        if (!peer_alive(g->peer[missing])) atomic_store(&g->peer[missing]->missed, 1);
        gone(g, missing, reason, sizeof reason);
        group_fail(g, reason, true);
        return;
    }
    const struct op *late = o; /* any of the queue: those behind the first wait for the same ranks */
    while (late && time < late->deadline) late = late->next;
    if (!late) return;
    int n = snprintf(reason, sizeof reason, "timed out: rank %d waited %g s for", g->ranks[g->rank], late->timeout), named = 0;
    for (int i = 0; i < g->size && n < (int)sizeof reason - 700; i++) {
        struct member *m = &g->control->member[i];
        uint64_t there = o->announced ? atomic_load(&m->freed) : atomic_load(&m->arrived);
        if (i == g->rank || there >= needed) continue;
        whereabouts(g, i, where, sizeof where);
        n += snprintf(reason + n, sizeof reason - (size_t)n, "%s rank %d (%s)", named++ ? "," : "", g->ranks[i], where);
    }
    if (!named) snprintf(reason + n, sizeof reason - (size_t)n, " this call to finish");
    group_fail(g, reason, true);
}
