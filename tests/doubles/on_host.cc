// on_host.cc - see on_host.h. What threads wait for is a condition on the block or on their warp; how they
// wait is all that fibers and threads differ in.
#include "tests/doubles/on_host.h"

#include <cstdio>
#include <vector>
#ifdef MOE_ON_HOST_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <memory>
#include <sys/mman.h>
#include <ucontext.h>
#endif

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define START_SWITCH(fake, bottom, size) __sanitizer_start_switch_fiber(fake, bottom, size)
#define FINISH_SWITCH(fake, bottom, size) __sanitizer_finish_switch_fiber(fake, bottom, size)
#else
#define START_SWITCH(fake, bottom, size) (void)0
#define FINISH_SWITCH(fake, bottom, size) (void)0
#endif

namespace moe_on_host {

namespace {

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr size_t MOST_SHARED = 48 << 10; // what every GPU gives without being asked for more

// Where threads meet: the block's barrier, or a warp's exchange.
struct meeting {
    unsigned arrived = 0, mask = 0, released = 0; // lanes that came, of these, and those that have not left
    unsigned done = 0;                            // meetings so far
    uint64_t value[WARP] = {};
#ifdef MOE_ON_HOST_THREADS
    std::mutex lock; // one a meeting: a lock for all would order what nothing orders on a GPU
    std::condition_variable changed;
#endif
};

struct grid {
    dim3 blocks, threads;
    size_t shared;
    std::function<void()> body;
};

struct range {
    void *at;
    size_t bytes;
};

// The block that runs.
struct {
    const grid *of;
    index at;
    unsigned n;
    meeting barrier;
    meeting warps[MOST_THREADS / WARP];
    std::vector<unsigned char> dynamic;
} block;

std::vector<range> &sites()
{
    static std::vector<range> all;
    return all;
}

[[noreturn]] void wrong(const char *what)
{
    fprintf(stderr, "on_host: block (%u,%u,%u): %s\n", block.at.x, block.at.y, block.at.z, what);
    abort();
}

// Not zero, and as a float, an int or an index of no use.
void spoil(void *at, size_t bytes)
{
    if (bytes) memset(at, 0xa5, bytes);
}

place place_of(unsigned i)
{
    const dim3 &d = block.of->threads;
    return {{i % d.x, i / d.x % d.y, i / d.x / d.y}, block.at, d, block.of->blocks};
}

struct self {
    unsigned number; // in the block
    place at;
};

#ifdef MOE_ON_HOST_THREADS

thread_local self current;

self &me()
{
    return current;
}

// Changes what others wait for, and waits while `blocked`.
void meet_at(meeting &m, const std::function<void()> &change, const std::function<bool()> &blocked)
{
    std::unique_lock<std::mutex> held(m.lock);
    change();
    m.changed.notify_all();
    m.changed.wait(held, [&] { return !blocked(); });
}

void run_threads()
{
    std::vector<std::thread> all;
    for (unsigned i = 0; i < block.n; i++)
        all.emplace_back([i] {
            current = {i, place_of(i)};
            block.of->body();
        });
    for (std::thread &t : all) t.join();
}

#else

constexpr size_t STACK = 256 << 10, GUARD = 4096;

// A fiber runs threads one after the other until one has to wait; then another fiber takes the next ones.
struct fiber {
    self of;
    ucontext_t context;
    char *stack;
    void *fake;                              // the sanitizer's, of a fiber that is not running
    bool busy;                               // inside a thread
    const std::function<bool()> *blocked_by; // what that thread waits for
};

struct {
    std::vector<std::unique_ptr<fiber>> fibers;
    fiber *running;
    ucontext_t context;
    void *fake;
    const void *bottom;
    size_t size;
    unsigned next, done; // threads begun and ended
} scheduler;

self &me()
{
    return scheduler.running->of;
}

void leave()
{
    fiber *f = scheduler.running;
    START_SWITCH(&f->fake, scheduler.bottom, scheduler.size);
    swapcontext(&f->context, &scheduler.context);
    FINISH_SWITCH(f->fake, &scheduler.bottom, &scheduler.size);
}

void enter(fiber *f)
{
    scheduler.running = f;
    START_SWITCH(&scheduler.fake, f->stack + GUARD, STACK - GUARD);
    swapcontext(&scheduler.context, &f->context);
    FINISH_SWITCH(scheduler.fake, nullptr, nullptr);
}

void run_fiber()
{
    FINISH_SWITCH(nullptr, &scheduler.bottom, &scheduler.size);
    for (;;) {
        fiber *f = scheduler.running;
        f->busy = true;
        while (scheduler.next < block.n) {
            const unsigned i = scheduler.next++;
            f->of = {i, place_of(i)};
            block.of->body();
            scheduler.done++;
        }
        f->busy = false;
        leave();
    }
}

fiber *idle_fiber()
{
    for (auto &f : scheduler.fibers)
        if (!f->busy) return f.get();
    scheduler.fibers.emplace_back(new fiber());
    fiber *f = scheduler.fibers.back().get();
    void *stack =
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, GUARD, PROT_NONE)) wrong("no memory for a stack");
    f->stack = static_cast<char *>(stack);
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack + GUARD;
    f->context.uc_stack.ss_size = STACK - GUARD;
    f->context.uc_link = nullptr;
    makecontext(&f->context, run_fiber, 0);
    return f;
}

void meet_at(meeting &, const std::function<void()> &change, const std::function<bool()> &blocked)
{
    change();
    while (blocked()) {
        scheduler.running->blocked_by = &blocked;
        leave();
    }
}

void run_threads()
{
    scheduler.next = scheduler.done = 0;
    while (scheduler.done < block.n) {
        bool moved = scheduler.next < block.n;
        if (moved) enter(idle_fiber());
        for (size_t i = 0; i < scheduler.fibers.size(); i++) {
            fiber *f = scheduler.fibers[i].get();
            if (!f->busy || (*f->blocked_by)()) continue;
            moved = true;
            enter(f);
        }
        if (moved) continue;
        fprintf(stderr, "on_host: %u of %u threads ended, %u are at __syncthreads\n", scheduler.done, block.n,
                block.barrier.arrived);
        wrong("threads wait for threads that do not come");
    }
}

#endif

// A lane brings a value, waits for those of its mask, and takes what it came for.
void meet(unsigned mask, uint64_t value, const std::function<void(const meeting &)> &take)
{
    const unsigned w = me().number / WARP, own = 1u << me().number % WARP, here = block.n - w * WARP;
    meeting &m = block.warps[w];
    unsigned before = 0;
    if (here < WARP) mask &= (1u << here) - 1; // lanes that the block does not have
    if (!(mask & own)) wrong("a lane that its own mask does not name");
    meet_at(
        m, [] {}, [&] { return m.released != 0; }); // those of the exchange before leave first
    meet_at(
        m,
        [&] {
            before = m.done;
            if (!m.arrived) m.mask = mask;
            if (m.mask != mask) wrong("lanes of a warp name different masks");
            m.value[me().number % WARP] = value;
            m.arrived |= own;
            if (m.arrived != mask) return;
            m.arrived = 0;
            m.released = mask;
            m.done++;
        },
        [&] { return m.done == before; });
    meet_at(
        m,
        [&] {
            take(m);
            m.released &= ~own;
        },
        [] { return false; });
}

void run_grid(void *work)
{
    const grid *g = static_cast<const grid *>(work);
    block.of = g;
    block.n = g->threads.x * g->threads.y * g->threads.z;
    for (unsigned z = 0; z < g->blocks.z; z++)
        for (unsigned y = 0; y < g->blocks.y; y++)
            for (unsigned x = 0; x < g->blocks.x; x++) {
                block.at = {x, y, z};
                // A new block of memory, so that what is beyond its end is nobody's.
                std::vector<unsigned char>(g->shared).swap(block.dynamic);
                spoil(block.dynamic.data(), g->shared);
                for (const range &s : sites()) spoil(s.at, s.bytes);
                run_threads();
            }
}

void drop_grid(void *work)
{
    delete static_cast<grid *>(work);
}

} // namespace

const place &here()
{
    return me().at;
}

unsigned lane()
{
    return me().number % WARP;
}

void *dynamic()
{
    return block.dynamic.data();
}

site::site(void *at, size_t bytes)
{
#ifdef MOE_ON_HOST_THREADS
    static std::mutex lock;
    std::lock_guard<std::mutex> held(lock);
#endif
    sites().push_back({at, bytes});
    spoil(at, bytes);
}

void sync_block()
{
    meeting &m = block.barrier;
    unsigned before = 0;
    meet_at(
        m,
        [&] {
            before = m.done;
            if (++m.arrived < block.n) return;
            m.arrived = 0;
            m.done++;
        },
        [&] { return m.done == before; });
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned from)
{
    uint64_t taken = value;
    meet(mask, value, [&](const meeting &m) {
        if (from < WARP && m.mask >> from & 1) taken = m.value[from];
    });
    return taken;
}

unsigned vote(unsigned mask, bool value)
{
    unsigned votes = 0;
    meet(mask, value, [&](const meeting &m) {
        for (unsigned i = 0; i < WARP; i++)
            if (m.mask >> i & 1 && m.value[i]) votes |= 1u << i;
    });
    return votes;
}

int launch(dim3 blocks, dim3 threads, size_t shared, void *stream, std::function<void()> body)
{
    constexpr int INVALID_CONFIGURATION = 9; // cudaErrorInvalidConfiguration
    const uint64_t n = (uint64_t)threads.x * threads.y * threads.z;
    if (!n || n > MOST_THREADS || threads.z > 64 || !blocks.x || !blocks.y || !blocks.z ||
        blocks.x > 0x7fffffffu || blocks.y > 65535 || blocks.z > 65535 || shared > MOST_SHARED)
        return INVALID_CONFIGURATION;
    return moe_on_host_submit(stream, run_grid, drop_grid,
                              new grid{blocks, threads, shared, std::move(body)});
}

} // namespace moe_on_host

static int run_now(void *, void (*run)(void *), void (*drop)(void *), void *work)
{
    run(work);
    drop(work);
    return 0;
}

int (*moe_on_host_submit)(void *, void (*)(void *), void (*)(void *), void *) = run_now;
