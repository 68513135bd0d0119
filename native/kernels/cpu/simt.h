// simt.h: runs CUDA kernels on a CPU, from the very same source.
//
// A block of threads runs on one OS thread, one after the other: as a loop where none of them waits; one that waits, at
// __syncthreads or a warp operation, keeps its stack, and the next one gets a stack of its own. Blocks are spread over OS
// threads, which are OpenMP's where the compiler is told of it; __shared__ variables are thread-local, so each block that
// runs has its own. Within a block, threads take turns in a chosen order (forward, reverse, shuffled anew between
// barriers): a kernel that lacks a barrier gives different bytes in different orders.
//
// Which kernels of the project wait here: products, at two barriers for every step of K; quantizers of any matrix and of
// FP8, at up to three a tile, with 8 threads that take many blocks each; updates of scales; amaxes of whole tensors, in a
// few blocks; and those of tiles, which a CPU takes for small matrices alone. All others run as loops.
//
// With SIMT_SANITIZE it is built for the address sanitizer: __shared__ variables are plain static ones, which alone have
// redzones, so that one block runs at a time; the sanitizer is told of each switch of stacks.
//
// Not modelled: divergence inside a warp between barriers, memory ordering weaker than the CPU's, dynamic shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <sys/mman.h>
#include <thread>
#include <utility>
#include <vector>

#if !defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#ifdef SIMT_SANITIZE
#include <sanitizer/common_interface_defs.h>
#define __shared__ static
// Of monitor.h: asks, when something is found, which thread of which kernel runs.
extern "C" void narrowgauge_running(void (*say)(char* text, std::size_t size));
#define SIMT_WITHOUT_REDZONES __attribute__((no_sanitize("address")))  // of a stack that is left for good they would stay
#else
#define __shared__ static thread_local
#define SIMT_WITHOUT_REDZONES
#endif
#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

struct uint3 {
    unsigned x, y, z;
};

namespace simt {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
#ifdef SIMT_SANITIZE
constexpr std::size_t STACK_BYTES = 256 * 1024;  // redzones lie between local variables
#else
constexpr std::size_t STACK_BYTES = 64 * 1024;
#endif

// From one stack to the next. The tops of stacks a power of two apart would all lie in the same few sets of a cache.
constexpr std::size_t STACK_STEP = STACK_BYTES + 9 * 64;

enum Order { FORWARD = 0, REVERSE = 1, SHUFFLED = 2 };

struct Launch {
    uint3 grid, block;
    int order;
    std::uint64_t seed;  // of the shuffled order
    int workers;         // OS threads
    const char* kernel;
};

// ---- switching stacks ------------------------------------------------------------------------------------------------

#ifdef SIMT_UCONTEXT
// Portable, and about a hundred times slower: every switch is a system call that saves the signal mask.
struct Stack {
    ucontext_t context;
};
inline void switch_stack(Stack& from, Stack& to) { swapcontext(&from.context, &to.context); }
inline void prepare_stack(Stack& stack, char* base, void (*entry)()) {
    getcontext(&stack.context);
    stack.context.uc_stack.ss_sp = base;
    stack.context.uc_stack.ss_size = STACK_BYTES;
    stack.context.uc_link = nullptr;
    makecontext(&stack.context, entry, 0);
}
#else
// System V x86-64: six registers survive a call; the rest is the caller's business.
extern "C" void simt_switch(void** from, void* to) __asm__("simt_switch") __attribute__((visibility("hidden")));
__asm__(
    ".text\n"
    ".globl simt_switch\n"
    ".hidden simt_switch\n"
    "simt_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

struct Stack {
    void* pointer;
};
inline void switch_stack(Stack& from, Stack& to) { simt_switch(&from.pointer, to.pointer); }
inline void prepare_stack(Stack& stack, char* base, void (*entry)()) {
    void** top = reinterpret_cast<void**>(base + STACK_BYTES);
    *--top = nullptr;                                // where entry would return to; it never does
    *--top = reinterpret_cast<void*>(entry);         // where the first switch returns to, with rsp = 8 modulo 16
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack.pointer = top;
}
#endif

// ---- a block of threads ----------------------------------------------------------------------------------------------

enum State : unsigned char { FRESH, READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

// A thread that waits, or has waited.
struct Fiber {
    Stack stack;
    int slot;  // of its stack
    unsigned mask, source;  // of the warp exchange it waits in: who takes part, the thread it reads from,
    const void* given;      // what it gives,
    void* received;         // and where what it is given goes
    std::size_t bytes;
};

struct Worker;
inline thread_local Worker* worker = nullptr;
inline thread_local uint3 thread_index, block_index;
inline thread_local const Launch* launch_shape = nullptr;

// Threads of a block take turns in rounds. A stack runs one thread after the other until one waits; the thread whose turn
// is next then gets a stack of its own, or goes on on the one it has waited on. So a block that never waits runs as a
// loop, and one in which all wait switches stacks once for each thread and barrier, always between the same two lines,
// whose return address the CPU has foreseen.
struct Worker {
    State states[MAX_THREADS];
    uint3 indices[MAX_THREADS];
    unsigned order[MAX_THREADS];
    Fiber fibers[MAX_THREADS];
    unsigned count, live, turn;  // threads, those that have not returned, and turns taken of this round
    unsigned current;            // thread that runs
    Stack scheduler;
    Stack nobody;  // whose stack is left for good
    char* stacks;
    std::vector<int> free_slots;
    void (*run)();
    void** arguments;
    std::uint64_t random;
    const void* scheduler_stack;  // where it lies, and its bytes: what the sanitizer has to know
    std::size_t scheduler_bytes;
    bool from_scheduler;

    Worker() {
        // Untouched pages cost nothing; a block that never waits touches one stack only.
        stacks = static_cast<char*>(mmap(nullptr, MAX_THREADS * STACK_STEP, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks == MAP_FAILED) {
            std::fprintf(stderr, "simt: no memory for %u thread stacks\n", MAX_THREADS);
            std::abort();
        }
        for (int slot = MAX_THREADS - 1; slot >= 0; --slot) free_slots.push_back(slot);
    }

    unsigned next_random() {  // xorshift64*
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        return static_cast<unsigned>((random * 0x2545F4914F6CDD1Dull) >> 33);
    }

    void shuffle() {
        for (unsigned i = count; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
    }

    // Whose turn is next in this round, or `count`.
    unsigned next() {
        while (turn < count) {
            const unsigned thread = order[turn++];
            if (states[thread] <= READY) return thread;
        }
        return count;
    }

    void make_current(unsigned thread) {
        states[thread] = READY;
        current = thread;
        thread_index = indices[thread];
    }

    // From the stack `from`, which is left for good or until its thread is resumed, to the next thread, or to the
    // scheduler where the round is over.
    SIMT_WITHOUT_REDZONES void leave(Stack& from, unsigned to, [[maybe_unused]] bool for_good) {
        Stack* target = &scheduler;
        [[maybe_unused]] const void* base = scheduler_stack;
        [[maybe_unused]] std::size_t bytes = scheduler_bytes;
        if (to != count) {
            Fiber& fiber = fibers[to];
            if (states[to] == FRESH) {
                fiber.slot = free_slots.back();
                free_slots.pop_back();
                prepare_stack(fiber.stack, stacks + fiber.slot * STACK_STEP, run);
            }
            make_current(to);
            target = &fiber.stack;
            base = stacks + fiber.slot * STACK_STEP;
            bytes = STACK_BYTES;
        }
        [[maybe_unused]] void* kept = nullptr;
#ifdef SIMT_SANITIZE
        __sanitizer_start_switch_fiber(for_good ? nullptr : &kept, base, bytes);
#endif
        switch_stack(from, *target);
        arrived(kept);
    }

    // To the sanitizer, a call that does not return ends the life of all that lies on the stack.
    [[noreturn]] SIMT_WITHOUT_REDZONES void leave_for_good(unsigned to, int slot) {
        free_slots.push_back(slot);
        leave(nobody, to, true);
        std::abort();  // nobody comes back
    }

    // The first thing that happens on a stack, whenever it is switched to.
    void arrived([[maybe_unused]] void* kept) {
#ifdef SIMT_SANITIZE
        const void* base = nullptr;
        std::size_t bytes = 0;
        __sanitizer_finish_switch_fiber(kept, &base, &bytes);
        if (from_scheduler) scheduler_stack = base, scheduler_bytes = bytes;
        from_scheduler = false;
#endif
    }

    void wait(State state) {
        states[current] = state;
        leave(fibers[current].stack, next(), false);
    }

    // Runs threads on this stack until one of them is not the first to run there. `call` runs one thread.
    template <class Call>
    void run_threads(const Call& call) {
        arrived(nullptr);
        const int slot = fibers[current].slot;
        for (;;) {
            call();
            states[current] = DONE;
            --live;
            const unsigned thread = next();
            if (thread == count || states[thread] != FRESH) leave_for_good(thread, slot);
            fibers[thread].slot = slot;
            make_current(thread);
        }
    }

    // What all blocks of a launch have in common.
    void prepare(const Launch& launch) {
        const uint3 shape = launch.block;
        count = shape.x * shape.y * shape.z;
        for (unsigned t = 0; t < count; ++t) {
            indices[t] = {t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
            order[t] = launch.order == REVERSE ? count - 1 - t : t;
        }
    }

    // Runs one block to its end; false where its threads wait for each other forever.
    bool run_block(const Launch& launch, unsigned linear) {
        block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                       linear / launch.grid.x / launch.grid.y};
        std::memset(states, FRESH, count);
        if (launch.order == SHUFFLED) std::iota(order, order + count, 0u);
        random = launch.seed * 0x9E3779B97F4A7C15ull + linear + 1;
        for (live = count; live > 0;) {
            if (launch.order == SHUFFLED) shuffle();
            turn = 0;
            const unsigned first = next();
            if (first != count) {
                from_scheduler = true;
                leave(scheduler, first, false);
            }
            if (live > 0 && !release() && first == count) return false;
        }
        return true;
    }

    // Lets go who has nobody left to wait for; threads that have returned are not waited for, as on a GPU.
    bool release() {
        unsigned at_block = 0;
        bool released = false;
        for (unsigned first = 0; first < count; first += WARP) {
            const unsigned last = first + WARP < count ? first + WARP : count;
            unsigned alive = 0, waiting = 0;
            for (unsigned t = first; t < last; ++t) {
                const unsigned bit = 1u << (t - first);
                if (states[t] != DONE) alive |= bit;
                if (states[t] == AT_BLOCK_BARRIER) ++at_block;
                if (states[t] == AT_WARP_BARRIER) waiting |= bit;
            }
            while (waiting != 0) {  // lanes that wait with one mask are at one exchange
                const unsigned mask = fibers[first + static_cast<unsigned>(__builtin_ctz(waiting))].mask;
                unsigned group = 0;
                for (unsigned t = first; t < last; ++t)
                    if ((waiting >> (t - first) & 1u) != 0 && fibers[t].mask == mask) group |= 1u << (t - first);
                waiting &= ~group;
                if ((alive & mask & ~group) != 0) continue;
                for (unsigned t = first; t < last; ++t) {
                    if ((group >> (t - first) & 1u) == 0) continue;
                    std::memcpy(fibers[t].received, fibers[fibers[t].source].given, fibers[t].bytes);
                    states[t] = READY;
                }
                released = true;
            }
        }
        if (at_block == live) {
            for (unsigned t = 0; t < count; ++t)
                if (states[t] == AT_BLOCK_BARRIER) states[t] = READY;
            released = true;
        }
        return released;
    }

    // Gives `value` to its warp and returns what lane `source` gave: release() hands over when all have met.
    template <class T>
    T exchange_lanes(unsigned mask, const T& value, unsigned source) {
        T given = value, received;
        Fiber& mine = fibers[current];
        mine.mask = mask;
        mine.source = current / WARP * WARP + source % WARP;
        mine.given = &given;
        mine.received = &received;
        mine.bytes = sizeof(T);
        wait(AT_WARP_BARRIER);
        return received;
    }
};

// ---- a grid of blocks ------------------------------------------------------------------------------------------------

// Workers keep their stacks between launches: fresh pages would cost more than a small kernel.
inline std::mutex idle_lock;
inline std::vector<Worker*> idle_workers;

inline Worker* take_worker() {
    std::lock_guard<std::mutex> guard(idle_lock);
    if (idle_workers.empty()) return new Worker();
    Worker* taken = idle_workers.back();
    idle_workers.pop_back();
    return taken;
}

inline void return_worker(Worker* taken) {
    std::lock_guard<std::mutex> guard(idle_lock);
    idle_workers.push_back(taken);
}

// IEEE arithmetic for a launch, whatever the caller's thread was set to: nearest even, subnormal numbers kept.
struct IeeeArithmetic {
#ifdef __SSE__
    unsigned saved = _mm_getcsr();
    IeeeArithmetic() { _mm_setcsr(0x1F80); }
    ~IeeeArithmetic() { _mm_setcsr(saved); }
#endif
};

#ifdef SIMT_SANITIZE
inline void say_where(char* text, std::size_t size) {
    const uint3 thread = thread_index, block = block_index;
    std::snprintf(text, size, "thread (%u, %u, %u) of block (%u, %u, %u) of %s", thread.x, thread.y, thread.z, block.x,
                  block.y, block.z, launch_shape->kernel);
}
#endif

// The block that runs as number `turn`. Shuffled: steps with no divisor in common with the count meet each block once.
inline unsigned block_in_turn(const Launch& launch, unsigned turn, unsigned blocks) {
    if (launch.order == FORWARD) return turn;
    if (launch.order == REVERSE) return blocks - 1 - turn;
    std::uint64_t step = blocks / 2 + 1;
    while (std::gcd(step, std::uint64_t{blocks}) != 1) ++step;
    return static_cast<unsigned>((turn * step + blocks / 3 + launch.seed - 1) % blocks);
}

// Runs a grid. Returns -1, or the linear index of a block whose threads waited for each other forever.
inline long long run_grid(const Launch& launch, void (*run)(), void** arguments) {
    const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    std::atomic<unsigned> next{0};
    std::atomic<long long> stuck{-1};
    auto work = [&] {
        IeeeArithmetic ieee;
        Worker* mine = take_worker();
        worker = mine;
        launch_shape = &launch;
        mine->run = run;
        mine->arguments = arguments;
        mine->prepare(launch);
        bool lost = false;
#ifdef SIMT_SANITIZE
        narrowgauge_running(say_where);
#endif
        for (unsigned b; !lost && (b = next.fetch_add(1)) < blocks && stuck.load() < 0;) {
            const unsigned linear = block_in_turn(launch, b, blocks);
            if (!mine->run_block(launch, linear)) {
                stuck.store(linear);
                lost = true;
            }
        }
#ifdef SIMT_SANITIZE
        narrowgauge_running(nullptr);
#endif
        if (!lost) return_worker(mine);  // a stuck block's fibers keep their stacks; the worker is given up with them
    };
#ifdef _OPENMP
    // All of them, always: the library ends and starts threads where their number changes.
#pragma omp parallel num_threads(launch.workers) if (launch.workers > 1 && blocks > 1)
    if (static_cast<unsigned>(omp_get_thread_num()) < blocks) work();
#else
    std::vector<std::thread> threads;
    for (unsigned w = 1; w < static_cast<unsigned>(launch.workers) && w < blocks; ++w) threads.emplace_back(work);
    work();
    for (auto& thread : threads) thread.join();
#endif
    return stuck.load();
}

template <class... Parameters, std::size_t... I>
inline void apply(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<Parameters*>(arguments[I])...);
}

template <auto Kernel>
struct Entry;

template <class... Parameters, void (*Kernel)(Parameters...)>
struct Entry<Kernel> {
    static constexpr int parameters = sizeof...(Parameters);
    static void run() {  // on a stack of its own, which it never leaves
        void** arguments = worker->arguments;
        worker->run_threads([=] { apply(Kernel, arguments, std::index_sequence_for<Parameters...>{}); });
    }
};

}  // namespace simt

#define threadIdx (simt::thread_index)
#define blockIdx (simt::block_index)
#define blockDim (simt::launch_shape->block)
#define gridDim (simt::launch_shape->grid)

inline void __syncthreads() { simt::worker->wait(simt::AT_BLOCK_BARRIER); }

namespace simt {

// __shfl_xor_sync of any type: what a GPU takes several of, at the price of one change of threads.
template <class T>
inline T exchange(unsigned mask, const T& value, unsigned lanes) {
    return worker->exchange_lanes(mask, value, worker->current % WARP ^ lanes);
}

}  // namespace simt

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
    static_assert(sizeof(T) <= 8, "a lane exchanges up to eight bytes");
    return simt::exchange(mask, value, lanes);
}

inline unsigned atomicMax(unsigned* address, unsigned value) {
    unsigned seen = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(address, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// One rounding: an instruction where the compiler's target has it, else the C library's, which is exact, too.
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
