// One team of persistent threads: the caller is member 0, workers spin briefly for the next job and then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// What several instruction sets compile must not be shared between them by the linker, so it is inlined.
#define SLIP_ALWAYS_INLINE inline __attribute__((always_inline))

namespace slip {

SLIP_ALWAYS_INLINE void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct alignas(64) Counter {
    std::atomic<int32_t> value{0};
};

struct Shared {
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<int32_t> generation{0};
    std::vector<Counter> counters;
};

// A member's view of one job: its number, barriers, and loops whose pieces go to whoever is free.
struct Team {
    int id;
    int size;
    Shared* shared;
    int phase = 0;

    SLIP_ALWAYS_INLINE void barrier() {
        if (size == 1) return;
        const int32_t generation = shared->generation.load(std::memory_order_relaxed);
        if (shared->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            shared->arrived.store(0, std::memory_order_relaxed);
            shared->generation.store(generation + 1, std::memory_order_release);
            return;
        }
        int spins = 0;
        while (shared->generation.load(std::memory_order_acquire) == generation) {
            if (++spins < 4096) cpu_pause();
            else std::this_thread::yield();  // a member lost its core; let it have ours
        }
    }

    // Call body(begin, end) for pieces of [0, n); every member must make the same sequence of calls.
    template <class Body>
    SLIP_ALWAYS_INLINE void pieces(int n, int piece, Body body) {
        const int my_phase = phase++;
        if (size == 1) {
            for (int begin = 0; begin < n; begin += piece) body(begin, begin + piece < n ? begin + piece : n);
            return;
        }
        std::atomic<int32_t>& next = shared->counters[my_phase].value;
        for (;;) {
            const int begin = next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= n) return;
            body(begin, begin + piece < n ? begin + piece : n);
        }
    }
};

class Pool {
  public:
    explicit Pool(int size);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Run job(team) on every member; `phases` bounds the calls of Team::pieces a member makes.
    template <class Job>
    void run(int phases, Job job) {
        auto call = [](void* argument, Team& team) { (*static_cast<Job*>(argument))(team); };
        run_erased(phases, call, &job);
    }

  private:
    using Call = void (*)(void*, Team&);
    void run_erased(int phases, Call call, void* argument);
    void work(int id);

    int size_;
    long owner_;
    Shared shared_;
    Call call_ = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<int64_t> job_{0};
    alignas(64) std::atomic<int32_t> running_{0};
    std::atomic<int32_t> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex caller_;
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

}  // namespace slip
