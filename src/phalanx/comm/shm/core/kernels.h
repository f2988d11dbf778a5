/* The arithmetic and the copies of the shared-memory backend: element by element over plain pointers.
 *
 * Nothing here knows of ranks, segments or synchronisation, allocates, or keeps state; every function may be called from any
 * thread. The caller orders memory around the calls.
 */
#ifndef PHX_KERNELS_H
#define PHX_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Complex numbers are interleaved (real, imaginary). OPAQUE is bytes that are only moved. */
enum phx_dtype {
    PHX_F32, PHX_F64, PHX_F16, PHX_BF16, PHX_I8, PHX_U8, PHX_I16, PHX_I32, PHX_I64, PHX_BOOL, PHX_C64, PHX_C128, PHX_OPAQUE,
    PHX_DTYPES
};

enum phx_redop { PHX_SUM, PHX_AVG, PHX_PRODUCT, PHX_MIN, PHX_MAX, PHX_BAND, PHX_BOR, PHX_BXOR, PHX_REDOPS };

/* out[k][i] = in[0][i] op in[1][i] op ... op in[nin-1][i], strictly in that order, for every k < nout and i < n.
 *
 * nin and nout >= 1, n counts items, pointers need the alignment of one component only. out[k] may equal any in[j] or overlap
 * none; the outputs are distinct. The bits of a result depend on the inputs and their order alone: not on n, alignment, nout or
 * the instruction set.
 *
 * AVG is the sum divided by nin. F16 and BF16 are accumulated in float32 and rounded once, to nearest even. A NaN in any input
 * makes the quiet NaN without sign or payload. Of equal values MIN and MAX give the first, which decides between -0 and +0.
 * Integers wrap. Booleans count any byte but 0 as true and come out as 0 or 1: SUM, MAX and BOR are or, PRODUCT, MIN and BAND
 * are and. A complex product is (ac - bd, ad + bc) without further care for infinities.
 */
typedef void (*phx_reduce_fn)(void *const *out, int nout, const void *const *in, int nin, size_t n);

/* The kernel of a dtype and an operation; NULL where the pair has no meaning:
 *   SUM PRODUCT          all but OPAQUE
 *   AVG                  floats, complex
 *   MIN MAX              floats, integers, BOOL
 *   BAND BOR BXOR        integers, BOOL
 */
phx_reduce_fn phx_kernel(int dtype, int redop);

/* Bytes of one item, 1 for OPAQUE, 0 for a number that is no dtype. */
size_t phx_itemsize(int dtype);

/* memcpy, for any alignment. With streaming, large blocks pass by the cache where the CPU can (x86-64): for data that this core
 * will not read again soon. All stores are ordered before any later store, so a flag may be released right after.
 */
void phx_copy(void *dst, const void *src, size_t bytes, int streaming);

#endif
