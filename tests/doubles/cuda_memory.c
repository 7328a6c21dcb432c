/* cuda_memory.c - see cuda_double.h: allocations of the CUDA double.
 *
 * All are pages of one range of addresses, no address is given twice, and what is not allocated cannot be
 * touched; so use after free, and use before a cudaMallocAsync has run, ends in a signal whose handler says
 * so. An allocation ends where its last page does, but for the alignment to 256 bytes that the real one has;
 * what is left around it in its pages holds a pattern that cudaFree looks at (and the address sanitizer sees
 * who touches it). With MOE_DOUBLE_PROTECT=1 memory of the device can be touched by work only. */
#include "tests/doubles/cuda_double.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

enum { PAGE = 4096, ALIGNMENT = 256, GUARD = 0x5c };
/* As a float, a double or a bf16 not a number; as an index beyond every array. */
static const unsigned char UNWRITTEN[] = {0xff, 0x7f};
static const size_t RANGE_BYTES = (size_t)256 << 30, DEVICE_BYTES = (size_t)4 << 30;

struct block {
    struct block *next;
    char *pages, *at;
    size_t page_bytes, bytes;
    enum cudaMemoryType type;
    int device;
    bool pooled;                      /* by cudaMallocAsync */
    bool leaving;                     /* given to cudaFreeAsync, which may not have run */
    enum { COMING, LIVE, GONE } life; /* COMING: its queued allocation has not run */
};

static struct {
    char *begin, *top;
    struct block *blocks; /* newest first; those that are GONE stay until there are many */
    bool protect, open;   /* open: work may touch memory of the device */
    const char *work;     /* that runs */
    struct sigaction before;
} memory;

/* ---- who may touch what ---- */

static void set_access(const struct block *b, int access)
{
    if (mprotect(b->pages, b->page_bytes, access)) moe_double_wrong("mprotect failed");
}

static bool is_private(const struct block *b)
{
    return b->type == cudaMemoryTypeDevice;
}

static void open_or_close(bool open)
{
    if (!memory.protect || memory.open == open) return;
    memory.open = open;
    for (const struct block *b = memory.blocks; b; b = b->next)
        if (b->life == LIVE && is_private(b)) set_access(b, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void moe_double_work_begins(const char *what)
{
    memory.work = what;
    open_or_close(true);
}

void moe_double_work_ends(void)
{
    memory.work = NULL;
    open_or_close(false);
}

static const struct block *block_of(const char *p)
{
    for (const struct block *b = memory.blocks; b; b = b->next)
        if (p >= b->pages && p < b->pages + b->page_bytes) return b;
    return NULL;
}

static const char *state_of(const struct block *b)
{
    return !b                  ? "between allocations"
           : b->life == GONE   ? "in memory that was freed"
           : b->life == COMING ? "in memory whose cudaMallocAsync has not run: nothing orders them"
                               : "in memory of the device";
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
    const char *p = info->si_addr;
    (void)context;
    if (p >= memory.begin && p < memory.begin + RANGE_BYTES)
        moe_double_wrong("%s touches %p, %s", memory.work ? memory.work : "the program", (const void *)p,
                         state_of(block_of(p)));
    sigaction(signal, &memory.before, NULL); // the instruction is done again, and its fault goes there
}

static void reserve(void)
{
    const char *protect = getenv("MOE_DOUBLE_PROTECT");
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    void *range;
    if (memory.begin) return;
    range = mmap(NULL, RANGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) moe_double_wrong("no range of addresses for the device");
    memory.begin = memory.top = range;
    memory.protect = protect && *protect == '1';
    sigaction(SIGSEGV, &ours, &memory.before);
}

/* ---- blocks ---- */

static void fill(const struct block *b)
{
    char *end = b->pages + b->page_bytes;
    for (size_t done = 0; done < b->bytes; done += done ? done : sizeof UNWRITTEN) {
        const size_t left = b->bytes - done, have = done ? done : sizeof UNWRITTEN;
        memcpy(b->at + done, done ? (const void *)b->at : UNWRITTEN, left < have ? left : have);
    }
    memset(b->pages, GUARD, (size_t)(b->at - b->pages));
    memset(b->at + b->bytes, GUARD, (size_t)(end - b->at) - b->bytes);
    ASAN_POISON_MEMORY_REGION(b->pages, (size_t)(b->at - b->pages));
    ASAN_POISON_MEMORY_REGION(b->at + b->bytes, (size_t)(end - b->at) - b->bytes);
}

static void make_live(struct block *b)
{
    set_access(b, PROT_READ | PROT_WRITE);
    fill(b);
    b->life = LIVE;
    if (memory.protect && !memory.open && is_private(b)) set_access(b, PROT_NONE);
}

static void check_guard(const struct block *b, const char *from, const char *to)
{
    for (; from < to; from++)
        if (*from != GUARD)
            moe_double_wrong("written beyond memory of %zu bytes: byte %td", b->bytes, from - b->at);
}

static void end_life(struct block *b)
{
    set_access(b, PROT_READ | PROT_WRITE);
    ASAN_UNPOISON_MEMORY_REGION(b->pages, b->page_bytes);
    check_guard(b, b->pages, b->at);
    check_guard(b, b->at + b->bytes, b->pages + b->page_bytes);
    madvise(b->pages, b->page_bytes, MADV_DONTNEED);
    set_access(b, PROT_NONE);
    b->life = GONE;
}

/* Those that are gone say who used them; a list of thousands would be slow. */
static void forget_old(void)
{
    int gone = 0;
    for (struct block **at = &memory.blocks; *at;) {
        struct block *b = *at;
        if (b->life == GONE && ++gone > 256) {
            *at = b->next;
            free(b);
        } else {
            at = &b->next;
        }
    }
}

static size_t used_bytes(int device)
{
    size_t used = 0;
    for (const struct block *b = memory.blocks; b; b = b->next)
        if (b->life != GONE && is_private(b) && b->device == device) used += b->page_bytes;
    return used;
}

static cudaError_t new_block(struct block **out, size_t bytes, enum cudaMemoryType type)
{
    const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT,
                 page_bytes = (rounded + PAGE - 1) / PAGE * PAGE;
    const cudaError_t planted = moe_double_planted("malloc");
    struct block *b;
    reserve();
    if (planted) return planted;
    if (bytes > DEVICE_BYTES || page_bytes > DEVICE_BYTES - used_bytes(moe_double_device()))
        return cudaErrorMemoryAllocation;
    if (page_bytes + PAGE > (size_t)(memory.begin + RANGE_BYTES - memory.top))
        moe_double_wrong("the double never gives an address twice, and has no more");
    b = calloc(1, sizeof *b);
    if (!b) return cudaErrorMemoryAllocation;
    *b = (struct block){.next = memory.blocks,
                        .pages = memory.top,
                        .at = memory.top + page_bytes - rounded,
                        .page_bytes = page_bytes,
                        .bytes = bytes,
                        .type = type,
                        .device = moe_double_device()};
    memory.top += page_bytes + PAGE; // a page that nobody may touch
    memory.blocks = b;
    forget_old();
    *out = b;
    return cudaSuccess;
}

static struct block *find(const void *p)
{
    for (struct block *b = memory.blocks; b; b = b->next)
        if ((const char *)p >= b->at && (const char *)p < b->at + b->bytes) return b;
    return NULL;
}

struct moe_double_block moe_double_find(const void *p, const char *use)
{
    const struct block *b = find(p);
    if (!memory.begin || (const char *)p < memory.begin || (const char *)p >= memory.begin + RANGE_BYTES)
        return (struct moe_double_block){.type = cudaMemoryTypeUnregistered};
    if (!b || b->life == GONE) moe_double_wrong("%s: %p is %s", use, p, b ? state_of(b) : state_of(NULL));
    if (b->leaving) moe_double_wrong("%s: %p was given to cudaFreeAsync", use, p);
    return (struct moe_double_block){b->type, b->device, b->at, b->bytes};
}

bool moe_double_is_device(const void *p, size_t bytes)
{
    const struct block *b = find(p);
    return b && b->life == LIVE && bytes <= b->bytes - (size_t)((const char *)p - b->at);
}

/* ---- the API ---- */

static cudaError_t allocate(void **out, size_t bytes, enum cudaMemoryType type)
{
    struct block *b;
    int device;
    cudaError_t code = cudaGetDevice(&device);
    if (!code && !out) code = cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    *out = NULL;
    if (!bytes) return moe_double_return(cudaSuccess);
    code = new_block(&b, bytes, type);
    if (code) return moe_double_return(code);
    make_live(b);
    *out = b->at;
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    return allocate(out, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    return allocate(out, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    const unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    return flags & ~known ? moe_double_return(cudaErrorInvalidValue)
                          : allocate(out, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned int flags)
{
    if (!bytes || (flags != cudaMemAttachGlobal && flags != cudaMemAttachHost))
        return moe_double_return(cudaErrorInvalidValue);
    return allocate(out, bytes, cudaMemoryTypeManaged);
}

/* Only what an allocation returned, once. */
static struct block *to_free(const void *p, bool host)
{
    struct block *b = find(p);
    return b && b->at == p && b->life != GONE && !b->leaving && (b->type == cudaMemoryTypeHost) == host
               ? b
               : NULL;
}

/* "may perform implicit synchronization": it does every other time. Not for what comes from a pool. */
cudaError_t cudaFree(void *p)
{
    struct block *b = p ? to_free(p, false) : NULL;
    cudaError_t code = moe_double_sticky();
    if (!p || code) return moe_double_return(code);
    if (!b) return moe_double_return(cudaErrorInvalidValue);
    if (b->life == COMING) moe_double_wrong("cudaFree of memory whose cudaMallocAsync has not run");
    if (!b->pooled && moe_double_draw(2)) code = moe_double_wait(NULL);
    if (!code) end_life(b);
    return moe_double_return(code);
}

cudaError_t cudaFreeHost(void *p)
{
    struct block *b = p ? to_free(p, true) : NULL;
    if (!p || moe_double_sticky()) return moe_double_return(cudaSuccess);
    if (!b) return moe_double_return(cudaErrorInvalidValue);
    end_life(b);
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    const struct block *b = find(host);
    if (!device || flags || !b || b->life == GONE || b->type != cudaMemoryTypeHost)
        return moe_double_return(cudaErrorInvalidValue);
    *device = host;
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    const struct block *b = find(p);
    if (!out) return moe_double_return(cudaErrorInvalidValue);
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    out->hostPointer = (void *)p;
    if (b && !b->leaving && b->life != GONE) {
        out->type = b->type;
        out->device = b->device;
        out->devicePointer = (void *)p;
        if (is_private(b)) out->hostPointer = NULL;
    }
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total)
{
    if (!unused || !total) return moe_double_return(cudaErrorInvalidValue);
    *total = DEVICE_BYTES;
    *unused = DEVICE_BYTES - used_bytes(moe_double_device());
    return moe_double_return(cudaSuccess);
}

/* ---- in the order of a stream ---- */

static int allocation_step(void *ctx)
{
    make_live(ctx);
    return 1;
}

static int free_step(void *ctx)
{
    end_life(ctx);
    return 1;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    struct block *b;
    cudaError_t code = out ? moe_double_stream_check(stream) : cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    *out = NULL;
    if (!bytes) return moe_double_return(cudaSuccess);
    code = new_block(&b, bytes, cudaMemoryTypeDevice);
    if (code) return moe_double_return(code);
    b->pooled = true;
    b->device = moe_double_stream_device(stream);
    *out = b->at;
    return moe_double_return(
        moe_double_enqueue(stream, &(struct moe_double_work){"allocation", allocation_step, NULL, b}));
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream)
{
    struct block *b = to_free(p, false);
    const cudaError_t code = moe_double_stream_check(stream);
    if (code) return moe_double_return(code);
    if (!b || !b->pooled) return moe_double_return(cudaErrorInvalidValue);
    b->leaving = true;
    return moe_double_return(
        moe_double_enqueue(stream, &(struct moe_double_work){"free", free_step, NULL, b}));
}

/* The one pool of each device. */
static char pools[64];

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    if (!pool) return moe_double_return(cudaErrorInvalidValue);
    if (device < 0 || device >= (int)sizeof pools) return moe_double_return(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)(void *)&pools[device];
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
    const char *p = (const char *)pool;
    const bool known =
        attr >= cudaMemPoolReuseFollowEventDependencies && attr <= cudaMemPoolAttrReleaseThreshold;
    return moe_double_return(
        p >= pools && p < pools + sizeof pools && known && value ? cudaSuccess : cudaErrorInvalidValue);
}
