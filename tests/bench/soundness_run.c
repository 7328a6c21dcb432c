/* soundness_run.c - see soundness.h.
 *
 * A wrong schedule may do anything: hang, make the library fail, read and write where it has no business. So
 * that many can be tried in one job, each runs on a communicator that is never used again after a failure,
 * in memory that ends where its buffers end, with signals caught. The step is left by a long jump: what it
 * held is not released. */
#include "tests/bench/soundness.h"

#include "tests/mpi/parity.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>

#define X(name, text) text,
const char *const end_text[] = {ENDS(X)};
#undef X

/* A megabyte that nobody may touch behind every buffer: more than a row or column of these models. */
enum { PAGE = 4096, GUARD = 1 << 20 };
static const size_t room = (size_t)1 << 36;
/* Relative, of doubles. ADAMW makes of a difference d in a gradient one of at most d / epsilon = 1e8 d in the
 * update of a parameter, times the learning rate, which is at most 0.01 here (kernels/ref.h). Not so SGD. */
static const double bound = 1e-12, bound_adamw = 1e-12 * 1e8 * 0.01;

static bool is_adamw(const struct moe_role *role)
{
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++)
            if (role->blocks[b].ops[o].kind == MOE_KERNEL && role->blocks[b].ops[o].kernel == MOE_K_ADAMW)
                return true;
    return false;
}

double run_bound(const struct moe_schedule *s, enum moe_buffer_role role)
{
    return role == MOE_BUF_PARAM && is_adamw(s->roles) ? bound_adamw : bound;
}

static struct moe_communicator *base; /* what communicators are split from; another one after a failure */
static sigjmp_buf jump;
static volatile sig_atomic_t armed;

static void leave(int signal_number)
{
    if (armed) siglongjmp(jump, signal_number);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* ---- a device whose memory ends where its buffers end ---- */

struct guarded {
    struct moe_device device;
    struct run *run;
};

static struct moe_device *cpu; /* what computes */

static int guarded_alloc(struct moe_device *d, size_t bytes, void **out)
{
    struct run *r = ((struct guarded *)d)->run;
    size_t span = (bytes + PAGE - 1) / PAGE * PAGE;
    if (r->used + span + GUARD > room)
        return moe_fail(MOE_EFAILED, "no memory for a buffer of %zu bytes", bytes);
    char *at = r->memory + r->used;
    if (span && mprotect(at, span, PROT_READ | PROT_WRITE))
        return moe_fail(MOE_EFAILED, "mprotect: %s", strerror(errno));
    r->used += span + GUARD;
    *out = at + span - bytes;
    return MOE_OK;
}

static void guarded_free(struct moe_device *d, void *p)
{
    (void)d, (void)p; /* with the run */
}

static void touch(const void *p, int64_t n, int type)
{
    const char *bytes = p;
    static volatile char sink;
    if (n <= 0) return;
    sink = bytes[0];
    sink = bytes[n * moe_type_bytes[type] - 1];
    (void)sink;
}

/* A signal inside the BLAS would lose what the BLAS holds: a product that leaves its buffers does so here. */
static void touch_product(const struct moe_launch *l)
{
    const struct moe_op *op = l->op;
    const int64_t *d = l->dims;
    int64_t rows = 0;
    if (op->kernel == MOE_K_GEMM) {
        if (d[0] == 0 || d[1] == 0) return;
        touch(l->in[0], d[0] * d[2], (int)op->type);
        touch(l->in[1], d[1] * d[2], (int)op->type);
        touch(l->out[0], d[0] * d[1], (int)op->type);
        return;
    }
    for (int64_t g = 0; g < d[0]; g++) rows += l->rows[g];
    bool wgrad = op->kernel == MOE_K_GROUPED_WGRAD;
    touch(l->in[0], rows * d[2], (int)op->type);
    touch(l->in[1], wgrad ? rows * d[1] : d[0] * d[1] * d[2], (int)op->type);
    touch(l->out[0], wgrad ? d[0] * d[1] * d[2] : rows * d[1], (int)op->type);
}

static int guarded_run(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    if (moe_kernel_cost[launch->op->kernel] != MOE_COST_MEMORY) touch_product(launch);
    (void)d;
    return moe_device_cpu.run(cpu, launch, stream);
}

static int guarded_copy(struct moe_device *d, void *to, const void *from, size_t bytes, int stream)
{
    (void)d;
    return moe_device_cpu.copy(cpu, to, from, bytes, stream);
}

static int guarded_sync(struct moe_device *d, int stream)
{
    (void)d;
    return moe_device_cpu.sync(cpu, stream);
}

/* Nothing here opens it by its table, nor marks times. */
static const struct moe_device_table guarded_table = {.name = "guarded",
                                                      .alloc = guarded_alloc,
                                                      .free = guarded_free,
                                                      .copy = guarded_copy,
                                                      .run = guarded_run,
                                                      .sync = guarded_sync};

/* Open MPI 4.1 releases the working memory of a collective that failed, though messages for it may still come
 * and be written there. While a collective is waited for, nothing is released. */
static bool hoards;
#if defined __GLIBC__ && !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
extern void __libc_free(void *p);
void free(void *p)
{
    if (!hoards) __libc_free(p);
}
#endif

/* ---- communicators that give up as soon as a rank has failed ---- */

/* Failed: the number of the last run in which any rank did; in memory that all ranks share. */
static volatile int64_t *failed_run;
static int64_t this_run;

struct patient {
    struct moe_communicator comm;
    struct moe_communicator *inner;
};

static const struct moe_communicator_table patient_table;

static struct moe_communicator *wrap(struct moe_communicator *inner)
{
    struct patient *p = moe_alloc(1, sizeof *p);
    *p = (struct patient){{&patient_table, inner->rank, inner->size}, inner};
    return &p->comm;
}

static struct moe_communicator *inner_of(struct moe_communicator *c)
{
    return ((struct patient *)c)->inner;
}

static void patient_close(struct moe_communicator *c)
{
    if (c) inner_of(c)->table->close(inner_of(c));
    free(c);
}

static int patient_split(struct moe_communicator *c, const int *ranks, int n, int id,
                         struct moe_communicator **out)
{
    struct moe_communicator *inner;
    MOE_TRY(inner_of(c)->table->split(inner_of(c), ranks, n, id, &inner));
    *out = wrap(inner);
    return MOE_OK;
}

static int patient_start(struct moe_communicator *c, const struct moe_transfer *t)
{
    return inner_of(c)->table->start(inner_of(c), t);
}

static int patient_wait(struct moe_communicator *c, double timeout_s)
{
    const double slice_s = 0.05;
    for (double waited_s = 0;; waited_s += slice_s) {
        bool last = waited_s + slice_s >= timeout_s || *failed_run == this_run;
        hoards = true;
        int err = inner_of(c)->table->wait(inner_of(c), slice_s);
        hoards = false;
        if (err >= 0 || last || !strstr(moe_error(), "no answer for")) return err;
    }
}

static int patient_gather(struct moe_communicator *c, const void *own, void *all, size_t bytes,
                          double timeout_s)
{
    hoards = true;
    int err = inner_of(c)->table->gather(inner_of(c), own, all, bytes, 0);
    hoards = false;
    return err < 0 && strstr(moe_error(), "no answer for") ? patient_wait(c, timeout_s) : err;
}

static void patient_abort(struct moe_communicator *c, int exit_code)
{
    inner_of(c)->table->abort(inner_of(c), exit_code);
}

static const struct moe_communicator_table patient_table = {.name = "patient",
                                                            .close = patient_close,
                                                            .split = patient_split,
                                                            .start = patient_start,
                                                            .wait = patient_wait,
                                                            .gather = patient_gather,
                                                            .abort = patient_abort};

/* ---- a run ---- */

static void expect(int err)
{
    if (err < 0) moe_bug(__FILE__, __LINE__, moe_error());
}

void run_open_machine(int shared)
{
    failed_run = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    moe_assert(failed_run != MAP_FAILED);
    expect(moe_device_cpu.open(&cpu));
    static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGVTALRM};
    struct sigaction action = {.sa_handler = leave, .sa_flags = SA_NODEFER};
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) sigaction(caught[i], &action, NULL);
}

static int open_comm(const struct moe_schedule *s, int id, bool alone, struct moe_communicator **out)
{
    int ranks[8];
    if (!base) MOE_TRY(moe_communicator_here()->open(NULL, 60, &base));
    if (alone || base->size == 1) {
        MOE_TRY(moe_comm_self.open(NULL, 60, out));
        *out = wrap(*out);
        return MOE_OK;
    }
    moe_assert(s->n_ranks <= 8 && s->n_ranks <= base->size);
    for (int r = 0; r < s->n_ranks; r++) ranks[r] = r;
    if (base->rank >= s->n_ranks) {
        *out = NULL;
        return MOE_OK;
    }
    MOE_TRY(base->table->split(base, ranks, s->n_ranks, id, out));
    *out = wrap(*out);
    return MOE_OK;
}

static enum end end_of(int err)
{
    if (err >= 0) return END_EQUAL;
    if (err != MOE_EPEER) return END_REFUSED;
    return strstr(moe_error(), "no answer for") ? END_NO_ANSWER : END_LIBRARY;
}

/* A kernel with dims out of all proportion runs for ever: steps of these models take milliseconds. */
static void allow_cpu_s(int s)
{
    struct itimerval allowed = {.it_value = {.tv_sec = s}};
    setitimer(ITIMER_VIRTUAL, &allowed, NULL);
}

static void step(struct run *r, int n_steps, const int32_t *token, const int32_t *target)
{
    int signal_number = sigsetjmp(jump, 1);
    if (signal_number == 0) {
        armed = 1;
        allow_cpu_s(2);
        int err = MOE_OK;
        for (int i = 0; i < n_steps && err >= 0; i++) err = moe_execute_step(r->x, token, target, &r->loss);
        armed = 0;
        r->end = end_of(err);
        snprintf(r->error, sizeof r->error, "%s", err < 0 ? moe_error() : "");
    } else {
        armed = 0;
        hoards = false;
        r->end = END_CRASHED;
        snprintf(r->error, sizeof r->error, "%s", strsignal(signal_number));
    }
    allow_cpu_s(0);
    if (r->end != END_EQUAL && r->end != END_NO_ANSWER) *failed_run = this_run;
}

/* In place of the drawn ones: numbers of tokens times an odd one, of which 256 in a row differ. */
static void make_distinct(const struct moe_schedule *s, int rank, int32_t *token)
{
    int64_t all = parity_stage_tokens(s, rank, s->n_ranks), at = parity_stage_tokens(s, rank, rank);
    for (int m = 0; m < s->n_micro; m++)
        for (int64_t t = 0; t < s->tokens[rank]; t++) *token++ = (int32_t)((m * all + at + t) * 167 % 256);
}

struct run *run_steps(const struct moe_schedule *s, int id, struct how how)
{
    struct moe_communicator *comm;
    this_run = id;
    expect(open_comm(s, id, how.alone, &comm));
    if (!comm) return NULL;
    struct run *r = moe_alloc(1, sizeof *r);
    struct guarded *d = moe_alloc(1, sizeof *d);
    *r = (struct run){.comm = comm, .s = s, .device = &d->device};
    r->options = (struct moe_execute_options){
        .timeout_s = how.timeout_s, .agree_steps = how.agree ? INT64_MAX : 0, .seed = 3, .poison = true};
    *d = (struct guarded){{&guarded_table}, r};
    r->memory = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    moe_assert(r->memory != MAP_FAILED);
    size_t n = (size_t)(s->tokens[comm->rank] * s->n_micro);
    int32_t *token = moe_alloc(n, sizeof *token), *target = moe_alloc(n, sizeof *target);
    parity_tokens(s, comm->rank, token, target);
    if (how.distinct) make_distinct(s, comm->rank, token);
    expect(moe_execute_open(s, r->device, comm, &r->options, &r->x));
    step(r, how.n_steps, token, target);
    free(token);
    free(target);
    return r;
}

/* What is in flight may be written to: one mapping takes the place of all buffers, and costs no memory until
 * then. The execution and its communicators stay. */
static void keep(struct run *r)
{
    static struct run *kept; /* reachable, for those who look for leaks */
    static struct moe_communicator *old;
    if (mmap(r->memory, r->used, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        moe_bug(__FILE__, __LINE__, "mmap");
    munmap(r->memory + r->used, room - r->used);
    kept = r;
    old = base;
    base = NULL; /* it would not release communicators any more */
    (void)kept, (void)old;
}

void run_close(struct run *r, bool failed)
{
    if (!r) return;
    if (failed && r->comm->size > 1) {
        keep(r);
        return;
    }
    moe_execute_close(r->x);
    r->comm->table->close(r->comm);
    munmap(r->memory, room);
    free(r->device);
    free(r);
}

/* ---- comparisons ---- */

/* Norms show in what is clipped by them; which of two that are added up holds what does not. */
static bool counts(enum moe_buffer_role role)
{
    return role == MOE_BUF_PARAM || role == MOE_BUF_GRAD || role == MOE_BUF_STATE || role == MOE_BUF_OUTPUT;
}

/* SGD: what a parameter has moved by is as near as its gradient; beside that each step rounds the sum. A
 * parameter that is hardly moved would hide an update that is missing. */
static double allowed(const struct run *b, const struct run *before, int buffer, int slot)
{
    const struct moe_schedule *s = b->s;
    enum moe_buffer_role role = s->buffers[buffer].role;
    if (role != MOE_BUF_PARAM || is_adamw(s->roles)) return run_bound(s, role);
    const int64_t steps = moe_execute_steps(b->x);
    return bound * parity_difference(s, buffer, slot, before->x, b->x, buffer, 0) +
           (double)steps * DBL_EPSILON;
}

static enum end compare_slot(const struct run *a, const struct run *b, const struct run *before, int buffer,
                             int slot)
{
    const struct moe_buffer *y = &a->s->buffers[buffer];
    int64_t n_a, n_b;
    const void *p = moe_execute_buffer(a->x, buffer, slot, &n_a),
               *q = moe_execute_buffer(b->x, buffer, slot, &n_b);
    if (!p && !q) return END_EQUAL;
    if (!p || !q || n_a != n_b) return END_DIFFERS;
    if (!memcmp(p, q, (size_t)n_a * (size_t)moe_type_bytes[y->type])) return END_EQUAL;
    double difference = parity_difference(a->s, buffer, slot, a->x, b->x, buffer, 0);
    return difference <= allowed(b, before, buffer, slot) ? END_ROUNDED : END_DIFFERS;
}

enum end run_compare(const struct run *a, const struct run *b, const struct run *before)
{
    enum end worst = a->end;
    if (worst != END_EQUAL) return worst;
    for (int i = 0; i < a->s->n_buffers; i++)
        for (int slot = 0; slot < a->s->buffers[i].slots && counts(a->s->buffers[i].role); slot++) {
            if (!moe_holds(a->s, i, slot, a->comm->rank)) continue;
            enum end here = compare_slot(a, b, before, i, slot);
            if (here > worst) worst = here;
        }
    return worst;
}

/* Of any gradient of a parameter. */
static double largest_gradient(const struct run *one)
{
    double most = 0;
    for (int i = 0; i < one->s->n_params; i++) {
        const struct moe_param *p = &one->s->params[i];
        for (int slot = 0; p->buffer >= 0 && slot < one->s->buffers[p->grad].slots; slot++) {
            int64_t n;
            const void *g = moe_execute_buffer(one->x, p->grad, slot, &n);
            for (int64_t e = 0; g && e < n; e++)
                most = parity_larger(most, fabs(parity_at(one->s, p->grad, g, e)));
        }
    }
    return most;
}

/* A gradient that is 0, such as a router's of whose experts every token has all, is what sums of others leave
 * by rounding: it may differ by the rounding of the largest.
 * A rank's gradient is what it updates by: where it is shared out, a part, in a bucket. */
double run_difference(const struct run *many, const struct run *one, int rank, double *params)
{
    const struct moe_schedule *s = many->s, *s1 = one->s;
    const double least = largest_gradient(one) * DBL_EPSILON / bound;
    double most = 0;
    *params = 0;
    for (int i = 0; i < s->n_params; i++)
        for (int slot = 0; slot < s->buffers[s->params[i].grad].slots; slot++) {
            const struct moe_param *p = &s->params[i], *p1 = &s1->params[i];
            int64_t n;
            if (p->buffer < 0) { /* norms are of all */
                most = parity_larger(most, parity_difference(s, p->grad, slot, many->x, one->x, p1->grad, 0));
                continue;
            }
            if (!moe_holds(s, p->grad, slot, rank)) continue;
            moe_execute_buffer(many->x, p->buffer, slot, &n);
            struct parity_update by = parity_update_of(s, rank, i, slot, n);
            int64_t from = p->shard < 0 ? 0 : n * s->comms[p->shard].index_of[rank];
            most = parity_larger(most, parity_part(s, by.op->reads[1].buffer, by.grad_slot, many->x, by.at,
                                                   by.n, one->x, p1->grad, slot, from + by.first, least));
            double d = parity_difference(s, p->buffer, slot, many->x, one->x, p1->buffer, from);
            *params = parity_larger(*params, d);
        }
    return most;
}
