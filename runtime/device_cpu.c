/* device_cpu.c - see device.h. Everything is complete when a call returns, so streams have nothing to do. */
#include "runtime/cpu_kernels.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct cpu {
    struct moe_device base;
    struct moe_kernel_shape *shapes; /* for bf16 */
    int64_t *marks_ns;
    int n_marks;
};

/* One thread a rank: ranks of a host share its cores, and threads would make sums depend on their number. */
static int cpu_open(struct moe_device **out)
{
    struct cpu *c = moe_alloc(1, sizeof *c);
    c->base.table = &moe_device_cpu;
    c->shapes = moe_kernel_shapes();
    openblas_set_num_threads(1);
    *out = &c->base;
    return MOE_OK;
}

static void cpu_close(struct moe_device *d)
{
    if (!d) return;
    free(((struct cpu *)d)->shapes);
    free(((struct cpu *)d)->marks_ns);
    free(d);
}

static int cpu_alloc(struct moe_device *d, size_t bytes, void **out)
{
    (void)d;
    if (posix_memalign(out, 64, bytes ? bytes : 1))
        return moe_fail(MOE_EFAILED, "no memory for a buffer of %zu bytes", bytes);
    return MOE_OK;
}

static void cpu_free(struct moe_device *d, void *p)
{
    (void)d;
    free(p);
}

static int cpu_copy(struct moe_device *d, void *to, const void *from, size_t bytes, int stream)
{
    (void)d, (void)stream;
    if (bytes) memcpy(to, from, bytes);
    return MOE_OK;
}

static int cpu_run(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    (void)stream;
    switch (launch->op->type) {
    case MOE_F64: moe_cpu_run_f64(launch); break;
    case MOE_BF16: moe_cpu_run_bf16(((struct cpu *)d)->shapes, launch); break;
    default: moe_cpu_run_f32(launch); /* kernels of integers alone are the same in both */
    }
    return MOE_OK;
}

static int cpu_sync(struct moe_device *d, int stream)
{
    (void)d, (void)stream;
    return MOE_OK;
}

static int cpu_mark(struct moe_device *d, int stream, int slot)
{
    (void)stream;
    struct cpu *c = (struct cpu *)d;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    c->marks_ns = moe_grow(c->marks_ns, &c->n_marks, slot + 1, sizeof *c->marks_ns);
    c->marks_ns[slot] = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    return MOE_OK;
}

static int cpu_elapsed(struct moe_device *d, int from_slot, int to_slot, int64_t *ns)
{
    const struct cpu *c = (const struct cpu *)d;
    moe_assert(from_slot >= 0 && from_slot < c->n_marks && to_slot >= 0 && to_slot < c->n_marks);
    *ns = c->marks_ns[to_slot] - c->marks_ns[from_slot];
    return MOE_OK;
}

const struct moe_device_table moe_device_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .run = cpu_run,
    .sync = cpu_sync,
    .mark = cpu_mark,
    .elapsed = cpu_elapsed,
};
