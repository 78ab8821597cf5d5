/* The passes over one block of memory, for one type: REAL is float or double, NAMED(f) is f_float or f_double. */

typedef REAL NAMED(Lanes) __attribute__((vector_size(16 * sizeof(REAL)), aligned(sizeof(REAL))));

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
   added as REAL over a row of ROW in each quarter, the rows as double; a row whose sum is so large or so small that a
   square may have overflowed or vanished is added again as double. */
ALWAYS_INLINE double NAMED(squares_of)(const REAL *x, const REAL *y, int64_t n)
{
    const int64_t quarter = n / 64 * 16;
    double total = NAMED(squares_in_double)(x + 4 * quarter, y ? y + 4 * quarter : 0, n - 4 * quarter);
    for (int64_t row = 0; row < quarter; row += ROW) {
        const int64_t end = quarter - row < ROW ? quarter : row + ROW;
        NAMED(Lanes) sum_of[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = row; i < end; i += 16)
            for (int part = 0; part < 4; part++) {
                const NAMED(Lanes) v = NAMED(lanes)(x, y, part * quarter + i);
                sum_of[part] += v * v;
            }
        const NAMED(Lanes) lanes = (sum_of[0] + sum_of[1]) + (sum_of[2] + sum_of[3]);
        REAL sum = 0;
        for (int k = 0; k < 16; k++)
            sum += lanes[k];
        if (sum > (REAL)1e-28 && sum < (REAL)1e30)
            total += sum;
        else
            for (int part = 0; part < 4; part++) {
                const int64_t at = part * quarter + row;
                total += NAMED(squares_in_double)(x + at, y ? y + at : 0, end - row);
            }
    }
    return total;
}

FOR_EACH_CPU
static double NAMED(squares)(const REAL *x, int64_t n) { return NAMED(squares_of)(x, 0, n); }

FOR_EACH_CPU
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
