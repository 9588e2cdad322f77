#include "pool.h"

#include <cfenv>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace slip {
namespace {

constexpr uint64_t kInside = 0xFFFFFFFFu;
constexpr auto kSpin = std::chrono::microseconds(150);

long process_id() {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<long>(getpid());
#else
    return 0;
#endif
}

}  // namespace

void out_of_phases(int num_phases) {
    std::fprintf(stderr, "A CPU kernel shares more loops than the %d it has counted: see its call of Pool::run.\n", num_phases);
    std::abort();
}

Pool::Pool(int size) : size_(size < 1 ? 1 : size), owner_(process_id()) {
    try {
        for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { work(id); });
    } catch (...) {  // threads that run cannot be destroyed
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

bool Pool::forked() const { return process_id() != owner_; }

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run_erased(int phases, Call call, void* argument) {
    std::lock_guard<std::mutex> one_caller(caller_);
    const size_t num_phases = static_cast<size_t>(phases), num_parts = num_phases * static_cast<size_t>(size_);
    if (phases_.size() < num_phases) {  // both or neither, should memory run out
        std::vector<Phase> more_phases(num_phases);
        std::vector<Part> more_parts(num_parts);
        phases_.swap(more_phases);
        parts_.swap(more_parts);
    }
    for (size_t i = 0; i < num_phases; ++i) phases_[i].done.store(0, std::memory_order_relaxed);
    for (size_t i = 0; i < num_parts; ++i) parts_[i].next.store(0, std::memory_order_relaxed);
    Team team{0, size_, phases_.data(), parts_.data(), phases};
    if (size_ == 1 || forked()) {
        call(argument, team);
        return;
    }
    call_ = call;
    argument_ = argument;
    num_phases_ = phases;
    const uint64_t open = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(open << 32, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(sleep_); }
        wake_.notify_all();
    }
    call(argument, team);
    state_.fetch_add(uint64_t{1} << 32, std::memory_order_acq_rel);  // closed: nobody joins any more
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0;) {
        if (++spins < 4096) cpu_pause();
        else std::this_thread::yield();
    }
}

void Pool::work(int id) {
    std::fesetenv(FE_DFL_ENV);  // not what its creator has set
    uint64_t last = 0;
    const auto joinable = [&](uint64_t state) { return (state >> 32) % 2 == 1 && state >> 32 != last; };
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        while (!joinable(state_.load(std::memory_order_acquire)) && !stop_.load(std::memory_order_relaxed)) {
            for (int i = 0; i < 32; ++i) cpu_pause();
            if (std::chrono::steady_clock::now() < until) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return joinable(state_.load(std::memory_order_seq_cst)) || stop_.load(); });
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (stop_.load()) return;
        uint64_t state = state_.load(std::memory_order_acquire);
        while (joinable(state) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        }
        if (!joinable(state)) continue;  // it closed before we joined
        last = state >> 32;
        Team team{id, size_, phases_.data(), parts_.data(), num_phases_};
        call_(argument_, team);
        state_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace slip
