/* The Python module phalanx.comm.shm._core, in the limited API; _core.pyi says what its functions do.
 *
 * The GIL is released around everything that may take long. Handles and groups are addresses: the Python classes above are their
 * only users and do not let them outlive what they name. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIGNALS 0.1 /* seconds between looks at signals while waiting */

static struct proc *the_process; /* one per process, as the segment is */
static PyObject *Error;

static bool started(void) { return the_process && the_process->owner == getpid(); }

static bool need_start(void) {
    if (started()) return true;
    PyErr_SetString(Error, the_process ? "this process was forked from the one that opened the groups; it cannot use them"
                                       : "start was not called in this process");
    return false;
}

static bool need_arguments(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments expected, not %zd", wanted, given);
    return false;
}

static void *pointer(PyObject *o) { return PyLong_AsVoidPtr(o); }

/* ---- the segment ---- */

static PyObject *py_started(PyObject *m, PyObject *unused) {
    (void)m, (void)unused;
    return PyBool_FromLong(started());
}

static PyObject *py_start(PyObject *m, PyObject *args) {
    (void)m;
    const char *path;
    unsigned long long size, nonce;
    if (!PyArg_ParseTuple(args, "zKK", &path, &size, &nonce)) return NULL;
    struct proc *p = calloc(1, sizeof *p);
    if (!p) return PyErr_NoMemory();
    int fd = proc_start(p, path, (size_t)size, nonce);
    if (fd < 0) {
        free(p);
        return path ? PyErr_SetFromErrnoWithFilename(PyExc_OSError, path) : PyErr_SetFromErrno(PyExc_OSError);
    }
    the_process = p; /* a former one stays mapped: the parent of a fork, or peers, may still use it */
    return PyLong_FromLong(fd);
}

static PyObject *py_attach(PyObject *m, PyObject *args) {
    (void)m;
    int fd;
    unsigned int pid;
    unsigned long long nonce;
    if (!PyArg_ParseTuple(args, "iIK", &fd, &pid, &nonce) || !need_start()) return NULL;
    int number;
    Py_BEGIN_ALLOW_THREADS
    errno = 0;
    number = proc_attach(the_process, fd, pid, nonce);
    Py_END_ALLOW_THREADS
    if (number < 0)
        return PyErr_Format(Error, "the memory of process %u cannot be mapped: %s", pid, errno == EINVAL ? "it is not its segment" : strerror(errno));
    return PyLong_FromLong(number);
}

static PyObject *py_allocate(PyObject *m, PyObject *arg) {
    (void)m;
    size_t bytes = PyLong_AsSize_t(arg);
    if (PyErr_Occurred() || !need_start()) return NULL;
    void *address = proc_allocate(the_process, bytes);
    if (!address) return PyErr_Format(PyExc_MemoryError, "the shared segment has no room for %zu bytes", bytes);
    return PyLong_FromVoidPtr(address);
}

static PyObject *py_free(PyObject *m, PyObject *arg) {
    (void)m;
    void *address = pointer(arg);
    if (PyErr_Occurred()) return NULL;
    if (started() && proc_contains(the_process, address, 1)) proc_free(the_process, address);
    Py_RETURN_NONE;
}

static PyObject *py_is_resident(PyObject *m, PyObject *args) {
    (void)m;
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &bytes)) return NULL;
    return PyBool_FromLong(started() && proc_contains(the_process, (void *)(uintptr_t)address, (size_t)bytes));
}

/* Sites are few and live as long as the process. Python keeps the numbers. */
static PyObject *py_site(PyObject *m, PyObject *arg) {
    (void)m;
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(arg, &length);
    if (!text || !need_start()) return NULL;
    if (length > 255) text += length - 255, length = 255;
    char *copy = proc_allocate(the_process, (size_t)length + 1);
    if (!copy) return PyErr_NoMemory();
    memcpy(copy, text, (size_t)length);
    copy[length] = 0;
    return PyLong_FromUnsignedLongLong(offset_of(the_process, copy) / LINE);
}

static PyObject *py_reducible(PyObject *m, PyObject *args) {
    (void)m;
    int dtype, reduce;
    if (!PyArg_ParseTuple(args, "ii", &dtype, &reduce)) return NULL;
    return PyBool_FromLong(dtype >= 0 && dtype < PHX_OPAQUE && reduce >= 0 && reduce < PHX_REDOPS && phx_kernel(dtype, reduce) != NULL);
}

/* ---- groups ---- */

static PyObject *py_control(PyObject *m, PyObject *arg) {
    (void)m;
    long size = PyLong_AsLong(arg);
    if (PyErr_Occurred() || !need_start()) return NULL;
    if (size < 1 || size > PEERS_MAX) return PyErr_Format(PyExc_ValueError, "a group has 1 to %d ranks, not %ld", PEERS_MAX, size);
    struct control *c = proc_allocate(the_process, control_bytes((int)size));
    if (!c) return PyErr_NoMemory();
    memset(c, 0, control_bytes((int)size));
    c->size = (uint64_t)size;
    c->stamp = atomic_fetch_add(&the_process->controls, 1) + 1;
    return PyLong_FromUnsignedLongLong(offset_of(the_process, c));
}

static PyObject *py_open_group(PyObject *m, PyObject *args) {
    (void)m;
    unsigned long long offset;
    int rank;
    PyObject *peers, *ranks;
    const char *name, *why = NULL;
    if (!PyArg_ParseTuple(args, "KiOOs", &offset, &rank, &peers, &ranks, &name) || !need_start()) return NULL;
    Py_ssize_t size = PyTuple_Size(peers);
    if (size < 0 || PyTuple_Size(ranks) != size || rank < 0 || rank >= size) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "peers and ranks must be equally long, with rank a place in them");
        return NULL;
    }
    int *numbers = calloc((size_t)size * 2, sizeof *numbers);
    for (Py_ssize_t i = 0; i < size; i++) {
        numbers[i] = (int)PyLong_AsLong(PyTuple_GetItem(peers, i));
        numbers[size + i] = (int)PyLong_AsLong(PyTuple_GetItem(ranks, i));
    }
    struct group *g = PyErr_Occurred() ? NULL : group_open(the_process, offset, rank, (int)size, numbers, numbers + size, name, &why);
    free(numbers);
    if (!g) {
        if (!PyErr_Occurred()) PyErr_SetString(Error, why);
        return NULL;
    }
    return PyLong_FromVoidPtr(g);
}

static PyObject *py_close_group(PyObject *m, PyObject *arg) {
    (void)m;
    struct group *g = pointer(arg);
    if (PyErr_Occurred()) return NULL;
    if (started()) {
        Py_BEGIN_ALLOW_THREADS
        group_close(g);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *py_abort(PyObject *m, PyObject *args) {
    (void)m;
    unsigned long long handle;
    const char *reason;
    if (!PyArg_ParseTuple(args, "Ks", &handle, &reason)) return NULL;
    if (started()) {
        Py_BEGIN_ALLOW_THREADS
        group_abort((struct group *)(uintptr_t)handle, reason);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* ---- operations ---- */

/* Sites are places in the present segment; the members of a group on a former one would look for them in that. */
static uint32_t site_for(const struct group *g, unsigned long site) { return g->proc == the_process ? (uint32_t)site : 0; }

static PyObject *raise_error(struct op *o) {
    PyErr_SetString(Error, o->error ? o->error : "the operation failed");
    return NULL;
}

/* Wait, and look for signals now and then; false with an exception if one was raised. */
static bool wait_for(struct op *o, double timeout) {
    double until = timeout < 0 ? 1e18 : now() + timeout;
    while (atomic_load(&o->state) == PENDING) {
        double left = until - now();
        if (left <= 0) break;
        Py_BEGIN_ALLOW_THREADS
        op_wait(o, left < SIGNALS ? left : SIGNALS);
        Py_END_ALLOW_THREADS
        if (atomic_load(&o->state) == PENDING && PyErr_CheckSignals()) return false;
    }
    return true;
}

/* Issue; wait if asked to. Owns the reference. */
static PyObject *run(struct op *o, bool wait) {
    Py_BEGIN_ALLOW_THREADS
    op_issue(o);
    if (wait) op_wait(o, SIGNALS);
    else op_leave(o);
    Py_END_ALLOW_THREADS
    if (!wait) return PyLong_FromVoidPtr(o);
    if (!wait_for(o, -1)) { /* the caller's memory is about to go */
        char reason[64];
        PyOS_snprintf(reason, sizeof reason, "rank %d was interrupted", o->group->ranks[o->group->rank]);
        Py_BEGIN_ALLOW_THREADS
        group_abort(o->group, reason);
        Py_END_ALLOW_THREADS
        op_release(o);
        return NULL;
    }
    PyObject *result = atomic_load(&o->state) == FAILED ? raise_error(o) : PyLong_FromLong(o->kind == RECV ? o->source : 0);
    op_release(o);
    return result;
}

/* One address per member from an address or a tuple of addresses; `step` bytes lie between pieces. True in *whole if one behind the other. */
static bool addresses(PyObject *given, uint8_t **to, int size, size_t step, bool *whole) {
    if (PyTuple_Check(given)) {
        if (PyTuple_Size(given) != size) {
            PyErr_Format(PyExc_ValueError, "%zd addresses for a group of %d", PyTuple_Size(given), size);
            return false;
        }
        if (whole) *whole = false;
        for (int i = 0; i < size; i++) to[i] = pointer(PyTuple_GetItem(given, i));
    } else {
        uint8_t *base = pointer(given);
        if (whole) *whole = true;
        for (int i = 0; i < size; i++) to[i] = base ? base + (size_t)i * step : NULL;
    }
    return !PyErr_Occurred();
}

static PyObject *py_collective(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    if (!need_arguments(count, 11) || !need_start()) return NULL;
    struct group *g = pointer(args[0]);
    long kind = PyLong_AsLong(args[1]), reduce = PyLong_AsLong(args[2]), dtype = PyLong_AsLong(args[3]), root = PyLong_AsLong(args[4]);
    size_t elements = PyLong_AsSize_t(args[7]);
    unsigned long site = PyLong_AsUnsignedLong(args[8]);
    double timeout = PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred()) return NULL;
    if (kind < 0 || kind > BARRIER || dtype < 0 || dtype >= PHX_OPAQUE + 32 || reduce < 0 || reduce >= PHX_REDOPS || root < 0 || root >= g->size)
        return PyErr_Format(PyExc_ValueError, "no such call: op %ld, reduce %ld, dtype %ld, root %ld of %d", kind, reduce, dtype, root, g->size);
    struct op *o = op_new(g, (uint32_t)kind, site_for(g, site), timeout);
    o->reduce = (uint32_t)reduce;
    o->dtype = (uint32_t)dtype;
    o->root = (uint32_t)root;
    o->count = elements;
    o->item = dtype < PHX_OPAQUE ? phx_itemsize((int)dtype) : 1;
    if (kind <= REDUCE && !(o->kernel = dtype < PHX_OPAQUE ? phx_kernel((int)dtype, (int)reduce) : NULL)) {
        op_release(o);
        return PyErr_Format(PyExc_ValueError, "there is no reduction %ld of element type %ld", reduce, dtype);
    }
    bool many_in = kind == REDUCE_SCATTER || kind == SCATTER || kind == ALL_TO_ALL, many_out = kind == ALL_GATHER || kind == GATHER || kind == ALL_TO_ALL;
    size_t bytes = o->count * o->item;
    if (!addresses(args[5], (uint8_t **)o->src, g->size, many_in ? bytes : 0, &o->src_whole) ||
        !addresses(args[6], o->dst, g->size, many_out ? bytes : 0, NULL)) {
        op_release(o);
        return NULL;
    }
    return run(o, args[10] == Py_True);
}

static PyObject *py_all_to_all(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    if (!need_arguments(count, 9) || !need_start()) return NULL;
    struct group *g = pointer(args[0]);
    long dtype = PyLong_AsLong(args[1]);
    unsigned long site = PyLong_AsUnsignedLong(args[6]);
    double timeout = PyFloat_AsDouble(args[7]);
    if (PyErr_Occurred()) return NULL;
    struct op *o = op_new(g, EXCHANGE, site_for(g, site), timeout);
    o->dtype = (uint32_t)dtype;
    if (PyTuple_Size(args[4]) != g->size || PyTuple_Size(args[5]) != g->size) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "split sizes are needed for each of %d ranks", g->size);
    } else {
        for (int i = 0; i < g->size; i++) {
            o->send_bytes[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[4], i));
            o->recv_bytes[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[5], i));
        }
    }
    if (PyErr_Occurred() || !addresses(args[2], (uint8_t **)o->src, g->size, 0, &o->src_whole) ||
        !addresses(args[3], o->dst, g->size, 0, NULL)) {
        op_release(o);
        return NULL;
    }
    return run(o, args[8] == Py_True);
}

static PyObject *message(PyObject *const *args, Py_ssize_t count, uint32_t kind) {
    if (!need_arguments(count, 9) || !need_start()) return NULL;
    struct group *g = pointer(args[0]);
    long peer = PyLong_AsLong(args[1]), tag = PyLong_AsLong(args[2]), dtype = PyLong_AsLong(args[5]);
    void *address = pointer(args[3]);
    size_t bytes = PyLong_AsSize_t(args[4]);
    unsigned long site = PyLong_AsUnsignedLong(args[6]);
    double timeout = PyFloat_AsDouble(args[7]);
    if (PyErr_Occurred()) return NULL;
    if (peer >= g->size || peer == g->rank || peer < (kind == RECV ? -1 : 0))
        return PyErr_Format(PyExc_ValueError, "position %ld cannot be the other end in a group of %d, seen from %d", peer, g->size, g->rank);
    struct op *o = op_new(g, kind, site_for(g, site), timeout);
    o->peer = (int)peer;
    o->tag = (int)tag;
    o->dtype = (uint32_t)dtype;
    o->bytes = bytes;
    o->src[0] = o->dst[0] = address;
    return run(o, args[8] == Py_True);
}

static PyObject *py_send(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    return message(args, count, SEND);
}

static PyObject *py_recv(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    return message(args, count, RECV);
}

/* ---- handles ---- */

static PyObject *py_wait(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    if (!need_arguments(count, 2) || !need_start()) return NULL;
    struct op *o = pointer(args[0]);
    double timeout = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (!wait_for(o, timeout)) return NULL;
    uint32_t state = atomic_load(&o->state);
    if (state == FAILED) return raise_error(o);
    if (state == PENDING) {
        char text[64];
        PyOS_snprintf(text, sizeof text, "not complete after %g s", timeout);
        PyErr_SetString(Error, text);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *py_test(PyObject *m, PyObject *arg) {
    (void)m;
    struct op *o = pointer(arg);
    if (PyErr_Occurred() || !need_start()) return NULL;
    int state;
    Py_BEGIN_ALLOW_THREADS
    state = op_test(o);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(state);
}

static PyObject *py_error(PyObject *m, PyObject *arg) {
    (void)m;
    struct op *o = pointer(arg);
    if (PyErr_Occurred()) return NULL;
    if (atomic_load(&o->state) != FAILED) Py_RETURN_NONE;
    return PyUnicode_FromString(o->error);
}

static PyObject *py_source(PyObject *m, PyObject *arg) {
    (void)m;
    struct op *o = pointer(arg);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(o->source);
}

static PyObject *py_finished(PyObject *m, PyObject *arg) {
    (void)m;
    struct op *o = pointer(arg);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(o->finished);
}

static PyObject *py_release(PyObject *m, PyObject *arg) {
    (void)m;
    struct op *o = pointer(arg);
    if (PyErr_Occurred()) return NULL;
    if (started()) op_release(o);
    Py_RETURN_NONE;
}

static PyObject *py_wait_any(PyObject *m, PyObject *const *args, Py_ssize_t count) {
    (void)m;
    if (!need_arguments(count, 2) || !need_start()) return NULL;
    Py_ssize_t size = PyTuple_Size(args[0]);
    double timeout = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    struct op **ops = malloc(((size_t)size + 1) * sizeof *ops);
    for (Py_ssize_t i = 0; i < size; i++) ops[i] = pointer(PyTuple_GetItem(args[0], i));
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = op_wait_any(ops, (int)size, timeout);
    Py_END_ALLOW_THREADS
    free(ops);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(found);
}

static PyObject *py_nudge(PyObject *m, PyObject *unused) {
    (void)m, (void)unused;
    if (started()) op_nudge();
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL

static PyMethodDef functions[] = {
    {"started", py_started, METH_NOARGS, NULL},
    {"start", py_start, METH_VARARGS, NULL},
    {"attach", py_attach, METH_VARARGS, NULL},
    {"allocate", py_allocate, METH_O, NULL},
    {"free", py_free, METH_O, NULL},
    {"is_resident", py_is_resident, METH_VARARGS, NULL},
    {"site", py_site, METH_O, NULL},
    {"reducible", py_reducible, METH_VARARGS, NULL},
    {"control", py_control, METH_O, NULL},
    {"open_group", py_open_group, METH_VARARGS, NULL},
    {"close_group", py_close_group, METH_O, NULL},
    {"abort", py_abort, METH_VARARGS, NULL},
    {"collective", FAST(py_collective)},
    {"all_to_all", FAST(py_all_to_all)},
    {"send", FAST(py_send)},
    {"recv", FAST(py_recv)},
    {"wait", FAST(py_wait)},
    {"test", py_test, METH_O, NULL},
    {"error", py_error, METH_O, NULL},
    {"source", py_source, METH_O, NULL},
    {"finished", py_finished, METH_O, NULL},
    {"release", py_release, METH_O, NULL},
    {"wait_any", FAST(py_wait_any)},
    {"nudge", py_nudge, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, -1, functions, NULL, NULL, NULL, NULL};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"ALL_REDUCE", ALL_REDUCE}, {"REDUCE_SCATTER", REDUCE_SCATTER}, {"REDUCE", REDUCE}, {"ALL_GATHER", ALL_GATHER},
    {"BROADCAST", BROADCAST}, {"GATHER", GATHER}, {"SCATTER", SCATTER}, {"ALL_TO_ALL", ALL_TO_ALL}, {"BARRIER", BARRIER},
    {"F32", PHX_F32}, {"F64", PHX_F64}, {"F16", PHX_F16}, {"BF16", PHX_BF16}, {"I8", PHX_I8}, {"U8", PHX_U8}, {"I16", PHX_I16},
    {"I32", PHX_I32}, {"I64", PHX_I64}, {"BOOL", PHX_BOOL}, {"C64", PHX_C64}, {"C128", PHX_C128}, {"OPAQUE", PHX_OPAQUE},
    {"SUM", PHX_SUM}, {"AVG", PHX_AVG}, {"PRODUCT", PHX_PRODUCT}, {"MIN", PHX_MIN}, {"MAX", PHX_MAX}, {"BAND", PHX_BAND},
    {"BOR", PHX_BOR}, {"BXOR", PHX_BXOR},
};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    Error = PyErr_NewException("phalanx.comm.shm._core.Error", PyExc_RuntimeError, NULL);
    if (!Error || PyModule_AddObjectRef(module, "Error", Error) < 0) goto fail;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) goto fail;
    return module;
fail:
    Py_DECREF(module);
    return NULL;
}
