/* One optimizer step as two passes over memory: the sum of the squares of the gradient, then the update. And the sum
   of the squares of a difference, which is never stored.

   Plain C, built without the headers of Python or torch. Before a pass the tensors are looked at one by one: only
   those that lie in memory as the pass walks it are taken. Each pass is one parallel region over all tensors taken as
   one long vector, cut into blocks. The update takes the blocks backwards, because what the norm read last is still in
   the cache. */

#include <stddef.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* The same function compiled for several kinds of processor, chosen when the library is loaded. */
#if defined(CLONES)
#define FOR_EACH_CPU __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define FOR_EACH_CPU
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { BLOCK = 1 << 16 };  /* elements that a thread takes at a time */
enum { ROW = 256 };        /* elements of a quarter of a block whose squares are added in single precision */
enum { ALONE = 1 << 15 };  /* up to so many elements in all, a second thread costs more than it brings */

typedef struct {
    double scale, weight_decay, momentum, undamped, lr; /* undamped: 1 - dampening */
    int64_t nesterov;
} Rule;

#define REAL float
#define NAMED(f) f##_float
#include "passes.h"
#undef REAL
#undef NAMED
#define REAL double
#define NAMED(f) f##_double
#include "passes.h"

/* The part [first, last) of all elements that this thread takes: a block belongs to whoever owns its first element. */
static void share(int64_t all, int64_t *first, int64_t *last)
{
    int me = 0, threads = 1;
#ifdef _OPENMP
    me = omp_get_thread_num();
    threads = omp_get_num_threads();
#endif
    *first = all / threads * me;
    *last = me == threads - 1 ? all : all / threads * (me + 1);
}

static int64_t sum_of(const int64_t *sizes, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += sizes[i];
    return sum;
}

static int64_t block_length(int64_t size, int64_t at) { return size - at < BLOCK ? size - at : BLOCK; }

static double squares_of_block(const void *x, const void *y, int64_t at, int64_t n, int doubles)
{
    if (doubles)
        return y ? squares_apart_double((const double *)x + at, (const double *)y + at, n)
                 : squares_double((const double *)x + at, n);
    return y ? squares_apart_float((const float *)x + at, (const float *)y + at, n)
             : squares_float((const float *)x + at, n);
}

/* Of all tensors, or, with apart, of each minus the one as far on in the list that follows. */
double curvestep_sum_of_squares(void *const *x, const int64_t *sizes, int64_t count, int doubles, int threads, int apart)
{
    const int64_t all = sum_of(sizes, count);
    double sum = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && all > ALONE) reduction(+ : sum)
    {
        int64_t first, last, begin = 0;
        share(all, &first, &last);
        for (int64_t i = 0; i < count; begin += sizes[i++])
            for (int64_t at = 0; at < sizes[i]; at += BLOCK)
                if (first <= begin + at && begin + at < last)
                    sum += squares_of_block(x[i], apart ? x[count + i] : 0, at, block_length(sizes[i], at), doubles);
    }
    return sum;
}

/* The addresses of all gradients come first, then those of all parameters, then, with momentum, those of all buffers. */
void curvestep_update(void *const *addresses, const int64_t *sizes, int64_t count, int doubles, int threads,
                     int momentum, const Rule *rule)
{
    void *const *g = addresses, *const *p = addresses + count, *const *b = momentum ? addresses + 2 * count : 0;
    const int64_t all = sum_of(sizes, count);
#pragma omp parallel num_threads(threads) if (threads > 1 && all > ALONE)
    {
        int64_t first, last, begin = all;
        share(all, &first, &last);
        for (int64_t i = count - 1; i >= 0; i--) {
            begin -= sizes[i];
            for (int64_t at = (sizes[i] - 1) / BLOCK * BLOCK; at >= 0 && sizes[i] > 0; at -= BLOCK)
                if (first <= begin + at && begin + at < last) {
                    const int64_t n = block_length(sizes[i], at);
                    if (doubles)
                        update_double((double *)p[i] + at, (const double *)g[i] + at, b ? (double *)b[i] + at : 0, n, rule);
                    else
                        update_float((float *)p[i] + at, (const float *)g[i] + at, b ? (float *)b[i] + at : 0, n, rule);
                }
        }
    }
}

/* A tensor as DLPack describes it, and the function of torch's exchange interface that fills it in: a stable binary
   interface, which spares a call into Python for each address, size, stride, type and device. */
typedef struct {
    void *data;
    int32_t device, device_id, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Description;
typedef int (*Describe)(void *tensor, Description *out);

extern void *PyList_GetItem(void *list, ptrdiff_t index); /* of Python's stable interface: a borrowed reference */

enum { CPU = 1, FLOATING = 2 }; /* codes of DLPack */

static int64_t size_of(const Description *t)
{
    int64_t size = 1;
    for (int d = 0; d < t->dimensions; d++)
        size *= t->shape[d];
    return size;
}

/* Whether some order of the dimensions makes the tensor contiguous: no gaps and no overlaps. */
static int fills_memory(const Description *t, int64_t size)
{
    if (!t->strides || size == 0)
        return 1;
    for (int64_t reach = 1; reach < size;) {
        int next = t->dimensions - 1;
        while (next >= 0 && (t->shape[next] == 1 || t->strides[next] != reach))
            next--;
        if (next < 0)
            return 0;
        reach *= t->shape[next];
    }
    return 1;
}

static int lies_like(const Description *t, const Description *other)
{
    if (t->dimensions != other->dimensions || t->device != other->device || t->kind != other->kind ||
        t->bits != other->bits || !t->strides != !other->strides)
        return 0;
    for (int d = 0; d < t->dimensions; d++)
        if (t->shape[d] != other->shape[d] || (t->strides && t->shape[d] > 1 && t->strides[d] != other->strides[d]))
            return 0;
    return 1;
}

/* Addresses and sizes of the tensors in a list, and addresses of those in the other lists, which follow. 0: all are
   float32 on CPU and fill their memory, and those of the other lists lie like those of the first. 1: the same for
   float64. 2 more if some tensor has a single element. -1: not so. */
int curvestep_view(Describe describe, void *const *lists, int64_t num_lists, int64_t count, void **addresses,
                  int64_t *sizes)
{
    int bits = 32, single = 0;
    for (int64_t i = 0; i < count; i++) {
        Description t, other;
        if (describe(PyList_GetItem(lists[0], i), &t))
            return -1;
        if (i == 0)
            bits = t.bits;
        sizes[i] = size_of(&t);
        single |= sizes[i] == 1;
        if (t.device != CPU || t.kind != FLOATING || t.bits != bits || t.lanes != 1 || !fills_memory(&t, sizes[i]))
            return -1;
        addresses[i] = (char *)t.data + t.offset;
        for (int64_t k = 1; k < num_lists; k++) {
            if (describe(PyList_GetItem(lists[k], i), &other) || !lies_like(&other, &t))
                return -1;
            addresses[k * count + i] = (char *)other.data + other.offset;
        }
    }
    return bits == 32 ? 2 * single : bits == 64 ? 2 * single + 1 : -1;
}
