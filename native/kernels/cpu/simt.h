// simt.h: runs CUDA kernels on a CPU, from the same source.
//
// All threads of a block run on a single OS thread, one after the other. Without barriers they run as a loop on one stack. A
// thread that waits, at __syncthreads or a warp operation, keeps its stack, and the next thread runs on a new stack: threads
// are fibers. Blocks are distributed over OS threads, with OpenMP if the compiler supports it. __shared__ variables are
// thread-local, so every running block has its own. Threads of a block run in a chosen order: forward, reverse, or shuffled
// again after every barrier. A kernel with a missing barrier gives different bytes in different orders.
//
// Kernels with barriers on a CPU: GEMMs, two barriers for a step of K; quantize kernels of any matrix and of FP8, up to three
// for a tile, with 8 threads for many blocks; the update of scales; the amax of a tensor, in few blocks; and the kernels of
// whole tiles, which a CPU uses for small matrices only. All other kernels run as loops.
//
// SIMT_SANITIZE builds for the address sanitizer: __shared__ variables are plain static variables, because thread-local
// variables have no redzones, and one block runs at a time. The sanitizer is notified of every stack switch.
//
// Not modelled: divergence inside a warp between barriers, memory ordering weaker than the CPU's, dynamic shared memory.
#pragma once

// <mutex>, <thread>, <vector> and <numeric> would be half of the compile time of a small source.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <utility>

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
#else
#include <thread>
#include <vector>
#endif

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#ifdef SIMT_SANITIZE
#include <sanitizer/common_interface_defs.h>
#define __shared__ static
// In monitor.h: registers the function that describes the running thread and kernel for a finding.
extern "C" void narrowgauge_running(void (*say)(char* text, std::size_t size));
#define SIMT_WITHOUT_REDZONES __attribute__((no_sanitize("address")))  // redzones would remain on an abandoned stack
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

// Distance of stacks. Stack tops at distances of a power of two would share few cache sets.
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
// Portable, and about a hundred times slower: every switch is a system call for the signal mask.
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
// System V x86-64: a call preserves six registers; the caller saves all others.
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
    *--top = nullptr;                                // return address of entry, which never returns
    *--top = reinterpret_cast<void*>(entry);         // return address of the first switch, with rsp = 8 modulo 16
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack.pointer = top;
}
#endif

// ---- a block of threads ----------------------------------------------------------------------------------------------

enum State : unsigned char { FRESH, READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

// A thread with a stack of its own.
struct Fiber {
    Stack stack;
    int slot;  // number of the stack
    // Pending warp exchange: participating lanes, the source thread, the sent value and the destination.
    unsigned mask, source;
    const void* given;
    void* received;
    std::size_t bytes;
};

struct Worker;
inline thread_local Worker* worker = nullptr;
inline thread_local uint3 thread_index, block_index;
inline thread_local const Launch* launch_shape = nullptr;

// Threads of a block run in rounds. A stack runs one thread after the other until a thread waits. Then the next thread starts
// on a new stack, or continues on its own. A block without barriers runs as a loop. In a block where all threads wait, every
// thread costs one stack switch per barrier, always between the same two lines, with a predicted return address.
struct Worker {
    State states[MAX_THREADS];
    uint3 indices[MAX_THREADS];
    unsigned order[MAX_THREADS];
    Fiber fibers[MAX_THREADS];
    unsigned count, live, position;  // threads; threads that have not returned; position in the order of this round
    unsigned current;                // running thread
    Stack scheduler;
    Stack abandoned;
    char* stacks;
    int free_slots[MAX_THREADS];
    unsigned free_count = 0;
    Worker* next_idle = nullptr;
    void (*run)();
    void** arguments;
    std::uint64_t random;
    const void* scheduler_stack;  // address and size, for the sanitizer
    std::size_t scheduler_bytes;
    bool from_scheduler;

    Worker() {
        // Untouched pages are free; a block without barriers touches one stack.
        stacks = static_cast<char*>(mmap(nullptr, MAX_THREADS * STACK_STEP, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks == MAP_FAILED) {
            std::fprintf(stderr, "simt: no memory for %u thread stacks\n", MAX_THREADS);
            std::abort();
        }
        for (int slot = MAX_THREADS - 1; slot >= 0; --slot) free_slots[free_count++] = slot;
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

    // The next thread of this round, or `count`.
    unsigned next() {
        while (position < count) {
            const unsigned thread = order[position++];
            if (states[thread] <= READY) return thread;
        }
        return count;
    }

    void make_current(unsigned thread) {
        states[thread] = READY;
        current = thread;
        thread_index = indices[thread];
    }

    // Switches from the stack `from` to thread `to`, or to the scheduler at the end of the round. `for_good`: the stack `from`
    // is abandoned.
    SIMT_WITHOUT_REDZONES void leave(Stack& from, unsigned to, [[maybe_unused]] bool for_good) {
        Stack* target = &scheduler;
        [[maybe_unused]] const void* base = scheduler_stack;
        [[maybe_unused]] std::size_t bytes = scheduler_bytes;
        if (to != count) {
            Fiber& fiber = fibers[to];
            if (states[to] == FRESH) {
                fiber.slot = free_slots[--free_count];
                prepare_stack(fiber.stack, stacks + fiber.slot * STACK_STEP, run);
            }
            make_current(to);
            target = &fiber.stack;
            base = stacks + fiber.slot * STACK_STEP;
            bytes = STACK_BYTES;
        }
        [[maybe_unused]] void* fake_stack = nullptr;
#ifdef SIMT_SANITIZE
        __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack, base, bytes);
#endif
        switch_stack(from, *target);
        arrived(fake_stack);
    }

    // For the sanitizer, a noreturn call ends the lifetime of all variables on the stack.
    [[noreturn]] SIMT_WITHOUT_REDZONES void leave_for_good(unsigned to, int slot) {
        free_slots[free_count++] = slot;
        leave(abandoned, to, true);
        std::abort();  // unreachable
    }

    // Called first after every switch to a stack.
    void arrived([[maybe_unused]] void* fake_stack) {
#ifdef SIMT_SANITIZE
        const void* base = nullptr;
        std::size_t bytes = 0;
        __sanitizer_finish_switch_fiber(fake_stack, &base, &bytes);
        if (from_scheduler) scheduler_stack = base, scheduler_bytes = bytes;
        from_scheduler = false;
#endif
    }

    void wait(State state) {
        states[current] = state;
        leave(fibers[current].stack, next(), false);
    }

    // Runs new threads on this stack until the next thread has a stack already. `call` runs one thread.
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

    // State that all blocks of a launch share.
    void prepare(const Launch& launch) {
        const uint3 shape = launch.block;
        count = shape.x * shape.y * shape.z;
        for (unsigned t = 0; t < count; ++t) {
            indices[t] = {t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
            order[t] = launch.order == REVERSE ? count - 1 - t : t;
        }
    }

    // Runs a block to its end. False if its threads are deadlocked.
    bool run_block(const Launch& launch, unsigned linear) {
        block_index = {linear % launch.grid.x, linear / launch.grid.x % launch.grid.y,
                       linear / launch.grid.x / launch.grid.y};
        std::memset(states, FRESH, count);
        for (unsigned t = 0; launch.order == SHUFFLED && t < count; ++t) order[t] = t;
        random = launch.seed * 0x9E3779B97F4A7C15ull + linear + 1;
        for (live = count; live > 0;) {
            if (launch.order == SHUFFLED) shuffle();
            position = 0;
            const unsigned first = next();
            if (first != count) {
                from_scheduler = true;
                leave(scheduler, first, false);
            }
            if (live > 0 && !release() && first == count) return false;
        }
        return true;
    }

    // Releases threads whose barrier or exchange is complete. As on a GPU, barriers do not wait for returned threads.
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
            while (waiting != 0) {  // lanes with equal masks take part in the same exchange
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

    // Sends `value` to the warp and returns the value of lane `source`; release() copies values when all lanes have arrived.
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

// Workers keep their stacks between launches: new pages would cost more than a small kernel.
inline pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
inline Worker* idle_workers = nullptr;

inline Worker* take_worker() {
    pthread_mutex_lock(&idle_lock);
    Worker* taken = idle_workers;
    if (taken) idle_workers = taken->next_idle;
    pthread_mutex_unlock(&idle_lock);
    return taken ? taken : new Worker();
}

inline void return_worker(Worker* taken) {
    pthread_mutex_lock(&idle_lock);
    taken->next_idle = idle_workers;
    idle_workers = taken;
    pthread_mutex_unlock(&idle_lock);
}

// IEEE arithmetic during a launch, for any mode of the calling thread: nearest even, with subnormal numbers.
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

inline std::uint64_t common_divisor(std::uint64_t a, std::uint64_t b) { return b ? common_divisor(b, a % b) : a; }

// The block at a position of the order. Shuffled: a step coprime to the number of blocks visits every block once.
inline unsigned block_at(const Launch& launch, unsigned position, unsigned blocks) {
    if (launch.order == FORWARD) return position;
    if (launch.order == REVERSE) return blocks - 1 - position;
    std::uint64_t step = blocks / 2 + 1;
    while (common_divisor(step, blocks) != 1) ++step;
    return static_cast<unsigned>((position * step + blocks / 3 + launch.seed - 1) % blocks);
}

// Runs a grid. Returns -1, or the linear index of a deadlocked block.
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
        bool deadlock = false;
#ifdef SIMT_SANITIZE
        narrowgauge_running(say_where);
#endif
        for (unsigned b; !deadlock && (b = next.fetch_add(1)) < blocks && stuck.load() < 0;) {
            const unsigned linear = block_at(launch, b, blocks);
            if (!mine->run_block(launch, linear)) {
                stuck.store(linear);
                deadlock = true;
            }
        }
#ifdef SIMT_SANITIZE
        narrowgauge_running(nullptr);
#endif
        if (!deadlock) return_worker(mine);  // a worker with a deadlocked block is leaked, with the stacks of its fibers
    };
#ifdef _OPENMP
    // Always all threads: the OpenMP library ends and starts threads when their number changes.
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
    static void run() {  // entry of a new stack; never returns
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

// __shfl_xor_sync of any type, for one stack switch. A GPU needs several shuffles.
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

template <class T>
inline T __shfl_sync(unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= 8, "a lane sends up to eight bytes");
    return simt::worker->exchange_lanes(mask, value, lane);
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

// One rounding: an instruction if the target has fused multiply-add, else the C library, which rounds correctly as well.
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
