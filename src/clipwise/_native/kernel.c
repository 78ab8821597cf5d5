/* One optimizer step as two passes over memory: the sum of the squares of the gradient, then the update.

   Plain C on addresses: it knows nothing of Python or torch, and whoever calls has checked what they point to. Each
   pass is one parallel region over all tensors taken as one long vector, cut into blocks. The update takes the blocks
   backwards, because what the norm read last is still in the cache. */

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

double clipwise_sum_of_squares(void *const *x, const int64_t *sizes, int64_t count, int doubles, int threads)
{
    const int64_t all = sum_of(sizes, count);
    double sum = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && all > ALONE) reduction(+ : sum)
    {
        int64_t first, last, begin = 0;
        share(all, &first, &last);
        for (int64_t i = 0; i < count; begin += sizes[i++])
            for (int64_t at = 0; at < sizes[i]; at += BLOCK)
                if (first <= begin + at && begin + at < last) {
                    const int64_t n = block_length(sizes[i], at);
                    sum += doubles ? squares_double((const double *)x[i] + at, n)
                                   : squares_float((const float *)x[i] + at, n);
                }
    }
    return sum;
}

void clipwise_update(void *const *p, void *const *g, void *const *b, const int64_t *sizes, int64_t count, int doubles,
                     int threads, const Rule *rule)
{
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
