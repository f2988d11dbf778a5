/* Shared-memory communication between the processes of one host: types and the calls between files.
 *
 * Every process has one segment of memory that its peers map. All that is shared (control blocks of groups, staging slots, message
 * rings, tensors) lies in some process's segment and is named by an offset there. What a rank publishes is a counter that only
 * grows, stored with release and loaded with acquire; whoever waits polls, then yields, then sleeps on a futex of its own process.
 *
 *   segment.c      the segment: making, mapping, allocating; doorbells; who is alive
 *   engine.c       operations: queues, waiting, the progress thread
 *   groups.c       opening and leaving groups, failures and what is said of them
 *   collectives.c  staging, reducing and collecting in rounds
 *   messages.c     send and recv: rings, matching, rendezvous
 *   kernels.c      arithmetic and copying
 *   module.c       the Python module
 */
#ifndef PHX_CORE_H
#define PHX_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels.h"

#define LINE 64
#define LINED _Alignas(LINE)
#define PEERS_MAX 1024
#define TEXT_MAX 1536

typedef _Atomic uint64_t a64;
typedef _Atomic uint32_t a32;

enum { ALL_REDUCE, REDUCE_SCATTER, REDUCE, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER, EXCHANGE, SEND, RECV };
enum { PENDING, DONE, FAILED };

/* ---- segment.c ---- */

/* The start of every segment. */
struct head {
    uint64_t magic, nonce, size;
    uint32_t version, pid;
    LINED a32 want;        /* threads of this process that sleep on bell_waiters */
    a32 armed;             /* the progress thread wants to be woken through bell_progress */
    a32 cpu;               /* 1 + the processor on which a thread of this process last issued or waited */
    LINED a32 bell_waiters;
    a32 bell_progress;
    LINED a32 has_words;   /* 2: last_words can be read */
    char last_words[TEXT_MAX];
};

struct peer {
    a32 missed;            /* it died while something needed it: every group with it is lost */
    struct head *head;     /* where its segment is mapped here */
    int pidfd;             /* -1: not supported, then pid and start time tell */
    uint32_t pid;
    uint64_t start_time;
    uint64_t nonce;
    bool dead;
};

struct block {
    size_t offset, size;
    bool used;
};

struct proc {
    struct head *head;     /* this process's own segment */
    int descriptor;
    pid_t owner;           /* the process that made it: a forked child must not use it */
    pthread_mutex_t lock;  /* of blocks, peers and the start of the progress thread */
    pthread_mutex_t opening; /* of the list of groups */
    struct block *blocks;
    size_t block_count, block_room;
    a64 controls;          /* how many control blocks were made here */
    size_t kept;           /* bytes of free blocks whose pages were not given back */
    bool frozen;           /* a peer that stopped may still write to a tensor that was given back: no block is used again */
    struct peer *peers[PEERS_MAX];
    int peer_count;
    struct group *_Atomic groups; /* all that were ever opened; closed ones are used again */
    a32 active;            /* groups with pending operations */
    a32 waiting;           /* threads inside wait */
    a32 progressing;       /* the progress thread exists */
    a32 dozing;            /* and sleeps until it is told of work */
    a32 stopping;
    pthread_t progress;
};

void proc_init(struct proc *p, void *base, size_t size, int descriptor, uint64_t nonce);
int proc_start(struct proc *p, const char *path, size_t size, uint64_t nonce); /* descriptor or -1 with errno */
void proc_stop(struct proc *p);
int proc_attach_memory(struct proc *p, struct head *head, int pidfd);
int proc_attach(struct proc *p, int descriptor, uint32_t pid, uint64_t nonce); /* peer number; -1: not that segment or errno */
void *proc_allocate(struct proc *p, size_t bytes);  /* NULL when the segment is full */
void proc_free(struct proc *p, void *address);
bool proc_contains(const struct proc *p, const void *address, size_t bytes);
uint64_t offset_of(const struct proc *p, const void *address);
bool peer_alive(struct peer *peer);
void last_words(struct proc *p, const char *text);

static inline void *at(struct head *head, uint64_t offset) { return (uint8_t *)head + offset; }

double now(void); /* seconds on CLOCK_MONOTONIC */
void futex_wait(a32 *word, uint32_t expected, double seconds);
void futex_wake(a32 *word);
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
void ring_bell(struct head *head); /* tell a process that something it may wait for was published */

/* ---- groups ---- */

#define SLOTS 4            /* rounds in flight */
#define CHUNK (256 * 1024) /* bytes of a slot: two rounds of two ranks stay in a 1 MB second-level cache */
#define ONE_SHOT (32 * 1024)

/* What a rank says of the operation it has come to. Two of them suffice: nobody comes to the next operation but one before all
 * have come to the next, and thereby left this one. */
struct signature {
    uint32_t op, reduce, dtype, root, site;
    uint64_t count, number;
};

/* One member's part of a control block; only that member writes it. */
struct member {
    LINED a64 arrived;     /* rounds whose input it has published */
    a64 print[2];          /* fingerprint of the signature, by parity of the operation's number */
    a64 source[2];         /* 1 + offset of its input if that is in its segment, 0 if not, ANYWHERE if it gives nothing */
    LINED a64 reduced;     /* rounds whose section it has reduced */
    LINED a64 freed;       /* rounds that it has no more to read of */
    LINED a64 slots;       /* offset of its staging slots, 0 before the first use */
    a32 closed;            /* 1: it leaves, and its memory is its own again; 2: it has left and looks at nothing here any more */
    a32 inside;            /* it reads or writes tensors in the segments of others */
    struct signature signature[2];
};
#define ANYWHERE UINT64_MAX

struct control {
    uint64_t size;
    a64 stamp;             /* of this group alone; gone when the owner has given the block back, as all have left then */
    a32 failed;            /* 0, 1: somebody writes the reason, 2: it can be read */
    char reason[TEXT_MAX];
    LINED struct member member[]; /* then offsets of rings [from][to], then bytes of an exchange [parity][sent or expected][by][with] */
};

size_t control_bytes(int size);
a64 *control_rings(struct control *c);
a64 *control_splits(struct control *c, int parity, int expected);

struct op {
    struct op *next;
    struct group *group;
    a32 state, references;
    uint32_t kind, reduce, dtype, root, site;
    uint64_t generation;
    size_t count, item;    /* elements, bytes of one */
    const uint8_t **src;   /* one per member; for kinds with one input all the same */
    uint8_t **dst;
    uint64_t *send_bytes, *recv_bytes; /* EXCHANGE only */
    bool src_whole;                    /* the pieces of src lie one behind the other */
    double timeout, deadline, finished;
    char *error;
    phx_reduce_fn kernel;
    /* collectives */
    bool begun, announced, direct;
    uint64_t number, base, rounds, staged, combined, collected;
    /* messages */
    int peer, tag;         /* position, -1 for anybody */
    size_t bytes, moved;
    uint64_t id;           /* of a rendezvous */
    bool put, granted;
    struct op *next_granted;
    int source;
};

struct arrival;            /* a message that came before it was asked for */
struct ring;

struct channel {           /* messages to and from one peer */
    struct ring *out, *in;
    uint64_t next_id, seen_verdicts, in_flight;
    struct op *grants, *grants_tail; /* receives that wait for their turn to stream, the first is streaming */
    uint64_t stream_start;
};

struct group {
    struct group *next;
    struct proc *proc;
    pthread_mutex_t lock;
    a32 asking;            /* threads in op_issue that wait for the lock */
    a32 missed;            /* a thread found the lock taken when it looked for the last time before it sleeps */
    uint64_t generation;   /* how often it was opened: a call that was under way must not go to the next group here */
    bool open;             /* false: free to be used again once reaped */
    bool reaped;
    int rank, size;
    int *ranks;            /* global, by position */
    struct peer **peer;    /* by position, NULL for itself */
    struct head **heads;   /* by position */
    struct control *control;
    uint64_t stamp;
    bool owns_control;
    char *name;
    struct op *first, *last; /* collectives, in order */
    uint64_t number, round;
    uint8_t **slots;       /* staging by position, NULL until known */
    size_t chunk;
    a32 pending;
    char *failure;         /* why everything fails from now on */
    double inspected;
    struct channel *channel;
    struct op *sends, *sends_tail, *recvs, *recvs_tail;
    struct arrival *arrivals, *arrivals_tail;
};

/* ---- engine.c ---- */

struct op *op_new(struct group *g, uint32_t kind, uint32_t site, double timeout);
void op_issue(struct op *o);       /* queue it and run what can run at once; the handle has one reference */
void op_leave(struct op *o);       /* after op_issue, by a caller that does not wait now */
void op_wait(struct op *o, double timeout); /* returns when it is no longer pending, or after the timeout */
int op_test(struct op *o);
void op_release(struct op *o);
int op_wait_any(struct op *const *ops, int count, double timeout);
void op_nudge(void);
void op_end(struct op *o, uint32_t state); /* DONE or FAILED; with the group's lock held, as all that follows */

/* ---- groups.c ---- */

struct group *group_open(struct proc *p, uint64_t offset, int rank, int size, const int *peers, const int *ranks, const char *name,
                         const char **why);
void group_close(struct group *g); /* these three take the lock themselves */
void group_abort(struct group *g, const char *reason);

void op_fail(struct op *o, const char *reason);
void group_fail(struct group *g, const char *reason, bool tell);
void publish(struct group *g);     /* after storing a counter that peers may wait for */
void publish_to(struct group *g, int position);
bool enter(struct group *g, int position); /* before touching tensors in a member's segment, -1: in everybody's; false: it is too late */
void leave(struct group *g);
bool gone(struct group *g, int position, char *reason, size_t room); /* whether a member died or left; then the reason is set */
void miss_the_dead(struct group *g);
void whereabouts(struct group *g, int position, char *text, size_t room); /* what a member did last in this group */
int type_text(char *text, size_t room, uint32_t dtype);
void describe(char *text, size_t room, uint32_t kind, uint32_t reduce, uint32_t dtype, uint32_t root_rank, uint64_t count);
const char *site_text(struct head *head, uint32_t site);

/* ---- collectives.c ---- */

bool collectives_advance(struct group *g);
void collectives_inspect(struct group *g, double time);

/* ---- messages.c ---- */

#define EAGER (32 * 1024)  /* messages up to this size are complete for the sender once they are in the ring */

bool messages_advance(struct group *g);
void messages_post(struct op *o);
void messages_inspect(struct group *g, double time);
void messages_close(struct group *g);

#endif
