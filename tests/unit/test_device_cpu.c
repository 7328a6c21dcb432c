/* test_device_cpu - properties that every kernel keeps when run through the host as a device, in the worlds
 * of device_world.h. */
#include "kernels/combine.h"
#include "kernels/ref.h"
#include "runtime/device.h"
#include "tests/unit/device_world.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct moe_device *cpu;

/* One call through the device. */
static void run(const struct call *c, const struct shape *s, enum moe_type type, void *const data[],
                void *const out[], int accumulating)
{
    struct moe_op op;
    struct moe_launch launch;
    make_launch(c, s, type, data, data, out, accumulating, &op, &launch);
    assert_int_equal(moe_device_cpu.run(cpu, &launch, MOE_STREAM_COMPUTE), MOE_OK);
}

/* ---- properties of every kernel ---- */

/* Calls check(call, shape, world, type) for all of them, in both types. */
static void for_all(void (*check)(const struct call *, const struct shape *, void *[], enum moe_type))
{
    for (enum moe_type type = MOE_F32; type <= MOE_F64; type++)
        for (const struct shape *s = shapes; s < shapes + LENGTH(shapes); s++) {
            void *data[TENSOR_COUNT];
            make_world(s, type, data);
            for (const struct call *c = calls; c < calls + LENGTH(calls); c++) check(c, s, data, type);
            free_all(TENSOR_COUNT, data);
        }
}

static void must_be_close(const struct call *c, const struct shape *s, int write, int64_t element, double got,
                          double expected, double tolerance)
{
    if (fabs(got - expected) <= tolerance * fmax(1, fabs(expected))) return;
    fail_msg("%s (call %d, shape %d) write %d element %d: %.17g, expected %.17g", moe_kernel_text[c->kernel],
             (int)(c - calls), (int)(s - shapes), write, (int)element, got, expected);
}

/* The scalar whose gradient a backward call computes: sum of gradient * output over the outputs of `f` that
 * have a gradient. */
static double objective(const struct call *f, const struct shape *s, void *data[])
{
    void *out[MOE_REFS];
    double sum = 0;
    make_outputs(f, s, MOE_F64, 0, out);
    run(f, s, MOE_F64, data, out, -1);
    for (int i = 0; f->out[i]; i++) {
        const double *weight = data[gradient_of[f->out[i]]];
        for (int64_t j = 0; gradient_of[f->out[i]] && j < elements(f->out[i], s); j++)
            sum += weight[j] * ((double *)out[i])[j];
    }
    free_all(MOE_REFS, out);
    return sum;
}

/* Central differences with h = 1e-5: truncation h^2 and rounding 1e-16 / h are both far below 1e-7. */
static void check_gradient(const struct call *c, const struct shape *s, void *data[], enum moe_type type)
{
    const struct call *f = c - c->back;
    void *out[MOE_REFS];
    if (type != MOE_F64) return;
    make_outputs(c, s, type, 0xff, out);
    run(c, s, type, data, out, -1);
    for (int r = 0; f->in[r]; r++)
        for (int w = 0; c->out[w]; w++) {
            if (gradient_of[f->in[r]] != c->out[w]) continue;
            double *x = data[f->in[r]], h = 1e-5;
            for (int64_t j = 0; j < elements(f->in[r], s); j++) {
                double kept = x[j];
                x[j] = kept + h;
                double above = objective(f, s, data);
                x[j] = kept - h;
                double below = objective(f, s, data);
                x[j] = kept;
                must_be_close(c, s, w, j, ((double *)out[w])[j], (above - below) / (2 * h), 1e-7);
            }
        }
    free_all(MOE_REFS, out);
}

static void test_gradients(void **state)
{
    (void)state;
    for_all(check_gradient);
    /* The table itself: every output that is a gradient was compared with something. */
    for (const struct call *c = calls; c < calls + LENGTH(calls); c++)
        for (int w = 0; c->back && c->out[w]; w++) {
            int found = 0;
            for (const enum tensor *in = c[-c->back].in; *in; in++) found += gradient_of[*in] == c->out[w];
            assert_int_equal(found, 1);
        }
}

static void check_float(const struct call *c, const struct shape *s, void *data[], enum moe_type type)
{
    void *narrow[TENSOR_COUNT], *out[MOE_REFS], *narrow_out[MOE_REFS];
    if (type != MOE_F64) return;
    make_world(s, MOE_F32, narrow);
    make_outputs(c, s, MOE_F64, 0xff, out);
    make_outputs(c, s, MOE_F32, 0xff, narrow_out);
    run(c, s, MOE_F64, data, out, -1);
    run(c, s, MOE_F32, narrow, narrow_out, -1);
    for (int w = 0; c->out[w]; w++)
        if (is_integer(c->out[w]))
            assert_memory_equal(out[w], narrow_out[w], tensor_bytes(c->out[w], s, MOE_F64));
        else
            for (int64_t j = 0; j < elements(c->out[w], s); j++)
                must_be_close(c, s, w, j, get(narrow_out[w], type_of(c->out[w], MOE_F32), j),
                              get(out[w], MOE_F64, j), 1e-5);
    free_all(TENSOR_COUNT, narrow);
    free_all(MOE_REFS, out);
    free_all(MOE_REFS, narrow_out);
}

static void test_float_against_double(void **state)
{
    (void)state;
    for_all(check_float);
}

/* What combine.h says of adding rows to a bf16 output, in order of the choices; as floats. */
static void combine_rounded(const struct shape *s, void *const half[], void *const wide[], float *y)
{
    int64_t n = s->T * s->K;
    float *weight = moe_alloc((size_t)n, sizeof *weight);
    int32_t *arrival = moe_alloc((size_t)n, sizeof *arrival);
    moe_bf16 *sum = moe_alloc((size_t)(s->T * s->H), sizeof *sum);
    moe_ref_take_f32(s->T, s->E, s->K, wide[PROB], wide[KEPT_EXPERT], weight);
    for (int32_t i = 0; i < n; i++) arrival[i] = i;
    const struct moe_combine c = {s->T, s->H, s->K, PADDED(s), wide[KEPT_SLOT], arrival, weight, 1};
    moe_combine_scatter_bf16(&c, half[SENT], sum, false);
    for (int64_t i = 0; i < s->T * s->H; i++) y[i] = moe_bf16_to_float(sum[i]);
    free(weight), free(arrival), free(sum);
}

/* In bf16 the result is that of float, rounded, whether it replaces 1/2 or adds to it; or that of
 * frameworks. */
static void check_bf16(const struct call *c, const struct shape *s, void *data[], enum moe_type type)
{
    void *half[TENSOR_COUNT], *wide[TENSOR_COUNT], *out[MOE_REFS], *wide_out[MOE_REFS];
    if (type != MOE_F32) return;
    round_world(s, data, half, wide);
    for (int a = -1; a < 2; a++) {
        if (a >= 0 && !(c->add >> a & 1)) continue;
        make_outputs(c, s, MOE_BF16, 0x3f, out); /* 0x3f3f is 0.74609375 */
        make_outputs(c, s, MOE_F32, 0, wide_out);
        for (int w = 0; c->out[w]; w++)
            for (int64_t j = 0; !fixed_type[c->out[w]] && j < elements(c->out[w], s); j++)
                ((float *)wide_out[w])[j] = 0.74609375F;
        for (int w = 0; c->out[w]; w++) /* a norm is added to in float64 */
            if (fixed_type[c->out[w]]) memset(out[w], 0, tensor_bytes(c->out[w], s, MOE_BF16));
        run(c, s, MOE_BF16, half, out, a);
        if (c->kernel == MOE_K_COMBINE)
            combine_rounded(s, half, wide, wide_out[0]);
        else
            run(c, s, MOE_F32, wide, wide_out, a);
        for (int w = 0; c->out[w]; w++)
            for (int64_t j = 0; j < elements(c->out[w], s); j++)
                if (fixed_type[c->out[w]])
                    assert_memory_equal(out[w], wide_out[w], tensor_bytes(c->out[w], s, MOE_F32));
                else if (((moe_bf16 *)out[w])[j] != moe_bf16_from_float(((float *)wide_out[w])[j]))
                    fail_msg("%s (shape %d): write %d element %d is not rounded float",
                             moe_kernel_text[c->kernel], (int)(s - shapes), w, (int)j);
        free_all(MOE_REFS, out);
        free_all(MOE_REFS, wide_out);
    }
    free_all(TENSOR_COUNT, half);
    free_all(TENSOR_COUNT, wide);
}

static void test_bf16_against_float(void **state)
{
    (void)state;
    for_all(check_bf16);
}

/* What was in an output before does not matter, not even NaN: every element is replaced. */
static void check_replace(const struct call *c, const struct shape *s, void *data[], enum moe_type type)
{
    void *one[MOE_REFS], *other[MOE_REFS];
    make_outputs(c, s, type, 0x3e, one);
    make_outputs(c, s, type, 0xff, other);
    run(c, s, type, data, one, -1);
    run(c, s, type, data, other, -1);
    for (int w = 0; c->out[w]; w++)
        if (memcmp(one[w], other[w], tensor_bytes(c->out[w], s, type)))
            fail_msg("%s (shape %d): write %d depends on what was there", moe_kernel_text[c->kernel],
                     (int)(s - shapes), w);
    free_all(MOE_REFS, one);
    free_all(MOE_REFS, other);
}

static void test_replace(void **state)
{
    (void)state;
    for_all(check_replace);
}

/* Adding to 0.5 gives 0.5 more than replacing; the other outputs are replaced as before. */
static void check_add(const struct call *c, const struct shape *s, void *data[], enum moe_type type, int to)
{
    void *fresh[MOE_REFS], *added[MOE_REFS];
    make_outputs(c, s, type, 0xff, fresh);
    make_outputs(c, s, type, 0xff, added);
    for (int64_t j = 0; j < elements(c->out[to], s); j++) set(added[to], type_of(c->out[to], type), j, 0.5);
    run(c, s, type, data, fresh, -1);
    run(c, s, type, data, added, to);
    for (int w = 0; c->out[w]; w++) {
        enum moe_type t = type_of(c->out[w], type);
        for (int64_t j = 0; j < elements(c->out[w], s); j++)
            must_be_close(c, s, w, j, get(added[w], t, j), get(fresh[w], t, j) + (w == to ? 0.5 : 0),
                          type == MOE_F64 ? 1e-14 : 1e-6);
    }
    free_all(MOE_REFS, fresh);
    free_all(MOE_REFS, added);
}

static void check_accumulate(const struct call *c, const struct shape *s, void *data[], enum moe_type type)
{
    for (int w = 0; c->out[w]; w++)
        if (c->add >> w & 1) check_add(c, s, data, type, w);
}

static void test_accumulate(void **state)
{
    (void)state;
    for_all(check_accumulate);
}

/* Runs the call in a child, since it must abort. */
static void must_abort(const struct call *c, const struct shape *s, void *const data[], int accumulating)
{
    void *out[MOE_REFS];
    make_outputs(c, s, MOE_F64, 0, out);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(1);
        run(c, s, MOE_F64, data, out, accumulating);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
        fail_msg("%s with %d accumulating did not abort", moe_kernel_text[c->kernel], accumulating);
    free_all(MOE_REFS, out);
}

static void test_bugs_abort(void **state)
{
    (void)state;
    const struct shape *s = &shapes[0];
    void *data[TENSOR_COUNT];
    make_world(s, MOE_F64, data);
    for (const struct call *c = calls; c < calls + LENGTH(calls); c++) {
        for (int w = 0; c->out[w]; w++) /* a write that cannot accumulate */
            if (!(c->add >> w & 1)) must_abort(c, s, data, w);
        for (int r = 0; c->in[r]; r++) { /* an index out of range at the end of the tensor */
            const int64_t bad[] = {-2, INT32_MAX};
            if (!is_integer(c->in[r]) || c->free >> r & 1) continue;
            size_t size = (size_t)moe_type_bytes[fixed_type[c->in[r]]];
            size_t bytes = tensor_bytes(c->in[r], s, MOE_F64);
            char *at = (char *)data[c->in[r]] + bytes - size, kept[8];
            memcpy(kept, at, size);
            for (int i = 0; i < LENGTH(bad); i++) {
                memcpy(at, &bad[i], size);
                must_abort(c, s, data, -1);
            }
            memcpy(at, kept, size);
        }
        struct shape too_many = *s; /* more choices than experts */
        too_many.K = s->E + 1;
        if (c->kernel == MOE_K_TOPK) must_abort(c, &too_many, data, -1);
    }
    free_all(TENSOR_COUNT, data);
}

static int open_cpu(void **state)
{
    (void)state;
    return moe_device_cpu.open(&cpu);
}

static int close_cpu(void **state)
{
    (void)state;
    moe_device_cpu.close(NULL);
    moe_device_cpu.close(cpu);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),          cmocka_unit_test(test_float_against_double),
        cmocka_unit_test(test_bf16_against_float), cmocka_unit_test(test_replace),
        cmocka_unit_test(test_accumulate),         cmocka_unit_test(test_bugs_abort),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
