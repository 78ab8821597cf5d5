/* The two passes over one block of memory, for one type: REAL is float or double, NAMED(f) is f_float or f_double. */

typedef REAL NAMED(Lanes) __attribute__((vector_size(16 * sizeof(REAL)), aligned(sizeof(REAL))));

static double NAMED(squares_in_double)(const REAL *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

/* Sum of the squares of a block. Four quarters are read at once: one stream of reads alone does not fill the memory
   bus. Squares are added as REAL over a row of ROW in each quarter, the rows as double; a row whose sum is so large or
   so small that a square may have overflowed or vanished is added again as double. */
FOR_EACH_CPU
static double NAMED(squares)(const REAL *x, int64_t n)
{
    const int64_t quarter = n / 64 * 16;
    double total = NAMED(squares_in_double)(x + 4 * quarter, n - 4 * quarter);
    for (int64_t row = 0; row < quarter; row += ROW) {
        const int64_t length = quarter - row < ROW ? quarter - row : ROW;
        const REAL *a = x + row, *b = a + quarter, *c = b + quarter, *d = c + quarter;
        NAMED(Lanes) sa = {0}, sb = {0}, sc = {0}, sd = {0};
        for (int64_t i = 0; i < length; i += 16) {
            const NAMED(Lanes) va = *(const NAMED(Lanes) *)(a + i), vb = *(const NAMED(Lanes) *)(b + i);
            const NAMED(Lanes) vc = *(const NAMED(Lanes) *)(c + i), vd = *(const NAMED(Lanes) *)(d + i);
            sa += va * va;
            sb += vb * vb;
            sc += vc * vc;
            sd += vd * vd;
        }
        sa = (sa + sb) + (sc + sd);
        REAL sum = 0;
        for (int k = 0; k < 16; k++)
            sum += sa[k];
        if (sum > (REAL)1e-28 && sum < (REAL)1e30)
            total += sum;
        else
            total += NAMED(squares_in_double)(a, length) + NAMED(squares_in_double)(b, length) +
                     NAMED(squares_in_double)(c, length) + NAMED(squares_in_double)(d, length);
    }
    return total;
}

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
