/* Send and recv. Each ordered pair of a group has a ring in the sender's segment, made at its first message.
 *
 * A small message travels in the ring as a record and is then complete for the sender. A large one only announces itself; once the
 * receiver has asked for it, the receiver copies it from the sender's memory if that lies in a segment, or the sender copies it to
 * the receiver's if that does, or it streams through the bulk part of the ring, one message at a time. So nothing that was not
 * asked for ever blocks what was, and messages with different tags may be received in any order. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECORDS ((size_t)256 * 1024)
#define BULK ((size_t)1024 * 1024)
#define PIECE ((size_t)128 * 1024)
#define DIRECT_PIECE ((size_t)1024 * 1024)
#define VERDICTS 4096 /* large messages of a pair that were announced and not asked for; the next one waits, and all behind it */
#define STREAM ((size_t)8 << 20)

enum { SKIP, SMALL, LARGE };
enum { TAKEN = 1, WRONG_SIZE, WRONG_TYPE };

struct record {
    uint32_t kind, dtype, site;
    int32_t tag;
    uint64_t bytes, id, source; /* source: 1 + offset of the sender's data if that lies in its segment */
    uint64_t span;              /* of the record in the ring */
    uint8_t unused[16];
};

struct verdict {
    a64 id, word; /* word: TAKEN, or what is wrong and from bit 8 on what the receiver expected */
};

struct ring {
    LINED a64 head;       /* sender: bytes of records published */
    LINED a64 tail;       /* receiver: bytes of records taken */
    LINED a64 bulk_head;  /* sender: bytes streamed */
    LINED a64 bulk_tail;  /* receiver: bytes taken of those */
    LINED a64 grant;      /* receiver: the rendezvous that may stream, */
    a64 grant_target;     /* and 1 + offset of where to, if that lies in the receiver's segment */
    LINED a64 verdicts;   /* receiver: how many it has written */
    struct verdict verdict[VERDICTS];
    LINED uint8_t records[RECORDS];
    uint8_t bulk[BULK];
};

struct arrival {
    struct arrival *next;
    int from;
    struct record record;
    uint8_t *data;
};

static size_t min(size_t a, size_t b) { return a < b ? a : b; }

static struct ring *out_ring(struct group *g, int to) {
    struct channel *c = &g->channel[to];
    if (!c->out) {
        c->out = proc_allocate(g->proc, sizeof(struct ring));
        if (!c->out) return NULL;
        memset(c->out, 0, offsetof(struct ring, records));
        atomic_store_explicit(&control_rings(g->control)[g->rank * g->size + to], offset_of(g->proc, c->out), memory_order_release);
    }
    return c->out;
}

static struct ring *in_ring(struct group *g, int from) {
    struct channel *c = &g->channel[from];
    if (!c->in) {
        uint64_t offset = atomic_load_explicit(&control_rings(g->control)[from * g->size + g->rank], memory_order_acquire);
        if (offset) c->in = at(g->heads[from], offset);
    }
    return c->in;
}

static void unlink_op(struct op **first, struct op **last, struct op *o) {
    struct op *before = NULL, **link = first;
    while (*link && *link != o) before = *link, link = &(*link)->next;
    if (!*link) return;
    *link = o->next;
    if (*last == o) *last = before;
}

static void finish_send(struct group *g, struct op *o) {
    unlink_op(&g->sends, &g->sends_tail, o);
    op_end(o, DONE);
}

static void append_recv(struct group *g, struct op *o) {
    o->next = NULL;
    if (g->recvs_tail) g->recvs_tail->next = o; else g->recvs = o;
    g->recvs_tail = o;
}

/* The receive is in no list. */
static void finish_recv(struct op *o, int from) {
    o->source = from;
    op_end(o, DONE);
}

/* ---- the sender ---- */

/* Put the record of a message into the ring; false if there is no room. */
static bool put(struct group *g, struct op *o) {
    struct channel *c = &g->channel[o->peer];
    struct ring *r = out_ring(g, o->peer);
    if (!r) return false;
    bool small = o->bytes <= EAGER;
    if (!small && c->in_flight == VERDICTS) return false;
    size_t span = sizeof(struct record) + (small ? (o->bytes + LINE - 1) / LINE * LINE : 0);
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed), tail = atomic_load_explicit(&r->tail, memory_order_acquire);
    size_t place = (size_t)(head % RECORDS), skip = place + span > RECORDS ? RECORDS - place : 0;
    if (head + skip + span - tail > RECORDS) return false;
    if (skip) {
        struct record *gap = (struct record *)(r->records + place);
        gap->kind = SKIP;
        gap->span = skip;
        head += skip;
        place = 0;
    }
    struct record *record = (struct record *)(r->records + place);
    *record = (struct record){.kind = small ? SMALL : LARGE, .dtype = o->dtype, .site = o->site, .tag = o->tag, .bytes = o->bytes, .span = span};
    if (small) {
        memcpy(record + 1, o->src[0], o->bytes);
    } else {
        record->id = o->id = ++c->next_id;
        record->source = proc_contains(g->proc, o->src[0], o->bytes) ? 1 + offset_of(g->proc, o->src[0]) : 0;
        c->in_flight++;
    }
    o->put = true;
    atomic_store_explicit(&r->head, head + span, memory_order_release);
    publish_to(g, o->peer);
    return true;
}

static struct op *find_send(struct group *g, int peer, uint64_t id) {
    for (struct op *o = g->sends; o; o = o->next)
        if (o->peer == peer && o->put && o->id == id) return o;
    return NULL;
}

static void read_verdicts(struct group *g, int peer, bool *moved) {
    struct channel *c = &g->channel[peer];
    uint64_t written = atomic_load_explicit(&c->out->verdicts, memory_order_acquire);
    while (c->seen_verdicts < written) {
        struct verdict *v = &c->out->verdict[c->seen_verdicts++ % VERDICTS];
        uint64_t word = atomic_load_explicit(&v->word, memory_order_relaxed);
        struct op *o = find_send(g, peer, atomic_load_explicit(&v->id, memory_order_relaxed));
        c->in_flight--;
        *moved = true;
        if (!o) continue; /* it timed out */
        if ((word & 0xff) == TAKEN) {
            finish_send(g, o);
            continue;
        }
        char reason[256], type[64];
        type_text(type, sizeof type, (uint32_t)(word >> 8));
        if ((word & 0xff) == WRONG_SIZE)
            snprintf(reason, sizeof reason, "rank %d expects a message of %llu bytes", g->ranks[peer], (unsigned long long)(word >> 8));
        else
            snprintf(reason, sizeof reason, "rank %d expects %s", g->ranks[peer], type);
        unlink_op(&g->sends, &g->sends_tail, o);
        op_fail(o, reason);
    }
}

static void stream_out(struct group *g, int peer, bool *moved) {
    struct channel *c = &g->channel[peer];
    struct ring *r = c->out;
    uint64_t granted = atomic_load_explicit(&r->grant, memory_order_acquire);
    struct op *o = granted ? find_send(g, peer, granted) : NULL;
    if (!o || o->moved == o->bytes) return;
    uint64_t target = atomic_load_explicit(&r->grant_target, memory_order_relaxed), head = atomic_load_explicit(&r->bulk_head, memory_order_relaxed);
    if (target && !enter(g, peer)) return;
    for (int pieces = 0; o->moved < o->bytes && pieces < 16; pieces++) {
        size_t left = o->bytes - o->moved, piece;
        if (target) {
            piece = min(left, DIRECT_PIECE);
            phx_copy((uint8_t *)at(g->heads[peer], target - 1) + o->moved, o->src[0] + o->moved, piece, o->bytes >= STREAM);
        } else {
            size_t room = BULK - (size_t)(head - atomic_load_explicit(&r->bulk_tail, memory_order_acquire)), place = (size_t)(head % BULK);
            piece = min(min(left, PIECE), min(room, BULK - place));
            if (!piece) break;
            phx_copy(r->bulk + place, o->src[0] + o->moved, piece, 0);
        }
        o->moved += piece;
        head += piece;
        *moved = true;
        atomic_store_explicit(&r->bulk_head, head, memory_order_release);
        publish_to(g, peer);
    }
    if (target) leave(g);
    if (o->moved == o->bytes) finish_send(g, o); /* the receiver's verdict, which comes later, only counts */
}

/* ---- the receiver ---- */

static void give_verdict(struct group *g, int from, uint64_t id, uint64_t word) {
    struct ring *r = g->channel[from].in;
    uint64_t written = atomic_load_explicit(&r->verdicts, memory_order_relaxed);
    atomic_store_explicit(&r->verdict[written % VERDICTS].id, id, memory_order_relaxed);
    atomic_store_explicit(&r->verdict[written % VERDICTS].word, word, memory_order_relaxed);
    atomic_store_explicit(&r->verdicts, written + 1, memory_order_release);
    publish_to(g, from);
}

static void grant_next(struct group *g, int from) {
    struct channel *c = &g->channel[from];
    struct op *o = c->grants;
    if (!o || o->granted) return;
    o->granted = true;
    c->stream_start = atomic_load_explicit(&c->in->bulk_head, memory_order_acquire);
    uint64_t target = proc_contains(g->proc, o->dst[0], o->bytes) ? 1 + offset_of(g->proc, o->dst[0]) : 0;
    atomic_store_explicit(&c->in->grant_target, target, memory_order_relaxed);
    atomic_store_explicit(&c->in->grant, o->id, memory_order_release);
    publish_to(g, from);
}

/* A message has met its receive, which is in no list any more. */
static void meet(struct group *g, struct op *o, int from, const struct record *record, const uint8_t *data) {
    bool large = record->kind == LARGE;
    if (record->bytes != o->bytes || record->dtype != o->dtype) {
        char reason[512], sent[64], wanted[64];
        uint64_t wrong = record->bytes != o->bytes ? WRONG_SIZE : WRONG_TYPE, expected = wrong == WRONG_SIZE ? o->bytes : o->dtype;
        type_text(sent, sizeof sent, record->dtype);
        type_text(wanted, sizeof wanted, o->dtype);
        if (wrong == WRONG_SIZE)
            snprintf(reason, sizeof reason, "rank %d sent %llu bytes at %s", g->ranks[from], (unsigned long long)record->bytes,
                     site_text(g->heads[from], record->site));
        else
            snprintf(reason, sizeof reason, "rank %d sent %s, not %s, at %s", g->ranks[from], sent, wanted, site_text(g->heads[from], record->site));
        if (large) give_verdict(g, from, record->id, wrong | expected << 8);
        op_fail(o, reason);
    } else if (!large) {
        memcpy(o->dst[0], data, o->bytes);
        finish_recv(o, from);
    } else if (record->source && !enter(g, from)) {
        char reason[TEXT_MAX];
        if (!gone(g, from, reason, sizeof reason)) snprintf(reason, sizeof reason, "the group failed before rank %d's message was taken", g->ranks[from]);
        op_fail(o, reason);
    } else if (record->source) {
        phx_copy(o->dst[0], at(g->heads[from], record->source - 1), o->bytes, o->bytes >= STREAM);
        leave(g);
        give_verdict(g, from, record->id, TAKEN);
        finish_recv(o, from);
    } else {
        struct channel *c = &g->channel[from];
        o->id = record->id;
        o->peer = from;
        o->next_granted = NULL;
        append_recv(g, o);
        if (c->grants) c->grants_tail->next_granted = o; else c->grants = o;
        c->grants_tail = o;
        grant_next(g, from);
    }
}

static bool wants(const struct op *o, int from, int32_t tag) { return !o->id && (o->peer == from || o->peer < 0) && o->tag == tag; }

static struct op *take_recv(struct group *g, int from, int32_t tag) {
    for (struct op *o = g->recvs; o; o = o->next) {
        if (wants(o, from, tag)) {
            unlink_op(&g->recvs, &g->recvs_tail, o);
            return o;
        }
    }
    return NULL;
}

/* Take what has come; what nobody asked for yet is put aside, so that the ring stays free. */
static void drain(struct group *g, int from, bool *moved) {
    struct ring *r = in_ring(g, from);
    if (!r) return;
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed), head = atomic_load_explicit(&r->head, memory_order_acquire);
    while (tail < head) { /* not what comes meanwhile: a quick sender would keep this rank here */
        struct record *record = (struct record *)(r->records + tail % RECORDS);
        tail += record->span;
        if (record->kind != SKIP) {
            struct record copy = *record;
            struct op *o = take_recv(g, from, copy.tag);
            if (o) {
                meet(g, o, from, &copy, (uint8_t *)(record + 1));
            } else {
                struct arrival *a = calloc(1, sizeof *a);
                a->from = from;
                a->record = copy;
                if (copy.kind == SMALL) a->data = memcpy(malloc(copy.bytes ? copy.bytes : 1), record + 1, copy.bytes);
                if (g->arrivals_tail) g->arrivals_tail->next = a; else g->arrivals = a;
                g->arrivals_tail = a;
            }
        }
        *moved = true;
        atomic_store_explicit(&r->tail, tail, memory_order_release);
        publish_to(g, from);
    }
}

static void stream_in(struct group *g, int from, bool *moved) {
    struct channel *c = &g->channel[from];
    struct op *o = c->grants;
    if (!o) return;
    struct ring *r = c->in;
    bool direct = atomic_load_explicit(&r->grant_target, memory_order_relaxed) != 0;
    uint64_t head = atomic_load_explicit(&r->bulk_head, memory_order_acquire), tail = c->stream_start + o->moved;
    while (tail < head) {
        size_t place = (size_t)(tail % BULK), piece = (size_t)(head - tail);
        if (!direct) {
            piece = min(min(piece, BULK - place), PIECE);
            phx_copy(o->dst[0] + o->moved, r->bulk + place, piece, o->bytes >= STREAM);
        }
        o->moved += piece;
        tail += piece;
        *moved = true;
        atomic_store_explicit(&r->bulk_tail, tail, memory_order_release);
        if (!direct) publish_to(g, from);
    }
    if (o->moved < o->bytes) return;
    c->grants = o->next_granted;
    unlink_op(&g->recvs, &g->recvs_tail, o);
    give_verdict(g, from, o->id, TAKEN);
    finish_recv(o, from);
    grant_next(g, from);
}

/* ---- both ---- */

void messages_post(struct op *o) {
    struct group *g = o->group;
    o->next = NULL;
    if (o->kind == SEND) {
        if (g->sends_tail) g->sends_tail->next = o; else g->sends = o;
        g->sends_tail = o;
        return;
    }
    struct arrival *before = NULL;
    for (struct arrival *a = g->arrivals; a; before = a, a = a->next) {
        if (!wants(o, a->from, a->record.tag)) continue;
        if (before) before->next = a->next; else g->arrivals = a->next;
        if (g->arrivals_tail == a) g->arrivals_tail = before;
        meet(g, o, a->from, &a->record, a->data);
        free(a->data);
        free(a);
        return;
    }
    append_recv(g, o);
}

bool messages_advance(struct group *g) {
    bool moved = false;
    for (int i = 0; i < g->size; i++) {
        if (i == g->rank) continue;
        drain(g, i, &moved);
        if (g->channel[i].grants) stream_in(g, i, &moved);
        if (g->channel[i].out && g->channel[i].in_flight) {
            read_verdicts(g, i, &moved);
            stream_out(g, i, &moved);
        }
    }
    /* In order: a message may not overtake another to the same rank. */
    uint8_t stuck[g->size];
    memset(stuck, 0, sizeof stuck);
    for (struct op *o = g->sends, *next; o; o = next) {
        next = o->next;
        if (o->put || stuck[o->peer]) continue;
        if (!put(g, o)) {
            stuck[o->peer] = 1;
            continue;
        }
        moved = true;
        if (o->bytes <= EAGER) finish_send(g, o);
    }
    return moved;
}

/* Whether the operation cannot complete any more, and why. */
static bool lost(struct group *g, struct op *o, const bool *left, double time, char *reason, size_t room) {
    int missed = -1, there = 0;
    for (int i = 0; i < g->size; i++) {
        if (i == g->rank || (o->peer >= 0 && i != o->peer)) continue;
        there += !left[i];
        bool dead = left[i] && !peer_alive(g->peer[i]);
        /* A message from anybody might have been that of one who died; who left in peace will have sent what it had to. Of several
         * dead, one that said nothing before is the first. */
        if (dead && (missed < 0 || atomic_load(&g->heads[missed]->has_words))) missed = i;
    }
    if (missed >= 0) {
        atomic_store(&g->peer[missed]->missed, 1);
        return gone(g, missed, reason, room);
    }
    if (!there) {
        if (g->size == 1) snprintf(reason, room, "there is nobody else in this group");
        return g->size == 1 || gone(g, o->peer >= 0 ? o->peer : g->rank ? 0 : g->size - 1, reason, room);
    }
    if (time < o->deadline) return false;
    char where[1024] = "nobody has sent a message with this tag";
    if (o->peer >= 0) whereabouts(g, o->peer, where, sizeof where);
    if (o->kind == SEND)
        snprintf(reason, room, "timed out: waited %g s for rank %d to receive it; %s", o->timeout, g->ranks[o->peer], where);
    else if (o->peer >= 0)
        snprintf(reason, room, "timed out: waited %g s, but rank %d has not sent it; %s", o->timeout, g->ranks[o->peer], where);
    else
        snprintf(reason, room, "timed out: waited %g s; %s", o->timeout, where);
    return true;
}

static bool inspect_list(struct group *g, struct op **first, struct op **last, const bool *left, double time) {
    char reason[TEXT_MAX];
    for (struct op *o = *first, *next; o; o = next) {
        next = o->next;
        if (!lost(g, o, left, time, reason, sizeof reason)) continue;
        if ((o->put && !left[o->peer]) || o->moved || (o->kind == RECV && o->id)) { /* it is in the other's hands, or half of it */
            group_fail(g, reason, true);
            return false;
        }
        unlink_op(first, last, o);
        last_words(g->proc, reason);
        op_fail(o, reason);
    }
    return true;
}

void messages_inspect(struct group *g, double time) {
    if (!g->sends && !g->recvs) return;
    char reason[TEXT_MAX];
    if (atomic_load(&g->control->failed) == 2) {
        miss_the_dead(g);
        snprintf(reason, sizeof reason, "%s", g->control->reason);
        group_fail(g, reason, false);
        return;
    }
    /* Who has left is asked first: what it sent before that is taken afterwards and counts. */
    bool left[g->size];
    for (int i = 0; i < g->size; i++) left[i] = i != g->rank && gone(g, i, reason, sizeof reason);
    for (int i = 0; i < 16 && messages_advance(g); i++) {} /* all that one who left can have put into its ring */
    if (inspect_list(g, &g->sends, &g->sends_tail, left, time)) inspect_list(g, &g->recvs, &g->recvs_tail, left, time);
}

void messages_close(struct group *g) {
    for (int i = 0; i < g->size; i++)
        if (g->channel[i].out) proc_free(g->proc, g->channel[i].out);
    while (g->arrivals) {
        struct arrival *a = g->arrivals;
        g->arrivals = a->next;
        free(a->data);
        free(a);
    }
    free(g->channel);
}
