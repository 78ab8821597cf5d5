/* One optimizer step as two passes over memory: the sum of the squares of the gradient, then the update. And the sum
   of the squares of a difference, which is never stored.

   Plain C, built without the headers of Python or torch. Before a pass the tensors are looked at one by one: only
   those that lie in memory as the pass walks it are taken. Each pass is one call of torch's parallel for over all tensors
   taken as one long vector, cut into blocks. The update takes the blocks backwards, because what the norm read last is still in
   the cache.

   The file includes itself for each type, float and double: the passes over one block of memory stand at its end. */

#ifndef REAL

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

/* Of the two names that glibc has for pow the older one, with the same numbers: the library loads on glibc 2.28 too. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pow, pow@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pow, pow@GLIBC_2.17");
#endif

/* The same function compiled for several kinds of processor, chosen when the library is loaded. */
#if defined(CLONES)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "default"))) /* avx2 takes sixteen lanes apart */
#else
#define FOR_EACH_CPU
#define FOR_EACH_WIDTH
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { BLOCK = 1 << 16 };  /* elements of which a thread takes the squares at a time */
enum { STRETCH = 1 << 20 }; /* elements that a thread updates at a time: at the start of each, prefetching starts anew */
enum { AHEAD = 128 };       /* elements that Adam's pass asks for in advance: eight lines of each of its four arrays */
enum { ROW = 256 };        /* elements of a quarter of a block whose squares are added in single precision */
enum { SHORT = 8 * ROW };  /* elements of a unit whose squares are added in one go */
enum { NEAR = 1 << 11 };   /* elements of short units that are measured together before they are updated */
enum { FAR = 1 << 9 };     /* the same where tensors of more than STRETCH elements in all come from memory, not from a cache */
enum { MOST = 256 };       /* such units at most */
_Static_assert(NEAR <= SHORT, "units longer than SHORT must come alone");
enum { ALONE = 1 << 15 };  /* up to so many elements in all, a second thread costs more than it brings */

/* In both rules the factor on the gradient comes first: see update_range. */
typedef struct {
    double scale, weight_decay, momentum, undamped, lr; /* undamped: 1 - dampening */
    int64_t nesterov;
} Rule;

typedef struct {
    double scale, lr, beta1, beta2, eps, weight_decay;
} AdamRule;

/* Units of the gradient, each clipped at a bound of its own: a tensor, or as many elements in a row as the others of its
   tensor. They are numbered through all tensors. A bound is given, or found while the update is at its unit: `ratio` times
   the norm of the weights, which is at least `least_weight`. */
typedef struct {
    const int64_t *starts;      /* the number of each tensor's first unit, and at last of all, n */
    double *numbers;            /* n norms, n bounds, n factors; the smallest factor, and the share of those below 1 */
    double ratio, least_weight; /* 0 where bounds are given */
} Units;

typedef struct {
    double step, size, root; /* after so many steps: lr/(1 - beta1^k), and the root of 1 - beta2^k */
} Correction;

#define REAL float
#define NAMED(f) f##_float
#define SQRT sqrtf
#include "kernel.c"
#undef REAL
#undef NAMED
#undef SQRT
#define REAL double
#define NAMED(f) f##_double
#define SQRT sqrt
#include "kernel.c"
#undef REAL
#undef NAMED
#undef SQRT

/* What adamw_float does, for the elements up to the returned one, with the root from its quick estimate: one step of
   Newton's method makes it right to 1e-7, in half the time of an exact one. Where a number is so small, so large or so
   little of a number that the estimate is none, the exact root is taken. */
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2,fma")))
static int64_t adamw_quickly(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                             float *restrict x, int64_t n, const AdamRule *rule, double size, double root)
{
    const __m256 c = _mm256_set1_ps(rule->scale), b1 = _mm256_set1_ps(rule->beta1), b2 = _mm256_set1_ps(rule->beta2);
    const __m256 k1 = _mm256_set1_ps(1 - rule->beta1), k2 = _mm256_set1_ps(1 - rule->beta2);
    const __m256 keep = _mm256_set1_ps(1 - rule->lr * rule->weight_decay), h = _mm256_set1_ps(size);
    const __m256 r = _mm256_set1_ps(1 / root), eps = _mm256_set1_ps(rule->eps), half = _mm256_set1_ps(0.5f);
    const __m256 low = _mm256_set1_ps(1e-30f), high = _mm256_set1_ps(1e30f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        if (i % 16 == 0) {
            __builtin_prefetch(g + i + AHEAD, 0);
            __builtin_prefetch(p + i + AHEAD, 1);
            __builtin_prefetch(m + i + AHEAD, 1);
            __builtin_prefetch(v + i + AHEAD, 1);
        }
        const __m256 d = _mm256_mul_ps(c, _mm256_loadu_ps(g + i));
        const __m256 mi = _mm256_fmadd_ps(b1, _mm256_loadu_ps(m + i), _mm256_mul_ps(k1, d));
        const __m256 vi = _mm256_fmadd_ps(b2, _mm256_loadu_ps(v + i), _mm256_mul_ps(k2, _mm256_mul_ps(d, d)));
        __m256 square = vi;
        _mm256_storeu_ps(m + i, mi);
        _mm256_storeu_ps(v + i, vi);
        if (x) {
            const __m256 xi = _mm256_loadu_ps(x + i);
            square = _mm256_blendv_ps(vi, xi, _mm256_cmp_ps(xi, vi, _CMP_GT_OQ));
            _mm256_storeu_ps(x + i, square);
        }
        const __m256 usual = _mm256_and_ps(_mm256_cmp_ps(square, low, _CMP_GT_OQ), _mm256_cmp_ps(square, high, _CMP_LT_OQ));
        __m256 s;
        if (_mm256_movemask_ps(usual) == 0xff) {
            const __m256 y = _mm256_rsqrt_ps(square), s0 = _mm256_mul_ps(square, y);
            s = _mm256_fmadd_ps(_mm256_fnmadd_ps(s0, s0, square), _mm256_mul_ps(half, y), s0);
        } else
            s = _mm256_sqrt_ps(square);
        const __m256 step = _mm256_div_ps(_mm256_mul_ps(h, mi), _mm256_fmadd_ps(s, r, eps));
        _mm256_storeu_ps(p + i, _mm256_fmsub_ps(keep, _mm256_loadu_ps(p + i), step));
    }
    return i;
}

static int64_t adamw_begun(float *p, const float *g, float *m, float *v, float *x, int64_t n, const AdamRule *rule,
                           double size, double root)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return adamw_quickly(p, g, m, v, x, n, rule, size, root);
}
#else
#define adamw_begun(...) 0
#endif

/* Threads are torch's: its function that calls another for ranges of [begin, end), on several threads at once, or null
   for a torch that does not have it. */
typedef void (*Parts)(int64_t begin, int64_t end, void *context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain_size, Parts function, void *context);

static ParallelFor parallel_for;

void curvestep_take_threads_from(ParallelFor function) { parallel_for = function; }

/* Into how many parts, one for each thread, work on so many elements is cut. */
static int64_t num_parts(int64_t all, int threads) { return parallel_for && threads > 1 && all > ALONE ? threads : 1; }

static void on_threads(int64_t parts, Parts function, void *context)
{
    if (parts > 1)
        parallel_for(0, parts, 1, function, context);
    else
        function(0, 1, context);
}

/* Where part k of so many begins; part `parts` would begin at the end. */
static int64_t part_begin(int64_t all, int64_t parts, int64_t k) { return k == parts ? all : all / parts * k; }

static int64_t sum_of(const int64_t *sizes, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += sizes[i];
    return sum;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static double squares_of_block(const void *x, const void *y, int64_t at, int64_t n, int doubles)
{
    if (doubles)
        return y ? squares_apart_double((const double *)x + at, (const double *)y + at, n)
                 : squares_double((const double *)x + at, n);
    return y ? squares_apart_float((const float *)x + at, (const float *)y + at, n)
             : squares_float((const float *)x + at, n);
}

/* Elements of a unit of tensor i: what is measured and scaled by itself. The units of all tensors are numbered through;
   starts[i] is the number of the first one of tensor i. Without starts a tensor is one unit. */
static int64_t unit_size(const int64_t *starts, const int64_t *sizes, int64_t i)
{
    return starts && starts[i + 1] > starts[i] ? sizes[i] / (starts[i + 1] - starts[i]) : sizes[i];
}

/* The squares of all tensors, or, with apart, of each minus the one as far on in the list that follows. */
typedef struct {
    void *const *x;
    const int64_t *sizes, *starts;
    int64_t count, all, parts;
    int doubles, apart;
    double *sums; /* one for each block, which ends with its unit */
} Squares;

/* Those of units [from, to) of a tensor, of at most SHORT elements each. */
static void squares_of_units(const void *x, int64_t unit, int64_t from, int64_t to, int doubles, double *sums)
{
    if (doubles)
        squares_short_double(x, unit, from, to, sums);
    else
        squares_short_float(x, unit, from, to, sums);
}

/* How many units begin before an element, which may lie before the tensor or behind it. */
static int64_t units_before(int64_t at, int64_t unit, int64_t size)
{
    return at <= 0 ? 0 : (least(at, size) + unit - 1) / unit;
}

/* The blocks whose first element lies in these parts. */
static void squares_of_parts(int64_t begin, int64_t end, void *context)
{
    const Squares *job = context;
    const int64_t first = part_begin(job->all, job->parts, begin), last = part_begin(job->all, job->parts, end);
    int64_t number = 0, tensor_begin = 0;
    for (int64_t i = 0; i < job->count; tensor_begin += job->sizes[i++]) {
        const void *x = job->x[i], *y = job->apart ? job->x[job->count + i] : 0;
        const int64_t size = job->sizes[i], unit = unit_size(job->starts, job->sizes, i);
        if (job->starts && size && unit <= SHORT) {
            squares_of_units(x, unit, units_before(first - tensor_begin, unit, size),
                             units_before(last - tensor_begin, unit, size), job->doubles, job->sums + number);
            number += size / unit;
            continue;
        }
        for (int64_t unit_begin = 0; unit_begin < size; unit_begin += unit)
            for (int64_t at = unit_begin; at < unit_begin + unit; at += BLOCK, number++)
                if (first <= tensor_begin + at && tensor_begin + at < last)
                    job->sums[number] = squares_of_block(x, y, at, least(unit_begin + unit - at, BLOCK), job->doubles);
    }
}

/* Blocks are added in their order, whoever took them: the sum does not depend on the number of threads. Where `norms`
   is not 0, it gets the norm of each unit. Without memory for a number for each block, infinity: then the caller takes
   another way. */
double curvestep_sum_of_squares(void *const *x, const int64_t *sizes, int64_t count, int doubles, int threads, int apart,
                                const int64_t *starts, double *norms)
{
    const int64_t all = sum_of(sizes, count);
    int64_t blocks = 0, number = 0;
    int are_blocks = norms != 0; /* whether each unit is one block, and needs no other memory */
    for (int64_t i = 0; i < count; i++) {
        const int64_t unit = unit_size(starts, sizes, i);
        are_blocks &= 0 < unit && unit <= BLOCK;
        if (sizes[i])
            blocks += sizes[i] / unit * ((unit + BLOCK - 1) / BLOCK);
    }
    double sum = 0, *sums = are_blocks ? norms : malloc((blocks + 1) * sizeof(double));
    if (!sums)
        return INFINITY;
    Squares job = {x, sizes, starts, count, all, num_parts(all, threads), doubles, apart, sums};
    on_threads(job.parts, squares_of_parts, &job);
    for (int64_t k = 0; k < blocks; k++)
        sum += sums[k];
    for (int64_t i = 0; norms && i < count; i++) {
        const int64_t unit = unit_size(starts, sizes, i);
        for (int64_t k = starts[i]; k < starts[i + 1]; k++) {
            double square = 0;
            for (int64_t at = 0; at < unit; at += BLOCK)
                square += sums[number++];
            norms[k] = sqrt(square);
        }
    }
    if (!are_blocks)
        free(sums);
    return sum;
}

/* An update as a job, which is handed one block after another: elements [at, at + n) of tensor i. In `lists` the
   addresses of all gradients come first, then those of all parameters, then those of each list of buffers. */
typedef struct Job Job;
struct Job {
    void *const *lists;
    const int64_t *sizes;
    int64_t count, all, parts;
    int doubles, num_lists;
    const void *rule;
    const Units *units; /* whose factors are beside that of the rule, or 0 */
    void (*block)(const Job *job, int64_t i, int64_t at, int64_t n, double scale);
    const double *rates; /* factors on the learning rate, one for each tensor, or 0 */
    double *sum;         /* where a reduction adds up its block */
    void *const *steps;
    int steps_are_doubles;
    Correction usual; /* that of the first tensor, most often of all */
};

/* The first element of tensor i that belongs to what begins `reach` elements after its own beginning: cuts lie between
   lines of the cache, counted from the beginning of a unit if these have factors, so that no bit depends on them. */
static int64_t cut(const Job *job, int64_t i, int64_t reach)
{
    const int64_t size = job->sizes[i], unit = job->units ? unit_size(job->units->starts, job->sizes, i) : size;
    if (reach <= 0 || reach >= size)
        return reach <= 0 ? 0 : size;
    const int64_t begin = reach / unit * unit;
    if (job->units && job->units->ratio && reach > begin) /* a unit is measured before any of it changes */
        return begin + unit;
    return begin + least((reach - begin + 63) / 64 * 64, unit);
}

typedef struct {
    const char *begin, *end;
} Span;

static int by_address(const void *a, const void *b)
{
    const char *x = ((const Span *)a)->begin, *y = ((const Span *)b)->begin;
    return (x > y) - (x < y);
}

/* Whether two parameters share memory: of two threads that update a number at once, one would undo the other. */
static int is_shared(const Job *job)
{
    Span *spans = malloc(job->count * sizeof(Span));
    int64_t num_spans = 0, i = 1;
    for (int64_t k = 0; spans && k < job->count; k++) {
        const char *begin = job->lists[job->count + k];
        if (job->sizes[k])
            spans[num_spans++] = (Span){begin, begin + job->sizes[k] * (job->doubles ? 8 : 4)};
    }
    if (!spans)
        return 1;
    qsort(spans, num_spans, sizeof(Span), by_address);
    while (i < num_spans && spans[i - 1].end <= spans[i].begin)
        i++;
    free(spans);
    return i < num_spans;
}

/* Where element `at` of tensor i of a list lies, 0 if there is no such list. */
static void *element(const Job *job, int list, int64_t i, int64_t at)
{
    if (list >= job->num_lists)
        return 0;
    return (char *)job->lists[list * job->count + i] + at * (job->doubles ? 8 : 4);
}

/* The squares of the weights in units [from, from + count) of tensor i. Of a long unit, which comes alone, in one stream of
   reads: each of four would end before what is read in advance is of use. */
static void measure_weights(const Job *job, int64_t i, int64_t unit, int64_t from, int64_t count, double *squares)
{
    if (unit <= SHORT) {
        squares_of_units(element(job, 1, i, from * unit), unit, 0, count, job->doubles, squares);
        return;
    }
    *squares = 0;
    for (int64_t at = 0; at < unit; at += SHORT) {
        double part;
        squares_of_units(element(job, 1, i, from * unit + at), least(unit - at, SHORT), 0, 1, job->doubles, &part);
        *squares += part;
    }
}

static double *factors_of(const Units *units, int64_t count) { return units->numbers + 2 * units->starts[count]; }

static double factor(double norm, double bound) { return norm > bound ? bound / norm : 1; }

/* Before an update: the factors of units whose bounds are given, and of those that are empty. */
static void clip_by_bounds(const Job *job)
{
    if (!job->units)
        return;
    const int64_t n = job->units->starts[job->count];
    const double *norms = job->units->numbers, *bounds = norms + n;
    double *factors = factors_of(job->units, job->count);
    for (int64_t k = 0; k < n; k++)
        factors[k] = factor(norms[k], bounds[k]);
}

/* While it is at them: the factors of units [from, from + count) of tensor i, by the norms of their weights. */
static void clip_by_weights(const Job *job, int64_t i, int64_t unit, int64_t from, int64_t count)
{
    const Units *units = job->units;
    const double *norms = units->numbers + units->starts[i] + from;
    double squares[MOST], *factors = factors_of(units, job->count) + units->starts[i] + from;
    measure_weights(job, i, unit, from, count, squares);
    for (int64_t k = 0; k < count; k++) {
        const double weight = sqrt(squares[k]);
        factors[k] = factor(norms[k], units->ratio * (weight > units->least_weight ? weight : units->least_weight));
    }
}

/* After an update: how much was clipped. */
static void count_clipped(const Job *job)
{
    const int64_t n = job->units->starts[job->count];
    double *factors = factors_of(job->units, job->count), lowest = 1, num_clipped = 0;
    for (int64_t k = 0; k < n; k++) {
        lowest = factors[k] < lowest ? factors[k] : lowest;
        num_clipped += factors[k] < 1;
    }
    factors[n] = lowest;
    factors[n + 1] = num_clipped / n;
}

/* Elements [from, to) of tensor i, all of them with one factor, or each unit with its own. Where factors are found, so few
   units are measured at a time that they are in a near cache when they are updated. */
static void update_range(const Job *job, int64_t i, int64_t from, int64_t to)
{
    const double scale = *(const double *)job->rule;
    const Units *units = job->units;
    if (!units) {
        job->block(job, i, from, to - from, scale);
        return;
    }
    const double *factors = factors_of(units, job->count) + units->starts[i];
    const int64_t unit = unit_size(units->starts, job->sizes, i), near = job->all > STRETCH ? FAR : NEAR;
    const int64_t together = least(near / unit + 1, MOST);
    int64_t found = from / unit;
    for (int64_t at = from, n; at < to; at += n) {
        const int64_t k = at / unit;
        n = least((k + 1) * unit, to) - at;
        if (units->ratio && k == found) {
            found = least(k + together, (to + unit - 1) / unit);
            clip_by_weights(job, i, unit, k, found - k);
        }
        job->block(job, i, at, n, scale * factors[k]);
    }
}

/* Stretches of the long vector from the last to the first, each from its beginning to its end, in which what is read
   in advance, from one tensor to the next, is what is needed. */
static void update_parts(int64_t begin, int64_t end, void *context)
{
    const Job *job = context;
    const int64_t first = part_begin(job->all, job->parts, begin), last = part_begin(job->all, job->parts, end);
    int64_t i = job->count, tensor_begin = job->all;
    for (int64_t low, high = last; high > first; high = low) {
        low = high - first > STRETCH ? high - STRETCH : first;
        while (tensor_begin > low)
            tensor_begin -= job->sizes[--i];
        for (int64_t k = i, at = tensor_begin; at < high; at += job->sizes[k++]) {
            const int64_t from = cut(job, k, low - at), to = cut(job, k, high - at);
            if (from < to)
                update_range(job, k, from, to);
        }
    }
}

static void update_all(Job *job, int threads)
{
    job->all = sum_of(job->sizes, job->count);
    job->parts = num_parts(job->all, threads);
    if (job->parts > 1 && is_shared(job))
        job->parts = 1;
    clip_by_bounds(job);
    on_threads(job->parts, update_parts, job);
    if (job->units)
        count_clipped(job);
}

static void update_block(const Job *job, int64_t i, int64_t at, int64_t n, double scale)
{
    Rule rule = *(const Rule *)job->rule;
    void *g = element(job, 0, i, at), *p = element(job, 1, i, at), *b = element(job, 2, i, at);
    rule.scale = scale;
    if (job->doubles)
        update_double(p, g, b, n, &rule);
    else
        update_float(p, g, b, n, &rule);
}

/* Gradients, parameters and, with momentum, buffers. */
void curvestep_update(void *const *lists, const int64_t *sizes, int64_t count, int doubles, int threads, int num_lists,
                     const Rule *rule, const Units *units)
{
    Job job = {.lists = lists, .sizes = sizes, .count = count, .doubles = doubles, .num_lists = num_lists,
               .rule = rule, .units = units, .block = update_block};
    update_all(&job, threads);
}

static double step_of(const Job *job, int64_t i)
{
    return job->steps_are_doubles ? *(double *)job->steps[i] : *(float *)job->steps[i];
}

static Correction correction(const AdamRule *rule, double step)
{
    const double size = rule->lr / (1 - pow(rule->beta1, step + 1)), root = sqrt(1 - pow(rule->beta2, step + 1));
    return (Correction){step, size, root};
}

static void adamw_block(const Job *job, int64_t i, int64_t at, int64_t n, double scale)
{
    AdamRule own_rule = *(const AdamRule *)job->rule, *rule = &own_rule;
    const double step = step_of(job, i);
    Correction own = step == job->usual.step ? job->usual : correction(rule, step);
    own_rule.scale = scale;
    if (job->rates) {
        own_rule.lr *= job->rates[i];
        own.size *= job->rates[i];
    }
    void *g = element(job, 0, i, at), *p = element(job, 1, i, at), *m = element(job, 2, i, at);
    void *v = element(job, 3, i, at), *largest = element(job, 4, i, at);
    if (job->doubles) {
        adamw_double(p, g, m, v, largest, n, rule, own.size, own.root);
        return;
    }
    const int64_t done = adamw_begun(p, g, m, v, largest, n, rule, own.size, own.root);
    adamw_float((float *)p + done, (float *)g + done, (float *)m + done, (float *)v + done,
                largest ? (float *)largest + done : 0, n - done, rule, own.size, own.root);
}

/* Gradients, parameters, first and second moments and, with amsgrad, the largest second moments; and the number of
   steps that each parameter has made, which is one more afterwards. */
void curvestep_adamw(void *const *lists, const int64_t *sizes, int64_t count, int doubles, int threads, int num_lists,
                    const AdamRule *rule, void *const *steps, int steps_are_doubles, const Units *units,
                    const double *rates)
{
    Job job = {.lists = lists, .sizes = sizes, .count = count, .doubles = doubles, .num_lists = num_lists,
               .rule = rule, .units = units, .rates = rates, .block = adamw_block,
               .steps = steps, .steps_are_doubles = steps_are_doubles};
    if (count)
        job.usual = correction(rule, step_of(&job, 0));
    update_all(&job, threads);
    for (int64_t i = 0; i < count; i++)
        if (steps_are_doubles)
            *(double *)steps[i] += 1;
        else
            *(float *)steps[i] += 1;
}

static void ratios_block(const Job *job, int64_t i, int64_t at, int64_t n, double scale)
{
    AdamRule rule = *(const AdamRule *)job->rule;
    const double step = step_of(job, i);
    const Correction own = step == job->usual.step ? job->usual : correction(&rule, step);
    const void *g = element(job, 0, i, at), *v = element(job, 3, i, at);
    rule.scale = scale;
    *job->sum += job->doubles ? ratios_double(g, v, n, &rule, own.root) : ratios_float(g, v, n, &rule, own.root);
}

/* As squares_of_parts; job->sum is where the first block adds up. */
static void ratios_of_parts(int64_t begin, int64_t end, void *context)
{
    Job job = *(const Job *)context;
    const int64_t first = part_begin(job.all, job.parts, begin), last = part_begin(job.all, job.parts, end);
    int64_t tensor_begin = 0;
    for (int64_t i = 0; i < job.count; tensor_begin += job.sizes[i++])
        for (int64_t at = 0; at < job.sizes[i]; at += BLOCK, job.sum++)
            if (first <= tensor_begin + at && tensor_begin + at < last)
                update_range(&job, i, at, least(at + BLOCK, job.sizes[i]));
}

/* The root of the mean of (c g)^2/max(v, eps^2) in each tensor, where v is the corrected second moment after the step of
   AdamW that would follow. 1 if there is no memory for the sums. */
int curvestep_rms_of_ratios(void *const *lists, const int64_t *sizes, int64_t count, int doubles, int threads,
                            int num_lists, const AdamRule *rule, void *const *steps, int steps_are_doubles,
                            const Units *units, double *rms)
{
    int64_t blocks = 0, number = 0;
    for (int64_t i = 0; i < count; i++)
        blocks += (sizes[i] + BLOCK - 1) / BLOCK;
    double *sums = calloc(blocks + 1, sizeof(double));
    if (!sums)
        return 1;
    Job job = {.lists = lists, .sizes = sizes, .count = count, .doubles = doubles, .num_lists = num_lists,
               .rule = rule, .units = units, .block = ratios_block, .steps = steps,
               .steps_are_doubles = steps_are_doubles, .sum = sums, .all = sum_of(sizes, count)};
    job.parts = num_parts(job.all, threads);
    if (count)
        job.usual = correction(rule, step_of(&job, 0));
    clip_by_bounds(&job);
    on_threads(job.parts, ratios_of_parts, &job);
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int64_t at = 0; at < sizes[i]; at += BLOCK)
            sum += sums[number++];
        rms[i] = sizes[i] ? sqrt(sum / sizes[i]) : 0;
    }
    free(sums);
    return 0;
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

/* Of Python's stable interface; the first gives a borrowed reference, the second a new one. */
extern void *PyList_GetItem(void *list, ptrdiff_t index);
extern void *PyObject_Type(void *object);
extern void Py_DecRef(void *object);

enum { CPU = 1, FLOATING = 2 }; /* codes of DLPack */

static int64_t size_of(const Description *t)
{
    int64_t size = 1;
    for (int d = 0; d < t->dimensions; d++)
        size *= t->shape[d];
    return size;
}

/* Whether some order of the dimensions makes the tensor contiguous: no gaps and no overlaps. */
static int is_non_overlapping_and_dense(const Description *t, int64_t size)
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

static int same_layout(const Description *t, const Description *other, int64_t size)
{
    if (t->dimensions != other->dimensions || t->device != other->device || t->kind != other->kind ||
        t->bits != other->bits || !t->strides != !other->strides)
        return 0;
    for (int d = 0; d < t->dimensions; d++)
        if (t->shape[d] != other->shape[d] ||
            (t->strides && size > 0 && t->shape[d] > 1 && t->strides[d] != other->strides[d]))
            return 0;
    return 1;
}

/* Describe an object of a list that is of one of the two types; not 0 if it is of another or cannot be described. */
static int describe_plain(Describe describe, void *const *types, void *list, int64_t index, Description *out)
{
    void *object = PyList_GetItem(list, index), *type = PyObject_Type(object);
    Py_DecRef(type); /* which lives on, as that of the object */
    return (type != types[0] && type != types[1]) || describe(object, out);
}

/* How many units a tensor has, each so many elements in a row: its first dimension, 1 for a vector or a number, and 0 for
   a tensor whose units lie between each other. */
static int64_t units_of(const Description *t, int64_t size)
{
    if (t->dimensions < 2 || size == 0)
        return 1;
    return !t->strides || t->shape[0] == 1 || t->strides[0] * t->shape[0] == size ? t->shape[0] : 0;
}

/* Addresses and sizes of the tensors in a list, where their units start (and at last how many there are, -1 if those of
   some tensor lie between each other), and addresses of those in the other lists, which follow. 0: all are
   of the two types, float32 on CPU, non-overlapping and dense, those of the other lists have the layout of those of
   the first, and there is memory behind all (not behind torch's tensors of zeros). 1: the same for float64. 2 more if
   some tensor has a single element. -1: not so. */
int curvestep_view_plain(Describe describe, void *const *types, void *const *lists, int64_t num_lists, int64_t count,
                         void **addresses, int64_t *sizes, int64_t *starts)
{
    int bits = 32, single = 0, apart = 1;
    starts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        Description t, other;
        if (describe_plain(describe, types, lists[0], i, &t))
            return -1;
        if (i == 0)
            bits = t.bits;
        sizes[i] = size_of(&t);
        starts[i + 1] = starts[i] + units_of(&t, sizes[i]);
        apart &= starts[i + 1] > starts[i];
        single |= sizes[i] == 1;
        if (t.device != CPU || t.kind != FLOATING || t.bits != bits || t.lanes != 1 ||
            !is_non_overlapping_and_dense(&t, sizes[i]) || (sizes[i] > 0 && !t.data))
            return -1;
        addresses[i] = (char *)t.data + t.offset;
        for (int64_t k = 1; k < num_lists; k++) {
            if (describe_plain(describe, types, lists[k], i, &other) || !same_layout(&other, &t, sizes[i]) ||
                (sizes[i] > 0 && !other.data))
                return -1;
            addresses[k * count + i] = (char *)other.data + other.offset;
        }
    }
    if (!apart)
        starts[count] = -1;
    return bits == 32 ? 2 * single : bits == 64 ? 2 * single + 1 : -1;
}

#else /* The passes over one block of memory, for one type: REAL is float or double, NAMED(f) is f_float or f_double. */

typedef REAL NAMED(Lanes) __attribute__((vector_size(16 * sizeof(REAL)), aligned(sizeof(REAL))));
typedef double NAMED(Sums) __attribute__((vector_size(16 * sizeof(double))));
typedef __typeof__((NAMED(Lanes)){0} < 0) NAMED(Bits);

/* Sums of the squares of x, or of x - y where y is not 0: the compiler makes two functions of each. */
ALWAYS_INLINE double NAMED(squares_in_double)(const REAL *x, const REAL *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = y ? (double)x[i] - y[i] : x[i];
        sum += d * d;
    }
    return sum;
}

ALWAYS_INLINE NAMED(Lanes) NAMED(lanes)(const REAL *x, const REAL *y, int64_t at)
{
    const NAMED(Lanes) v = *(const NAMED(Lanes) *)(x + at);
    return y ? v - *(const NAMED(Lanes) *)(y + at) : v;
}

/* Four quarters of the block are read at once: one stream of reads alone does not fill the memory bus. Squares are
   added as REAL over a row of ROW in each quarter, the rows as double. A square may overflow or vanish; then the sum is
   so large or so small that the caller takes another way. */
ALWAYS_INLINE double NAMED(squares_of)(const REAL *x, const REAL *y, int64_t n)
{
    const int64_t quarter = n / 64 * 16;
    double total = NAMED(squares_in_double)(x + 4 * quarter, y ? y + 4 * quarter : 0, n - 4 * quarter);
    NAMED(Sums) sums = {0};
    for (int64_t row = 0; row < quarter; row += ROW) {
        const int64_t end = quarter - row < ROW ? quarter : row + ROW;
        NAMED(Lanes) sum_of[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = row; i < end; i += 16)
            for (int part = 0; part < 4; part++) {
                const NAMED(Lanes) v = NAMED(lanes)(x, y, part * quarter + i);
                sum_of[part] += v * v;
            }
        sums += __builtin_convertvector((sum_of[0] + sum_of[1]) + (sum_of[2] + sum_of[3]), NAMED(Sums));
    }
    for (int k = 0; k < 4; k++)
        total += (sums[k] + sums[k + 4]) + (sums[k + 8] + sums[k + 12]);
    return total;
}

/* The last elements of x from `from` on, at most sixteen, and zeros: read together with those before them, if there are
   as many, because one after the other they would take as long as hundreds. */
ALWAYS_INLINE NAMED(Lanes) NAMED(last_lanes)(const REAL *x, int64_t from, int64_t n)
{
    const NAMED(Lanes) number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NAMED(Lanes) last = {0};
    if (n >= 16)
        return (NAMED(Lanes))((NAMED(Bits)) * (const NAMED(Lanes) *)(x + n - 16) & (number >= (REAL)(16 - (n - from))));
    for (int64_t i = from; i < n; i++)
        last[i - from] = x[i];
    return last;
}

/* The squares of at most SHORT elements, added as REAL in sixteen sums: as many in each as of a row above. */
ALWAYS_INLINE double NAMED(squares_of_unit)(const REAL *x, int64_t n)
{
    NAMED(Lanes) a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 32 < n; i += 32) {
        const NAMED(Lanes) v = *(const NAMED(Lanes) *)(x + i), w = *(const NAMED(Lanes) *)(x + i + 16);
        a += v * v;
        b += w * w;
    }
    if (i + 16 < n) {
        const NAMED(Lanes) v = *(const NAMED(Lanes) *)(x + i);
        a += v * v;
        i += 16;
    }
    const NAMED(Lanes) last = NAMED(last_lanes)(x, i, n);
    b += last * last;
    a += b;
    REAL sums[16];
    __builtin_memcpy(sums, &a, sizeof sums);
    for (int k = 0; k < 8; k++)
        sums[k] += sums[k + 8];
    for (int k = 0; k < 4; k++)
        sums[k] += sums[k + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

FOR_EACH_WIDTH
static void NAMED(squares_short)(const REAL *x, int64_t unit, int64_t from, int64_t to, double *sums)
{
    for (int64_t k = from; k < to; k++)
        sums[k] = NAMED(squares_of_unit)(x + k * unit, unit);
}

FOR_EACH_WIDTH
static double NAMED(squares)(const REAL *x, int64_t n) { return NAMED(squares_of)(x, 0, n); }

FOR_EACH_WIDTH
static double NAMED(squares_apart)(const REAL *x, const REAL *y, int64_t n) { return NAMED(squares_of)(x, y, n); }

/* d = c g + w p,  b <- mu b + k d,  p <- p - lr (b, or d + mu b), of which the common cases skip what is zero. */
FOR_EACH_CPU
static void NAMED(update)(REAL *restrict p, const REAL *restrict g, REAL *restrict b, int64_t n, const Rule *rule)
{
    const REAL c = rule->scale, w = rule->weight_decay, mu = rule->momentum, k = rule->undamped, lr = rule->lr;
    const REAL lr_c = rule->lr * rule->scale, k_c = rule->undamped * rule->scale;
    if (!b && w == 0)
        for (int64_t i = 0; i < n; i++)
            p[i] -= lr_c * g[i];
    else if (!b)
        for (int64_t i = 0; i < n; i++)
            p[i] -= lr * (c * g[i] + w * p[i]);
    else if (rule->nesterov)
        for (int64_t i = 0; i < n; i++) {
            const REAL d = w == 0 ? c * g[i] : c * g[i] + w * p[i];
            b[i] = mu * b[i] + k * d;
            p[i] -= lr * (d + mu * b[i]);
        }
    else if (w == 0)
        for (int64_t i = 0; i < n; i++) {
            b[i] = mu * b[i] + k_c * g[i];
            p[i] -= lr * b[i];
        }
    else
        for (int64_t i = 0; i < n; i++) {
            b[i] = mu * b[i] + k * (c * g[i] + w * p[i]);
            p[i] -= lr * b[i];
        }
}

/* The sum of d^2/max(v, eps^2) with d = c g and v the corrected second moment that comes next; added as REAL in
   sixteen sums over rows of ROW, the rows as double. */
FOR_EACH_CPU
static double NAMED(ratios)(const REAL *g, const REAL *v, int64_t n, const AdamRule *rule, double root)
{
    const REAL c = rule->scale, b2 = rule->beta2, k2 = 1 - rule->beta2, r = 1 / (root * root);
    const REAL least_square = rule->eps * rule->eps > 0 ? rule->eps * rule->eps : 1e-37;
    double total = 0;
    for (int64_t row = 0; row < n; row += ROW) {
        const int64_t end = n - row < ROW ? n : row + ROW;
        REAL sums[16] = {0};
        int64_t i = row;
        for (; i + 16 <= end; i += 16)
            for (int k = 0; k < 16; k++) {
                const REAL d = c * g[i + k], next = (b2 * v[i + k] + k2 * (d * d)) * r;
                sums[k] += d * d / (next > least_square ? next : least_square);
            }
        for (int k = 0; i < end; i++, k++) {
            const REAL d = c * g[i], next = (b2 * v[i] + k2 * (d * d)) * r;
            sums[k] += d * d / (next > least_square ? next : least_square);
        }
        for (int k = 0; k < 16; k++)
            total += sums[k];
    }
    return total;
}

/* m <- b1 m + (1 - b1) c g,  v <- b2 v + (1 - b2) (c g)^2,  p <- (1 - lr w) p - size m/(sqrt(v)/root + eps), where
   size and root hold the corrections for the first steps. With amsgrad x is the largest v so far, and used for v. */
FOR_EACH_CPU
static void NAMED(adamw)(REAL *restrict p, const REAL *restrict g, REAL *restrict m, REAL *restrict v, REAL *restrict x,
                         int64_t n, const AdamRule *rule, double size, double root)
{
    const REAL c = rule->scale, b1 = rule->beta1, b2 = rule->beta2, k1 = 1 - rule->beta1, k2 = 1 - rule->beta2;
    const REAL keep = 1 - rule->lr * rule->weight_decay, h = size, r = 1 / root, eps = rule->eps;
    if (x)
        for (int64_t i = 0; i < n; i++) {
            const REAL d = c * g[i];
            m[i] = b1 * m[i] + k1 * d;
            v[i] = b2 * v[i] + k2 * (d * d);
            x[i] = x[i] > v[i] ? x[i] : v[i];
            p[i] = keep * p[i] - h * m[i] / (SQRT(x[i]) * r + eps);
        }
    else
        for (int64_t i = 0; i < n; i++) {
            const REAL d = c * g[i];
            m[i] = b1 * m[i] + k1 * d;
            v[i] = b2 * v[i] + k2 * (d * d);
            p[i] = keep * p[i] - h * m[i] / (SQRT(v[i]) * r + eps);
        }
}

#endif
