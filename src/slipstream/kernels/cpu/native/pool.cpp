#include "pool.h"

#include <chrono>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace slip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(150);

long process_id() {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<long>(getpid());
#else
    return 0;
#endif
}

}  // namespace

Pool::Pool(int size) : size_(size < 1 ? 1 : size), owner_(process_id()) {
    for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { work(id); });
}

Pool::~Pool() {
    if (process_id() != owner_) {  // after a fork the workers are not ours, nor running
        for (auto& thread : threads_) thread.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run_erased(int phases, Call call, void* argument) {
    std::lock_guard<std::mutex> one_caller(caller_);
    const bool alone = size_ == 1 || process_id() != owner_;
    if (static_cast<int>(shared_.counters.size()) < phases) shared_.counters = std::vector<Counter>(phases);
    for (int phase = 0; phase < phases; ++phase) shared_.counters[phase].value.store(0, std::memory_order_relaxed);
    if (alone) {
        Team team{0, 1, &shared_};
        call(argument, team);
        return;
    }
    call_ = call;
    argument_ = argument;
    running_.store(size_ - 1, std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(sleep_); }
        wake_.notify_all();
    }
    Team team{0, size_, &shared_};
    call(argument, team);
    int spins = 0;
    while (running_.load(std::memory_order_acquire) != 0) {
        if (++spins < 4096) cpu_pause();
        else std::this_thread::yield();
    }
}

void Pool::work(int id) {
    int64_t done = 0;
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        while (job_.load(std::memory_order_acquire) == done && !stop_.load(std::memory_order_relaxed)) {
            for (int i = 0; i < 32; ++i) cpu_pause();
            if (std::chrono::steady_clock::now() < until) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return job_.load(std::memory_order_seq_cst) != done || stop_.load(); });
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        ++done;  // the caller waits for every member, so jobs are never skipped
        Team team{id, size_, &shared_};
        call_(argument_, team);
        running_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace slip
