/* ref_limit.c - see ref.h: what capacity rules do. Compiled once per real type, like ref.c. */
#include "kernels/ref_internal.h"

void MOE_REAL(moe_ref_largest)(int64_t E, const int64_t *counts, int64_t *largest)
{
    *largest = 0;
    for (int64_t e = 0; e < E; e++)
        if (counts[e] > *largest) *largest = counts[e];
}

void MOE_REAL(moe_ref_set)(int64_t value, int64_t *y)
{
    *y = value;
}

/* What choices are ordered by. */
struct order {
    enum moe_ref_order by;
    uint64_t seed;
    int64_t E, K, e;
    const moe_real *prob;
};

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
    x = (x ^ x >> 27) * 0x94d049bb133111ebU;
    return x ^ x >> 31;
}

/* Does choice i come before choice j, which stands before it in memory? */
static bool precedes(const struct order *o, int64_t i, int64_t j)
{
    switch (o->by) {
    case MOE_REF_BY_PROB: return o->prob[i / o->K * o->E + o->e] > o->prob[j / o->K * o->E + o->e];
    case MOE_REF_BY_CHOICE: return i % o->K < j % o->K;
    case MOE_REF_RANDOM: return hash(o->seed + (uint64_t)(i / o->K)) > hash(o->seed + (uint64_t)(j / o->K));
    default: return false;
    }
}

/* Of the choices first .. end - 1 those of expert o->e, and of these the first C in order stay; inserting
 * with a strict comparison gives ties to the earlier token, and C of them even when prob holds NaN. list:
 * room for all of them. */
static void keep(int64_t first, int64_t end, int64_t C, const struct order *o, const int32_t *expert,
                 int32_t *list, int32_t *kept_expert)
{
    int64_t n = 0;
    for (int64_t i = first; i < end; i++) {
        if (expert[i] != o->e) continue;
        int64_t at = n++;
        for (; at > 0 && precedes(o, i, list[at - 1]); at--) list[at] = list[at - 1];
        list[at] = (int32_t)i;
    }
    for (int64_t at = 0; at < n; at++) kept_expert[list[at]] = at < C ? (int32_t)o->e : -1;
}

/* slot holds the lists of `keep` until the rows are numbered. */
void MOE_REAL(moe_ref_limit)(int64_t T, int64_t E, int64_t K, int64_t C, int64_t G, enum moe_ref_order order,
                             bool pad, uint64_t seed, const moe_real *prob, const int32_t *expert,
                             int32_t *slot, int32_t *kept_expert, int64_t *kept, int64_t *arrive)
{
    int64_t n_groups = T > G ? (T + G - 1) / G : 1, n = T * K, row = 0;
    for (int64_t i = 0; i < n; i++) checked(expert[i], E);
    for (int64_t first = 0; first < n; first += G * K)
        for (int64_t e = 0; e < E; e++) {
            const struct order o = {order, seed, E, K, e, prob};
            keep(first, least(first + G * K, n), C, &o, expert, slot, kept_expert);
        }
    for (int64_t i = 0; i < n; i++) slot[i] = -1;
    for (int64_t e = 0; e < E; e++) {
        int64_t before = row;
        for (int64_t g = 0; g < n_groups; g++) {
            if (pad) row = (e * n_groups + g) * C;
            row = number(g * G * K, least((g + 1) * G * K, n), e, kept_expert, row, slot);
        }
        kept[e] = pad ? C * n_groups : row - before;
        if (pad) arrive[e] = kept[e];
    }
}

/* The sum that a token's probabilities are divided by; false: it is the least one, which does not vary. */
static bool share(int64_t E, int64_t K, const moe_real *prob, const int32_t *expert, double *sum)
{
    static const double least_sum = 1.1920928955078125e-7; /* 2^-23 */
    *sum = 0;
    for (int64_t k = 0; k < K; k++)
        if (expert[k] != -1) *sum += prob[checked(expert[k], E)];
    bool varies = *sum > least_sum;
    if (!varies) *sum = least_sum;
    return varies;
}

void MOE_REAL(moe_ref_normalize)(int64_t T, int64_t E, int64_t K, const moe_real *prob, const int32_t *expert,
                                 moe_real *gate)
{
    clear(T * E, gate);
    for (int64_t t = 0; t < T; t++) {
        double sum;
        share(E, K, prob + t * E, expert + t * K, &sum);
        for (int64_t k = t * K; k < (t + 1) * K; k++)
            if (expert[k] != -1) gate[t * E + expert[k]] = (moe_real)(prob[t * E + expert[k]] / sum);
    }
}

void MOE_REAL(moe_ref_normalize_bwd)(int64_t T, int64_t E, int64_t K, const moe_real *prob,
                                     const int32_t *expert, const moe_real *dgate, moe_real *dprob, bool add)
{
    if (!add) clear(T * E, dprob);
    for (int64_t t = 0; t < T; t++) {
        double sum, mean = 0;
        bool varies = share(E, K, prob + t * E, expert + t * K, &sum);
        for (int64_t k = t * K; k < (t + 1) * K && varies; k++)
            if (expert[k] != -1) mean += dgate[t * E + expert[k]] * (double)prob[t * E + expert[k]] / sum;
        for (int64_t k = t * K; k < (t + 1) * K; k++)
            if (expert[k] != -1)
                put(&dprob[t * E + expert[k]], (dgate[t * E + expert[k]] - mean) / sum, true);
    }
}
