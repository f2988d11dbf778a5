/* The segment of this process and those of its peers. Nothing here knows of groups. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31784e614c614850ull
#define VERSION 1
#define KEEP ((size_t)1 << 30) /* free memory beyond this is given back to the system */

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void futex_wait(a32 *word, uint32_t expected, double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0);
}

void futex_wake(a32 *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* The sleeper counts itself, then looks once more; the publisher stores, then looks for sleepers. With a sequentially consistent
 * fence between the two on either side one of them sees the other. The caller has made that fence. */
void ring_bell(struct head *head) {
    if (atomic_load_explicit(&head->want, memory_order_relaxed)) {
        atomic_fetch_add(&head->bell_waiters, 1);
        futex_wake(&head->bell_waiters);
    } else if (atomic_load_explicit(&head->armed, memory_order_relaxed)) {
        atomic_fetch_add(&head->bell_progress, 1);
        futex_wake(&head->bell_progress);
    }
}

/* ---- making and mapping ---- */

void proc_init(struct proc *p, void *base, size_t size, int descriptor, uint64_t nonce) {
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->opening, NULL);
    p->descriptor = descriptor;
    p->owner = getpid();
    p->head = base;
    p->head->nonce = nonce;
    p->head->size = size;
    p->head->version = VERSION;
    p->head->pid = (uint32_t)getpid();
    p->block_room = 64;
    p->blocks = calloc(p->block_room, sizeof *p->blocks);
    size_t start = (sizeof(struct head) + 4095) & ~(size_t)4095;
    p->blocks[0] = (struct block){start, size - start, false};
    p->block_count = 1;
    p->head->magic = MAGIC;
}

int proc_start(struct proc *p, const char *path, size_t size, uint64_t nonce) {
    int fd = path ? open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600) : (int)syscall(SYS_memfd_create, "phalanx", 1u);
    if (fd < 0) return -1;
    void *base = MAP_FAILED;
    if (ftruncate(fd, (off_t)size) == 0) base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        int why = errno;
        close(fd);
        if (path) unlink(path);
        errno = why;
        return -1;
    }
    proc_init(p, base, size, fd, nonce);
    return fd;
}

void proc_stop(struct proc *p) {
    if (p->owner != getpid()) return;
    atomic_store(&p->stopping, 1);
    if (atomic_load(&p->progressing)) {
        atomic_fetch_add(&p->head->bell_progress, 1);
        futex_wake(&p->head->bell_progress);
        pthread_join(p->progress, NULL);
        atomic_store(&p->progressing, 0);
    }
}

static uint64_t start_time(uint32_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    char *field = strrchr(text, ')'); /* the name may hold anything; the state follows it, the start time is 19 fields on */
    if (!field || field[2] == 'Z' || field[2] == 'X') return 0;
    for (int i = 0; field && i < 20; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, NULL, 10) : 0;
}

/* A zombie answers to signal 0, but a pidfd tells that it has ended. */
bool peer_alive(struct peer *peer) {
    if (peer->dead) return false;
    if (peer->pidfd >= 0) {
        struct pollfd poll_fd = {peer->pidfd, POLLIN, 0};
        peer->dead = poll(&poll_fd, 1, 0) == 1;
    } else if (peer->start_time) {
        peer->dead = start_time(peer->pid) != peer->start_time;
    }
    return !peer->dead;
}

int proc_attach_memory(struct proc *p, struct head *head, int pidfd) {
    if (p->peer_count == PEERS_MAX) return -1;
    struct peer *peer = calloc(1, sizeof *peer);
    *peer = (struct peer){.head = head, .pidfd = pidfd, .pid = head->pid, .nonce = head->nonce};
    p->peers[p->peer_count] = peer;
    return p->peer_count++;
}

int proc_attach(struct proc *p, int descriptor, uint32_t pid, uint64_t nonce) {
    pthread_mutex_lock(&p->lock);
    int number = -1;
    for (int i = 0; i < p->peer_count; i++)
        if (p->peers[i]->nonce == nonce) number = i;
    struct stat status;
    if (number < 0 && fstat(descriptor, &status) == 0) {
        if ((size_t)status.st_size < sizeof(struct head)) {
            errno = EINVAL;
        } else {
            size_t size = (size_t)status.st_size;
            struct head *head = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
            if (head != MAP_FAILED && head->magic == MAGIC && head->version == VERSION && head->nonce == nonce && head->size == size) {
                int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
                number = proc_attach_memory(p, head, pidfd);
                if (number >= 0) p->peers[number]->start_time = start_time(pid);
                /* Gone already: whoever waits for it must be told, and only a pidfd or a start time can. */
                if (number >= 0 && pidfd < 0 && !p->peers[number]->start_time) p->peers[number]->dead = true;
            } else if (head != MAP_FAILED) {
                munmap(head, size);
                errno = EINVAL;
            }
        }
    }
    pthread_mutex_unlock(&p->lock);
    return number;
}

/* ---- allocating ---- */

static void insert(struct proc *p, size_t index, struct block block) {
    if (p->block_count == p->block_room) {
        p->block_room *= 2;
        p->blocks = realloc(p->blocks, p->block_room * sizeof *p->blocks);
    }
    memmove(p->blocks + index + 1, p->blocks + index, (p->block_count - index) * sizeof *p->blocks);
    p->blocks[index] = block;
    p->block_count++;
}

static void remove_at(struct proc *p, size_t index) {
    memmove(p->blocks + index, p->blocks + index + 1, (p->block_count - index - 1) * sizeof *p->blocks);
    p->block_count--;
}

/* The smallest free block that fits, at the lowest address: pages that were touched before are used again. */
void *proc_allocate(struct proc *p, size_t bytes) {
    if (bytes > p->head->size) return NULL;
    bytes = bytes ? (bytes + LINE - 1) / LINE * LINE : LINE;
    if (bytes >= 65536) bytes = (bytes + 4095) & ~(size_t)4095;
    pthread_mutex_lock(&p->lock);
    size_t best = p->block_count;
    for (size_t i = 0; i < p->block_count; i++)
        if (!p->blocks[i].used && p->blocks[i].size >= bytes && (best == p->block_count || p->blocks[i].size < p->blocks[best].size))
            best = i;
    void *address = NULL;
    if (best < p->block_count) {
        struct block *b = &p->blocks[best];
        size_t rest = b->size - bytes, offset = b->offset;
        p->kept -= p->kept < bytes ? p->kept : bytes;
        b->size = bytes;
        b->used = true;
        if (rest) insert(p, best + 1, (struct block){offset + bytes, rest, false});
        address = at(p->head, offset);
    }
    pthread_mutex_unlock(&p->lock);
    return address;
}

void proc_free(struct proc *p, void *address) {
    if (!address || p->owner != getpid() || p->frozen) return;
    size_t offset = offset_of(p, address);
    pthread_mutex_lock(&p->lock);
    size_t low = 0, high = p->block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (p->blocks[middle].offset < offset) low = middle + 1; else high = middle;
    }
    if (low < p->block_count && p->blocks[low].offset == offset && p->blocks[low].used) {
        struct block *b = &p->blocks[low];
        b->used = false;
        if (p->kept + b->size > KEEP) {
            size_t start = (offset + 4095) & ~(size_t)4095, stop = (offset + b->size) & ~(size_t)4095;
            if (stop > start) madvise(at(p->head, start), stop - start, MADV_REMOVE);
        } else {
            p->kept += b->size;
        }
        if (low + 1 < p->block_count && !p->blocks[low + 1].used) {
            p->blocks[low].size += p->blocks[low + 1].size;
            remove_at(p, low + 1);
        }
        if (low > 0 && !p->blocks[low - 1].used) {
            p->blocks[low - 1].size += p->blocks[low].size;
            remove_at(p, low);
        }
    }
    pthread_mutex_unlock(&p->lock);
}

bool proc_contains(const struct proc *p, const void *address, size_t bytes) {
    const uint8_t *start = (const uint8_t *)p->head, *a = address;
    return a >= start && bytes <= p->head->size && (size_t)(a - start) <= p->head->size - bytes;
}

uint64_t offset_of(const struct proc *p, const void *address) { return (uint64_t)((const uint8_t *)address - (const uint8_t *)p->head); }

/* The first failure of a process, for those who find it gone and would otherwise blame it. */
void last_words(struct proc *p, const char *text) {
    uint32_t none = 0;
    if (atomic_compare_exchange_strong(&p->head->has_words, &none, 1)) {
        snprintf(p->head->last_words, sizeof p->head->last_words, "%s", text);
        atomic_store(&p->head->has_words, 2);
    }
}
