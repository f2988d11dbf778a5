/* Reductions as tables of macros: per type and operation one loop over up to four inputs (a "fold"), which the compiler
 * vectorises, and a driver that leads the blocks of any number of inputs through it. The running value of a block stays in the
 * L1 cache, so every input is read once and every output written once.
 */
#include "kernels.h"

#include <string.h>

/* A fused multiply-add rounds once where two operations round twice: bits would then depend on the instruction set. Loops with
 * comparisons of floats vectorise only if nobody looks at the exception flags. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-trapping-math")
#endif
#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ != 0
#error "kernels.c needs IEEE arithmetic in the declared precision: no -ffast-math, no x87"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* PHX_NO_CLONES builds for the baseline CPU alone: ThreadSanitizer cannot live with the resolvers of clones. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(PHX_NO_CLONES)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* Result and operands are equal or apart, so no iteration needs another's result: without this, in-place calls run scalar. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

enum { BLOCK = 4096 }; /* bytes of a running value; 2 and 8 KB were slower */
enum { TERMS = 4 };    /* inputs of one pass */

/* The caller's memory and the blocks on the stack hold whatever type the dtype says. */
#define MEMORY __attribute__((may_alias))
typedef float MEMORY f32;
typedef double MEMORY f64;
typedef int8_t MEMORY i8;
typedef int16_t MEMORY i16;
typedef int32_t MEMORY i32;
typedef int64_t MEMORY i64;
typedef uint8_t MEMORY u8;
typedef uint16_t MEMORY u16;
typedef uint32_t MEMORY u32;
typedef uint64_t MEMORY u64;

/* r = in[0] op ... op in[terms-1] over n components, 1 <= terms <= TERMS; an average divides that by `count`. */
typedef void (*fold_fn)(void *r, const void *const *in, int terms, size_t n, int count);

/* A fold whose body makes component i of r from those of a, b, c and d, compiled for every number of terms. Several inputs in
 * one pass keep several streams of memory busy: four at once were 1.5 times as fast as one after the other for float32 out of
 * DRAM, 1.1 times out of the L2 cache. */
#define LOOP(NAME, T, ...)                                                                                      \
    static inline __attribute__((always_inline)) void NAME##_loop(                                              \
        T *r, const T *a, const T *b, const T *c, const T *d, int terms, size_t n, int count) {                 \
        (void)count;                                                                                            \
        INDEPENDENT for (size_t i = 0; i < n; i++) __VA_ARGS__                                                  \
    }                                                                                                           \
    CLONES static void NAME(void *r, const void *const *in, int terms, size_t n, int count) {                   \
        switch (terms) {                                                                                        \
        case 1: NAME##_loop(r, in[0], NULL, NULL, NULL, 1, n, count); break;                                    \
        case 2: NAME##_loop(r, in[0], in[1], NULL, NULL, 2, n, count); break;                                   \
        case 3: NAME##_loop(r, in[0], in[1], in[2], NULL, 3, n, count); break;                                  \
        default: NAME##_loop(r, in[0], in[1], in[2], in[3], 4, n, count);                                       \
        }                                                                                                       \
    }

/* T is the stored type and WIDER the accumulated one; VALUE reads an item, OP combines two, END and RESULT finish. */
#define FOLD(NAME, T, WIDER, VALUE, OP, END, RESULT)                                                            \
    LOOP(NAME, T, {                                                                                             \
        WIDER v = VALUE(a[i]), x;                                                                               \
        if (terms > 1) x = VALUE(b[i]), v = OP(v, x);                                                           \
        if (terms > 2) x = VALUE(c[i]), v = OP(v, x);                                                           \
        if (terms > 3) x = VALUE(d[i]), v = OP(v, x);                                                           \
        v = END(v);                                                                                             \
        r[i] = (T)RESULT(v);                                                                                    \
    })

#define SAME(x) (x)
#define ADD(x, y) ((x) + (y))
#define MULTIPLY(x, y) ((x) * (y))
#define LESSER(x, y) ((y) < (x) ? (y) : (x))
#define GREATER(x, y) ((y) > (x) ? (y) : (x))
#define AND(x, y) ((x) & (y))
#define OR(x, y) ((x) | (y))
#define XOR(x, y) ((x) ^ (y))

/* Every NaN becomes the same one: which of two an instruction hands on depends on their order, which compilers may swap. */
#define NOT_A_NUMBER __builtin_nanf("")
#define QUIET(x) ((x) == (x) ? (x) : NOT_A_NUMBER)
#define LESSER_OR_NAN(x, y) ((y) == (y) ? LESSER(x, y) : (y))
#define GREATER_OR_NAN(x, y) ((y) == (y) ? GREATER(x, y) : (y))
#define MEAN(x) ((x) / count)

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

#define FLOAT_FOLDS(T)                                                                                          \
    FOLD(T##_sum, T, T, SAME, ADD, SAME, QUIET)                                                                 \
    FOLD(T##_avg, T, T, SAME, ADD, MEAN, QUIET)                                                                 \
    FOLD(T##_product, T, T, SAME, MULTIPLY, SAME, QUIET)                                                        \
    FOLD(T##_min, T, T, SAME, LESSER_OR_NAN, SAME, QUIET)                                                       \
    FOLD(T##_max, T, T, SAME, GREATER_OR_NAN, SAME, QUIET)
FLOAT_FOLDS(f32)
FLOAT_FOLDS(f64)

/* bfloat16 is folded as words of two items: the halves of a 32-bit lane need no packing, which is twice as fast. */
typedef uint32_t __attribute__((may_alias, aligned(2))) bf16x2;
#define FIRST(word) float_of((word) << 16)
#define SECOND(word) float_of((word) & 0xffff0000)

static inline uint32_t to_bf16(float x) { /* in the upper half */
    const uint32_t u = bits_of(x);
    return x != x ? 0x7fc00000 : u + 0x7fff + (u >> 16 & 1);
}

static inline uint32_t packed(float first, float second) { return to_bf16(first) >> 16 | (to_bf16(second) & 0xffff0000); }

#define TAKE(OP, word) x = FIRST(word), y = SECOND(word), v = OP(v, x), w = OP(w, y)
#define BF16_FOLD(NAME, OP, END)                                                                                \
    LOOP(NAME, bf16x2, {                                                                                        \
        float v = FIRST(a[i]), w = SECOND(a[i]), x, y;                                                          \
        if (terms > 1) TAKE(OP, b[i]);                                                                          \
        if (terms > 2) TAKE(OP, c[i]);                                                                          \
        if (terms > 3) TAKE(OP, d[i]);                                                                          \
        v = END(v), w = END(w);                                                                                 \
        r[i] = packed(v, w);                                                                                    \
    })
BF16_FOLD(bf16_sum, ADD, SAME)
BF16_FOLD(bf16_avg, ADD, MEAN)
BF16_FOLD(bf16_product, MULTIPLY, SAME)
BF16_FOLD(bf16_min, LESSER_OR_NAN, SAME)
BF16_FOLD(bf16_max, GREATER_OR_NAN, SAME)

/* Integers of either sign add and multiply as unsigned ones, where overflow is defined. */
#define WRAPPING_FOLDS(T, WIDER)                                                                                \
    FOLD(T##_sum, T, WIDER, SAME, ADD, SAME, SAME)                                                              \
    FOLD(T##_product, T, WIDER, SAME, MULTIPLY, SAME, SAME)
WRAPPING_FOLDS(u8, uint32_t)
WRAPPING_FOLDS(u16, uint32_t)
WRAPPING_FOLDS(u32, uint32_t)
WRAPPING_FOLDS(u64, uint64_t)

#define ORDER_FOLDS(T)                                                                                          \
    FOLD(T##_min, T, T, SAME, LESSER, SAME, SAME)                                                               \
    FOLD(T##_max, T, T, SAME, GREATER, SAME, SAME)
ORDER_FOLDS(i8)
ORDER_FOLDS(u8)
ORDER_FOLDS(i16)
ORDER_FOLDS(i32)
ORDER_FOLDS(i64)

/* Bits do not care how wide an item is. */
FOLD(bits_and, u8, uint8_t, SAME, AND, SAME, SAME)
FOLD(bits_or, u8, uint8_t, SAME, OR, SAME, SAME)
FOLD(bits_xor, u8, uint8_t, SAME, XOR, SAME, SAME)

#define TRUTH(x) ((uint8_t)((x) != 0))
FOLD(bool_and, u8, uint8_t, TRUTH, AND, SAME, SAME)
FOLD(bool_or, u8, uint8_t, TRUTH, OR, SAME, SAME)
FOLD(bool_xor, u8, uint8_t, TRUTH, XOR, SAME, SAME)

/* Scalar, and without clones: in its AVX-512 code gcc 12 fuses the multiply-adds of re and im although contraction is off. */
#define COMPLEX_PRODUCT(NAME, T)                                                                                \
    static void NAME(void *r_, const void *const *in, int terms, size_t n, int count) {                         \
        T *r = r_;                                                                                              \
        (void)count;                                                                                            \
        for (size_t i = 0; i < n; i += 2) {                                                                     \
            T re = ((const T *)in[0])[i], im = ((const T *)in[0])[i + 1];                                       \
            for (int j = 1; j < terms; j++) {                                                                   \
                const T x = ((const T *)in[j])[i], y = ((const T *)in[j])[i + 1], last = re;                    \
                re = last * x - im * y;                                                                         \
                im = last * y + im * x;                                                                         \
            }                                                                                                   \
            r[i] = QUIET(re);                                                                                   \
            r[i + 1] = QUIET(im);                                                                               \
        }                                                                                                       \
    }
COMPLEX_PRODUCT(c64_product, f32)
COMPLEX_PRODUCT(c128_product, f64)

/* Half precision that is not folded in one pass is widened block by block, and rounded once at the end. The order of the
 * widened items is free: the first and the second items of bfloat16 words lie apart. */
CLONES static void bf16_widen(float *to, const void *from_, size_t n) {
    const bf16x2 *from = from_;
    const size_t words = n / 2;
    INDEPENDENT for (size_t i = 0; i < words; i++) {
        to[i] = FIRST(from[i]);
        to[words + i] = SECOND(from[i]);
    }
    if (n % 2) to[n - 1] = FIRST((uint32_t)((const u16 *)from_)[n - 1]);
}

CLONES static void bf16_narrow(void *to_, const float *from, size_t n) {
    bf16x2 *to = to_;
    const size_t words = n / 2;
    INDEPENDENT for (size_t i = 0; i < words; i++) to[i] = packed(from[i], from[words + i]);
    if (n % 2) ((u16 *)to_)[n - 1] = (uint16_t)packed(from[n - 1], 0);
}

#if defined(__aarch64__)
static inline float from_f16(uint16_t h) {
    __fp16 x;
    memcpy(&x, &h, 2);
    return x;
}

static inline uint16_t to_f16(float x) {
    const __fp16 y = (__fp16)x;
    uint16_t h;
    memcpy(&h, &y, 2);
    return x != x ? 0x7e00 : h;
}
#else
/* Normal numbers only change the exponent's bias. The small ones are m * 2^-24, and 0.5 + m * 2^-24 has m as its last bits: one
 * float addition shifts them and, on the way back, rounds, with no float subnormal that a CPU mode might flush to zero. */
static inline float from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    const uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    const uint32_t small = bits_of(float_of(bits_of(0.5f) + magnitude) - 0.5f);
    return float_of(sign | (magnitude < 0x0400 ? small : normal));
}

static inline uint16_t to_f16(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    const uint32_t held = magnitude < 143u << 23 ? magnitude : 143u << 23; /* 65536 and above: infinity */
    const uint32_t normal = (held - (112u << 23) + 0xfff + (held >> 13 & 1)) >> 13;
    const uint32_t small = bits_of(float_of(held) + 0.5f) - bits_of(0.5f);
    return x != x ? 0x7e00 : (uint16_t)(sign | (held < 113u << 23 ? small : normal));
}
#endif


CLONES static void f16_widen(float *to, const void *from_, size_t n) {
    const u16 *from = from_;
    INDEPENDENT for (size_t i = 0; i < n; i++) to[i] = from_f16(from[i]);
}

CLONES static void f16_narrow(void *to_, const float *from, size_t n) {
    u16 *to = to_;
    INDEPENDENT for (size_t i = 0; i < n; i++) to[i] = to_f16(from[i]);
}

#if defined(__x86_64__) && __GNUC__ >= 11 && !defined(PHX_NO_CLONES)
#define HAS_F16C __builtin_cpu_supports("f16c")

__attribute__((target("avx,f16c"))) static void f16c_widen(float *to, const void *from_, size_t n) {
    const u16 *from = from_;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    f16_widen(to + i, from + i, n - i);
}

__attribute__((target("avx,f16c"))) static void f16c_narrow(void *to_, const float *from, size_t n) {
    u16 *to = to_;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    f16_narrow(to + i, from + i, n - i);
}
#else
#define HAS_F16C 0
#define f16c_widen f16_widen
#define f16c_narrow f16_narrow
#endif

#define ARGUMENTS void *const *out, int nout, const void *const *in, int nin, size_t n

static const void *at(const void *base, size_t offset) { return (const char *)base + offset; }

static void spread(void *const *out, int nout, size_t offset, size_t bytes) {
    for (int k = 1; k < nout; k++) memcpy((char *)out[k] + offset, at(out[0], offset), bytes);
}

/* Reduces n components of `word` bytes with `fold`, in the last pass with `last`. An output may be an input: within a block
 * none is written before every input is read. */
static void reduce(fold_fn fold, fold_fn last, size_t word, ARGUMENTS) {
    _Alignas(64) unsigned char running[BLOCK];
    const size_t block = nin > TERMS || nout > 1 ? BLOCK / word : n;
    for (size_t start = 0; start < n; start += block) {
        const size_t offset = start * word, count = n - start < block ? n - start : block;
        const void *terms[TERMS];
        int filled = 0;
        for (int j = 0; j < nin; j++) {
            if (filled == TERMS) {
                fold(running, terms, TERMS, count, nin);
                terms[0] = running;
                filled = 1;
            }
            terms[filled++] = at(in[j], offset);
        }
        last((char *)out[0] + offset, terms, filled, count, nin);
        spread(out, nout, offset, count * word);
    }
}

typedef void (*widen_fn)(float *to, const void *from, size_t n);
typedef void (*narrow_fn)(void *to, const float *from, size_t n);

/* The same over float32 copies of the blocks of a 16-bit type, for items start to n. */
static void reduce_widened(fold_fn fold, fold_fn last, widen_fn widen, narrow_fn narrow, size_t start, ARGUMENTS) {
    enum { COUNT = BLOCK / sizeof(float) };
    _Alignas(64) float values[TERMS][COUNT];
    const void *const terms[TERMS] = {values[0], values[1], values[2], values[3]};
    for (; start < n; start += COUNT) {
        const size_t offset = start * 2, count = n - start < COUNT ? n - start : COUNT;
        int filled = 0;
        for (int j = 0; j < nin; j++) {
            if (filled == TERMS) {
                fold(values[0], terms, TERMS, count, nin);
                filled = 1;
            }
            widen(values[filled++], at(in[j], offset), count);
        }
        last(values[0], terms, filled, count, nin);
        narrow((char *)out[0] + offset, values[0], count);
        spread(out, nout, offset, count * 2);
    }
}

/* Every kernel: K(dtype, operation, fold, fold of the last pass, type of a component, components per item). */
#define FLOAT_KERNELS(K, D, T)                                                                                  \
    K(D, SUM, T##_sum, T##_sum, T, 1)                                                                           \
    K(D, AVG, T##_sum, T##_avg, T, 1)                                                                           \
    K(D, PRODUCT, T##_product, T##_product, T, 1)                                                               \
    K(D, MIN, T##_min, T##_min, T, 1)                                                                           \
    K(D, MAX, T##_max, T##_max, T, 1)
#define COMPLEX_KERNELS(K, D, T, TIMES)                                                                         \
    K(D, SUM, T##_sum, T##_sum, T, 2)                                                                           \
    K(D, AVG, T##_sum, T##_avg, T, 2)                                                                           \
    K(D, PRODUCT, TIMES, TIMES, T, 2)
#define INTEGER_KERNELS(K, D, T, U)                                                                             \
    K(D, SUM, U##_sum, U##_sum, T, 1)                                                                           \
    K(D, PRODUCT, U##_product, U##_product, T, 1)                                                               \
    K(D, MIN, T##_min, T##_min, T, 1)                                                                           \
    K(D, MAX, T##_max, T##_max, T, 1)                                                                           \
    K(D, BAND, bits_and, bits_and, u8, sizeof(T))                                                               \
    K(D, BOR, bits_or, bits_or, u8, sizeof(T))                                                                  \
    K(D, BXOR, bits_xor, bits_xor, u8, sizeof(T))
#define BOOL_KERNEL(K, OP, F) K(BOOL, OP, F, F, u8, 1)
#define KERNELS(K)                                                                                              \
    FLOAT_KERNELS(K, F32, f32)                                                                                  \
    FLOAT_KERNELS(K, F64, f64)                                                                                  \
    COMPLEX_KERNELS(K, C64, f32, c64_product)                                                                   \
    COMPLEX_KERNELS(K, C128, f64, c128_product)                                                                 \
    INTEGER_KERNELS(K, I8, i8, u8)                                                                              \
    INTEGER_KERNELS(K, U8, u8, u8)                                                                              \
    INTEGER_KERNELS(K, I16, i16, u16)                                                                           \
    INTEGER_KERNELS(K, I32, i32, u32)                                                                           \
    INTEGER_KERNELS(K, I64, i64, u64)                                                                           \
    BOOL_KERNEL(K, SUM, bool_or)                                                                                \
    BOOL_KERNEL(K, PRODUCT, bool_and)                                                                           \
    BOOL_KERNEL(K, MIN, bool_and)                                                                               \
    BOOL_KERNEL(K, MAX, bool_or)                                                                                \
    BOOL_KERNEL(K, BAND, bool_and)                                                                              \
    BOOL_KERNEL(K, BOR, bool_or)                                                                                \
    BOOL_KERNEL(K, BXOR, bool_xor)
/* Those of half precision: K(dtype, operation, fold of words, fold of float32, its fold of the last pass). */
#define HALF_KERNELS(K, D)                                                                                      \
    K(D, SUM, bf16_sum, f32_sum, f32_sum)                                                                       \
    K(D, AVG, bf16_avg, f32_sum, f32_avg)                                                                       \
    K(D, PRODUCT, bf16_product, f32_product, f32_product)                                                       \
    K(D, MIN, bf16_min, f32_min, f32_min)                                                                       \
    K(D, MAX, bf16_max, f32_max, f32_max)

#define KERNEL(D, OP, F, LAST, T, COMPONENTS)                                                                   \
    static void D##_##OP(ARGUMENTS) { reduce(F, LAST, sizeof(T), out, nout, in, nin, n * (COMPONENTS)); }
KERNELS(KERNEL)

/* Words while one pass takes all inputs; what is left of the items is widened. */
#define BF16_KERNEL(D, OP, WORDS, F, LAST)                                                                      \
    static void D##_##OP(ARGUMENTS) {                                                                           \
        const size_t words = nin <= TERMS ? n / 2 : 0;                                                          \
        reduce(WORDS, WORDS, sizeof(bf16x2), out, nout, in, nin, words);                                        \
        reduce_widened(F, LAST, bf16_widen, bf16_narrow, 2 * words, out, nout, in, nin, n);                     \
    }
HALF_KERNELS(BF16_KERNEL, BF16)

#define F16_KERNEL(D, OP, WORDS, F, LAST)                                                                       \
    static void D##_##OP(ARGUMENTS) {                                                                           \
        const widen_fn widen = HAS_F16C ? f16c_widen : f16_widen;                                               \
        const narrow_fn narrow = HAS_F16C ? f16c_narrow : f16_narrow;                                           \
        reduce_widened(F, LAST, widen, narrow, 0, out, nout, in, nin, n);                                       \
    }
HALF_KERNELS(F16_KERNEL, F16)

#define ENTRY(D, OP, ...) [PHX_##D][PHX_##OP] = D##_##OP,
static const phx_reduce_fn kernels[PHX_DTYPES][PHX_REDOPS] = {
    KERNELS(ENTRY) HALF_KERNELS(ENTRY, F16) HALF_KERNELS(ENTRY, BF16)
};

phx_reduce_fn phx_kernel(int dtype, int redop) {
    if (dtype < 0 || dtype >= PHX_DTYPES || redop < 0 || redop >= PHX_REDOPS) return NULL;
    return kernels[dtype][redop];
}

size_t phx_itemsize(int dtype) {
    static const unsigned char bytes[PHX_DTYPES] = {
        [PHX_F32] = 4, [PHX_F64] = 8, [PHX_F16] = 2, [PHX_BF16] = 2, [PHX_I8] = 1, [PHX_U8] = 1, [PHX_I16] = 2,
        [PHX_I32] = 4, [PHX_I64] = 8, [PHX_BOOL] = 1, [PHX_C64] = 8, [PHX_C128] = 16, [PHX_OPAQUE] = 1,
    };
    return dtype < 0 || dtype >= PHX_DTYPES ? 0 : bytes[dtype];
}

void phx_copy(void *dst, const void *src, size_t bytes, int streaming) {
#if defined(__x86_64__)
    const size_t head = -(uintptr_t)dst & 63; /* up to whole cache lines of the destination */
    if (streaming && bytes >= head + 64) {
        char *to = dst;
        const char *from = src;
        memcpy(to, from, head);
        size_t i = head;
        for (; i + 64 <= bytes; i += 64)
            for (size_t j = i; j < i + 64; j += 16)
                _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
        memcpy(to + i, from + i, bytes - i);
        _mm_sfence();
        return;
    }
#endif
    (void)streaming;
    memcpy(dst, src, bytes);
}
