/* cuda_stream.c - see queue.h: streams, events, and which of them goes on.
 *
 * A stream is a list of entries: work, a place that an event marks, or a wait for such a place. A place that
 * is recorded again is a new one, so that waits know which they meant. Handles are not given back to malloc:
 * one that was destroyed is told from one that lives. */
#include "sim/base.h"
#include "tests/doubles/cuda_double.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* What cudaEventRecord captured. */
struct place {
    int refs;
    bool passed;
    int64_t at_ns;
};

struct entry {
    struct entry *next;
    enum { WORK, MARK, WAIT } kind;
    struct moe_double_work work;
    cudaError_t planted;
    struct place *place;
};

struct CUstream_st {
    struct CUstream_st *next;
    struct entry *head, **tail;
    unsigned flags;
    int device, priority;
    bool alive;
};

struct CUevent_st {
    struct CUevent_st *next;
    struct place *place; /* NULL: never recorded */
    unsigned flags;
    int device;
    bool alive;
};

static struct {
    struct CUstream_st *streams, *legacy;
    struct CUevent_st *events;
    uint64_t drawn, seed;
    struct CUstream_st *favourite; /* goes on alone for `burst` steps more, where it can */
    uint64_t burst;
    bool seeded, inside; /* inside: a step of work is running */
} queue;

/* ---- the generator ---- */

uint64_t moe_double_draw(uint64_t n)
{
    if (!queue.seeded) {
        const char *said = getenv("MOE_DOUBLE_SEED"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        queue.seed = moe_stream(said ? strtoull(said, NULL, 10) : 1, rank ? strtoull(rank, NULL, 10) : 0);
        queue.seeded = true;
    }
    return moe_hash64(queue.seed + queue.drawn++) % n;
}

/* ---- lists ---- */

static void release(struct place *p)
{
    if (p && !--p->refs) free(p);
}

static struct place *hold(struct place *p)
{
    p->refs++;
    return p;
}

static struct entry *append(struct CUstream_st *s, struct entry what)
{
    struct entry *e = malloc(sizeof *e);
    if (!e) moe_double_wrong("out of memory");
    *e = what;
    e->next = NULL;
    *s->tail = e;
    s->tail = &e->next;
    return e;
}

static void remove_head(struct CUstream_st *s)
{
    struct entry *e = s->head;
    s->head = e->next;
    if (!s->head) s->tail = &s->head;
    release(e->place);
    if (e->kind == WORK && e->work.drop) e->work.drop(e->work.ctx);
    free(e);
}

static void give_up_all(void)
{
    for (struct CUstream_st *s = queue.streams; s; s = s->next)
        while (s->head) remove_head(s);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct CUstream_st *new_stream(unsigned flags, int priority)
{
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (!s) moe_double_wrong("out of memory");
    *s = (struct CUstream_st){.next = queue.streams,
                              .flags = flags,
                              .device = moe_double_device(),
                              .priority = priority,
                              .alive = true};
    s->tail = &s->head;
    return queue.streams = s;
}

/* ---- what runs next ---- */

static int run_work(struct entry *e)
{
    int done;
    if (e->planted) return -(int)e->planted;
    queue.inside = true;
    moe_double_work_begins(e->work.what);
    done = e->work.step(e->work.ctx);
    queue.inside = false;
    if (done > 1) moe_double_wrong("a step of %s returned %d", e->work.what, done);
    return done;
}

/* The head of a stream. Result: whether it is done. */
static bool advance(struct CUstream_st *s)
{
    struct entry *e = s->head;
    if (!e || (e->kind == WAIT && !e->place->passed)) return false;
    if (e->kind == MARK) {
        e->place->passed = true;
        e->place->at_ns = now_ns();
    } else if (e->kind == WORK) {
        const int done = run_work(e);
        if (!done) return false;
        if (done < 0) {
            fprintf(stderr, "moesim double: %s failed: %s\n", e->work.what, cudaGetErrorName(-done));
            moe_double_set_sticky((cudaError_t)-done);
            give_up_all();
            return true;
        }
    }
    remove_head(s);
    return true;
}

static int count_busy(void)
{
    int n = 0;
    for (const struct CUstream_st *s = queue.streams; s; s = s->next) n += s->head != NULL;
    return n;
}

static struct CUstream_st *busy(uint64_t i)
{
    for (struct CUstream_st *s = queue.streams; s; s = s->next)
        if (s->head && !i--) return s;
    return NULL;
}

/* Steps of one stream come in bursts of 1 to 1,023, so that now and then one is wholly before another. */
static bool progress(void)
{
    const uint64_t n = (uint64_t)count_busy();
    uint64_t first;
    if (queue.inside) moe_double_wrong("work calls the CUDA runtime");
    if (!n) return false;
    if (queue.burst && queue.favourite->head && advance(queue.favourite)) {
        queue.burst--;
        return true;
    }
    first = moe_double_draw(n);
    for (uint64_t i = 0; i < n; i++) {
        struct CUstream_st *s = busy((first + i) % n);
        if (s && advance(s)) {
            queue.favourite = s;
            queue.burst = moe_double_draw((uint64_t)1 << moe_double_draw(11));
            return true;
        }
    }
    return false;
}

bool moe_double_progress(void)
{
    const bool moved = progress();
    moe_double_work_ends();
    return moved;
}

/* The heads of all streams wait for events that nothing before them marks: cannot be, as what is waited for
 * was queued before; unless this file is wrong. */
static void check_alive(void)
{
    for (const struct CUstream_st *s = queue.streams; s; s = s->next)
        if (s->head && s->head->kind == WORK) return;
    moe_double_wrong("every stream waits for another");
}

static void wait_while(bool (*waiting)(const void *of), const void *of)
{
    while (!moe_double_sticky() && waiting(of)) {
        if (progress()) continue;
        check_alive();
        sched_yield(); // work waits for another process
    }
    moe_double_work_ends();
}

static bool stream_waiting(const void *of)
{
    return ((const struct CUstream_st *)of)->head != NULL;
}

static bool any_waiting(const void *of)
{
    (void)of;
    return count_busy() > 0;
}

static bool place_waiting(const void *of)
{
    return !((const struct place *)of)->passed;
}

cudaError_t moe_double_wait(cudaStream_t stream)
{
    wait_while(stream ? stream_waiting : any_waiting, stream);
    return moe_double_sticky();
}

/* ---- streams ---- */

static bool is_default(cudaStream_t stream)
{
    return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

static bool alive(cudaStream_t stream)
{
    for (const struct CUstream_st *s = queue.streams; s; s = s->next)
        if (s == stream) return s->alive;
    return false;
}

cudaError_t moe_double_stream_check(cudaStream_t stream)
{
    if (queue.inside) moe_double_wrong("work calls the CUDA runtime");
    if (is_default(stream)) moe_double_wrong("work on a default stream");
    if (!alive(stream)) return cudaErrorInvalidResourceHandle;
    return moe_double_sticky();
}

int moe_double_stream_device(cudaStream_t stream)
{
    return stream->device;
}

cudaError_t moe_double_enqueue(cudaStream_t stream, const struct moe_double_work *work)
{
    const cudaError_t code =
        stream && stream == queue.legacy ? moe_double_sticky() : moe_double_stream_check(stream);
    if (code) return code;
    append(stream, (struct entry){.kind = WORK, .work = *work, .planted = moe_double_planted(work->what)});
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    int device;
    cudaError_t code = cudaGetDevice(&device);
    if (!code && (!stream || (flags & ~(unsigned)cudaStreamNonBlocking))) code = cudaErrorInvalidValue;
    if (!code) *stream = new_stream(flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    return moe_double_return(code);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    const cudaError_t code = priority ? moe_double_stream_check(stream) : cudaErrorInvalidValue;
    if (!code) *priority = stream->priority;
    return moe_double_return(code);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags)
{
    const cudaError_t code = flags ? moe_double_stream_check(stream) : cudaErrorInvalidValue;
    if (!code) *flags = stream->flags;
    return moe_double_return(code);
}

/* "will return immediately": what is on it still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const cudaError_t code = moe_double_stream_check(stream);
    if (!code) stream->alive = false;
    return moe_double_return(code);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    const cudaError_t code = moe_double_stream_check(stream);
    return moe_double_return(code ? code : moe_double_wait(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    const cudaError_t code = moe_double_stream_check(stream);
    if (!code) moe_double_progress();
    return moe_double_return(code ? code : stream->head ? cudaErrorNotReady : cudaSuccess);
}

/* ---- the legacy default stream ---- */

static struct place *mark(struct CUstream_st *s)
{
    struct place *p = calloc(1, sizeof *p);
    if (!p) moe_double_wrong("out of memory");
    append(s, (struct entry){.kind = MARK, .place = hold(p)});
    return p;
}

/* `after` starts, from here on, after what is on `s` now. */
static void order(struct CUstream_st *after, struct CUstream_st *s)
{
    if (!s->head) return;
    append(after, (struct entry){.kind = WAIT, .place = hold(mark(s))});
}

cudaStream_t moe_double_legacy_begin(void)
{
    if (queue.inside) moe_double_wrong("work calls the CUDA runtime");
    if (!queue.legacy) {
        queue.legacy = new_stream(cudaStreamDefault, 0);
        queue.legacy->alive = false; // for the program
    }
    for (struct CUstream_st *s = queue.streams; s; s = s->next)
        if (s != queue.legacy && !(s->flags & cudaStreamNonBlocking)) order(queue.legacy, s);
    return queue.legacy;
}

void moe_double_legacy_end(void)
{
    for (struct CUstream_st *s = queue.streams; s; s = s->next)
        if (s != queue.legacy && s->alive && !(s->flags & cudaStreamNonBlocking)) order(s, queue.legacy);
}

/* ---- events ---- */

static cudaError_t event_check(cudaEvent_t event)
{
    if (queue.inside) moe_double_wrong("work calls the CUDA runtime");
    for (const struct CUevent_st *e = queue.events; e; e = e->next)
        if (e == event) return e->alive ? moe_double_sticky() : cudaErrorInvalidResourceHandle;
    return cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (!code && (!event || (flags & ~known) ||
                  ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming))))
        code = cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    *event = calloc(1, sizeof **event);
    if (!*event) moe_double_wrong("out of memory");
    **event = (struct CUevent_st){.next = queue.events, .flags = flags, .device = device, .alive = true};
    queue.events = *event;
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t code = event_check(event);
    if (!code) {
        event->alive = false;
        release(event->place);
        event->place = NULL;
    }
    return moe_double_return(code);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t code = event_check(event);
    if (!code) code = moe_double_stream_check(stream);
    if (!code && event->device != stream->device) code = cudaErrorInvalidResourceHandle;
    if (!code) {
        release(event->place);
        event->place = hold(mark(stream));
    }
    return moe_double_return(code);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    cudaError_t code = event_check(event);
    if (!code) code = moe_double_stream_check(stream);
    if (!code && flags) code = cudaErrorInvalidValue; // cudaEventWaitExternal: of captures only
    if (!code && event->place) append(stream, (struct entry){.kind = WAIT, .place = hold(event->place)});
    return moe_double_return(code);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const cudaError_t code = event_check(event);
    if (!code) moe_double_progress();
    return moe_double_return(code                                          ? code
                             : event->place && place_waiting(event->place) ? cudaErrorNotReady
                                                                           : cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    const cudaError_t code = event_check(event);
    if (!code && event->place) wait_while(place_waiting, event->place);
    return moe_double_return(code);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t code = event_check(start);
    if (!code) code = event_check(end);
    if (!code && !ms) code = cudaErrorInvalidValue;
    if (!code && ((start->flags | end->flags) & cudaEventDisableTiming || !start->place || !end->place ||
                  start->device != end->device))
        code = cudaErrorInvalidResourceHandle;
    if (!code && !(start->place->passed && end->place->passed)) code = cudaErrorNotReady;
    if (!code) *ms = (float)((double)(end->place->at_ns - start->place->at_ns) * 1e-6);
    return moe_double_return(code);
}
