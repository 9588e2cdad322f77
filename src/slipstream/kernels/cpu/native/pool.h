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

// One loop of a job: how many of its items are done, and each member's own part of them.
struct alignas(64) Phase {
    std::atomic<int32_t> done{0};
};
struct alignas(64) Part {
    std::atomic<int32_t> next{0};
};

// End the process with a sentence: a member shares more loops than its job was said to have, and would write past them.
[[noreturn]] void out_of_phases(int num_phases);

// A member's view of one job. Members walk through the same sequence of shared loops; a loop ends when its items are
// done, not when every member has been there, so one that lost its core holds nobody up unless it holds a piece. It
// finds the loops it missed empty and catches up.
struct Team {
    int id;
    int size;
    Phase* phases;  // null for a member that works alone for a while
    Part* parts;  // [phases, size]
    int num_phases;
    int phase = 0;

    static int part_begin(int n, int member, int size) { return static_cast<int>(static_cast<int64_t>(n) * member / size); }

    template <class Body>
    SLIP_ALWAYS_INLINE void share(int n, int piece, Body body) {
        share(n, piece, body, [] {});
    }

    // Call body(begin, end) for pieces of [0, n) and wait until all of [0, n) is done. A member goes through its own
    // part from front to back, so that memory fetched ahead is its own, and then helps the others with theirs. It calls
    // idle() once before it waits.
    template <class Body, class Idle>
    SLIP_ALWAYS_INLINE void share(int n, int piece, Body body, Idle idle) {
        if (!phases) {  // a team of one
            for (int begin = 0; begin < n; begin += piece) body(begin, begin + piece < n ? begin + piece : n);
            return idle();
        }
        if (phase == num_phases) out_of_phases(num_phases);
        Phase& mine = phases[phase];
        Part* part = parts + static_cast<int64_t>(phase++) * size;
        int done = 0;
        for (int turn = 0; turn < size; ++turn) {
            const int owner = (id + turn) % size;
            const int first = part_begin(n, owner, size), last = part_begin(n, owner + 1, size);
            for (;;) {
                const int begin = first + part[owner].next.fetch_add(piece, std::memory_order_acq_rel);
                if (begin >= last) break;
                const int end = begin + piece < last ? begin + piece : last;
                body(begin, end);
                done += end - begin;
            }
        }
        if (done > 0) mine.done.fetch_add(done, std::memory_order_acq_rel);
        idle();
        for (int spins = 0; mine.done.load(std::memory_order_acquire) < n;) {
            if (++spins < 4096) cpu_pause();
            else std::this_thread::yield();  // whoever holds the last piece may need this core
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

    // After a fork the workers do not run, and cannot be waited for: calls run on one thread, and a pool is not destroyed.
    bool forked() const;

    // Run job(team) on every member; `phases` bounds the calls of Team::share a member makes.
    template <class Job>
    void run(int phases, Job job) {
        auto call = [](void* argument, Team& team) { (*static_cast<Job*>(argument))(team); };
        run_erased(phases, call, &job);
    }

  private:
    using Call = void (*)(void*, Team&);
    void run_erased(int phases, Call call, void* argument);
    void work(int id);
    void stop();

    int size_;
    long owner_;
    std::vector<Phase> phases_;
    std::vector<Part> parts_;
    Call call_ = nullptr;
    void* argument_ = nullptr;
    int num_phases_ = 0;
    // High half: the job's number, odd while members may still join it. Low half: workers inside it.
    alignas(64) std::atomic<uint64_t> state_{0};
    std::atomic<int32_t> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex caller_;
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

}  // namespace slip
