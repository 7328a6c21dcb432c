/* cuda_copy.c - copies and fills of the CUDA double.
 *
 * What the host may do with its side of a copy, and when: "API synchronization behavior" of the runtime's
 * reference. Pageable memory is read before the call returns, and written before it returns; pinned memory is
 * read and written when the copy runs. */
#include "tests/doubles/cuda_double.h"

#include <stdlib.h>
#include <string.h>

enum side { PAGEABLE, PINNED, DEVICE };

struct copy {
    char *to;
    const char *from; /* NULL: fill */
    size_t bytes;
    int value;
    bool to_known, from_known; /* sides that are allocations of the double, and must still be when it runs */
    char *staged;
};

static int copy_step(void *ctx)
{
    const struct copy *c = ctx;
    if ((c->to_known && !moe_double_is_device(c->to, c->bytes)) ||
        (c->from_known && !moe_double_is_device(c->from, c->bytes)))
        return -cudaErrorIllegalAddress;
    if (c->from)
        memcpy(c->to, c->from, c->bytes);
    else
        memset(c->to, c->value, c->bytes);
    return 1;
}

static void copy_drop(void *ctx)
{
    struct copy *c = ctx;
    free(c->staged);
    free(c);
}

static cudaError_t queue_copy(cudaStream_t stream, struct copy what)
{
    struct copy *c = malloc(sizeof *c);
    cudaError_t code;
    if (!c) moe_double_wrong("out of memory");
    *c = what;
    code = moe_double_enqueue(stream, &(struct moe_double_work){"copy", copy_step, copy_drop, c});
    if (code) copy_drop(c);
    return code;
}

/* Where p is. *code: cudaErrorInvalidValue when the bytes go beyond the allocation that p is in. */
static enum side side_of(const char *call, const void *p, size_t bytes, cudaError_t *code)
{
    const struct moe_double_block b = moe_double_find(p, call);
    if (b.type == cudaMemoryTypeUnregistered) return PAGEABLE;
    if (bytes > b.bytes - (size_t)((const char *)p - b.at)) *code = cudaErrorInvalidValue;
    return b.type == cudaMemoryTypeHost ? PINNED : DEVICE;
}

/* A copy whose kind says another direction than its pointers: undefined. */
static cudaError_t check_kind(const char *call, enum cudaMemcpyKind kind, enum side to, enum side from)
{
    static const struct {
        bool to_device, from_device;
    } said[] = {[cudaMemcpyHostToHost] = {false, false},
                [cudaMemcpyHostToDevice] = {true, false},
                [cudaMemcpyDeviceToHost] = {false, true},
                [cudaMemcpyDeviceToDevice] = {true, true}};
    if (kind == cudaMemcpyDefault) return cudaSuccess;
    if ((unsigned)kind >= sizeof said / sizeof *said) return cudaErrorInvalidMemcpyDirection;
    // pinned memory is memory of both
    if ((said[kind].to_device ? to == PAGEABLE : to == DEVICE) ||
        (said[kind].from_device ? from == PAGEABLE : from == DEVICE))
        moe_double_wrong("%s: kind %d, but the pointers are not of that direction", call, (int)kind);
    return cudaSuccess;
}

struct sides {
    enum side to, from;
};

static cudaError_t check_copy(const char *call, void *to, const void *from, size_t bytes,
                              enum cudaMemcpyKind kind, struct sides *sides)
{
    cudaError_t code = !to || !from ? cudaErrorInvalidValue : moe_double_sticky();
    if (code) return code;
    sides->to = side_of(call, to, bytes, &code);
    sides->from = side_of(call, from, bytes, &code);
    if (code) return code;
    if ((char *)to < (const char *)from + bytes && (const char *)from < (char *)to + bytes)
        moe_double_wrong("%s: source and destination overlap", call);
    return check_kind(call, kind, sides->to, sides->from);
}

static cudaError_t put(cudaStream_t stream, void *to, const void *from, size_t bytes, struct sides sides)
{
    struct copy c = {.to = to,
                     .from = from,
                     .bytes = bytes,
                     .to_known = sides.to != PAGEABLE,
                     .from_known = sides.from != PAGEABLE};
    if (sides.from == PAGEABLE && sides.to == DEVICE) {
        c.staged = malloc(bytes);
        if (!c.staged) moe_double_wrong("out of memory");
        c.from = memcpy(c.staged, from, bytes);
    }
    return queue_copy(stream, c);
}

/* Does the host wait for it? Host to host always, and when it is written to pageable memory. */
static bool host_waits(struct sides sides)
{
    return sides.to == PAGEABLE || (sides.to == PINNED && sides.from != DEVICE);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    struct sides sides;
    cudaError_t code = moe_double_stream_check(stream);
    if (code || !bytes) return moe_double_return(code);
    code = check_copy("cudaMemcpyAsync", to, from, bytes, kind, &sides);
    if (!code) code = put(stream, to, from, bytes, sides);
    if (!code && host_waits(sides)) code = moe_double_wait(stream);
    return moe_double_return(code);
}

/* On the legacy stream, which knows nothing of streams with cudaStreamNonBlocking. From pageable memory to
 * the device it returns when the bytes are staged; from device to device the host does not wait. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    struct sides sides;
    cudaStream_t legacy;
    cudaError_t code = moe_double_sticky();
    if (code || !bytes) return moe_double_return(code);
    code = check_copy("cudaMemcpy", to, from, bytes, kind, &sides);
    if (code) return moe_double_return(code);
    legacy = moe_double_legacy_begin();
    code = put(legacy, to, from, bytes, sides);
    moe_double_legacy_end();
    if (!code && (sides.to != DEVICE || sides.from == PINNED)) code = moe_double_wait(legacy);
    return moe_double_return(code);
}

static cudaError_t fill(const char *call, void *to, int value, size_t bytes, cudaStream_t stream)
{
    cudaError_t code = to ? moe_double_sticky() : cudaErrorInvalidValue;
    if (code) return code;
    if (side_of(call, to, bytes, &code) == PAGEABLE) code = cudaErrorInvalidValue;
    if (code) return code;
    return queue_copy(stream, (struct copy){.to = to, .value = value, .bytes = bytes, .to_known = true});
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const cudaError_t code = moe_double_stream_check(stream);
    if (code || !bytes) return moe_double_return(code);
    return moe_double_return(fill("cudaMemsetAsync", to, value, bytes, stream));
}

/* On the legacy stream too; the host waits only where the memory is the host's. */
cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    cudaError_t code = moe_double_sticky();
    cudaStream_t legacy;
    bool wait;
    if (code || !bytes) return moe_double_return(code);
    legacy = moe_double_legacy_begin();
    code = fill("cudaMemset", to, value, bytes, legacy);
    moe_double_legacy_end();
    wait = !code && moe_double_find(to, "cudaMemset").type == cudaMemoryTypeHost;
    return moe_double_return(wait ? moe_double_wait(legacy) : code);
}

/* ---- a function of the host in a stream ---- */

struct host_call {
    cudaHostFn_t run;
    void *data;
};

static int host_step(void *ctx)
{
    const struct host_call *h = ctx;
    h->run(h->data);
    return 1;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *data)
{
    struct host_call *h;
    cudaError_t code = run ? moe_double_stream_check(stream) : cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    h = malloc(sizeof *h);
    if (!h) moe_double_wrong("out of memory");
    *h = (struct host_call){run, data};
    code = moe_double_enqueue(stream, &(struct moe_double_work){"host", host_step, free, h});
    if (code) free(h);
    return moe_double_return(code);
}
