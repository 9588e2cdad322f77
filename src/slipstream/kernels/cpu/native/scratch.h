// Memory that calls share: it grows to the largest call and is handed out in 64-byte lines.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace slip {

class Scratch {
  public:
    ~Scratch() { std::free(data_); }

    // Start handing out memory: first to measure what is needed, then for good.
    inline __attribute__((always_inline)) void begin(bool for_good) {
        if (for_good && used_ > size_) {
            const int64_t size = used_ + used_ / 4;
            std::free(data_);
            data_ = nullptr;
            size_ = 0;  // until there is memory: a later call may want less
            if (posix_memalign(reinterpret_cast<void**>(&data_), 64, static_cast<size_t>(size)) != 0) throw std::bad_alloc();
            size_ = size;
        }
        used_ = 0;
        measuring_ = !for_good;
    }

    template <class T>
    inline __attribute__((always_inline)) T* take(int64_t count) {
        const int64_t at = used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return measuring_ ? nullptr : reinterpret_cast<T*>(data_ + at);
    }

  private:
    char* data_ = nullptr;
    int64_t size_ = 0;
    int64_t used_ = 0;
    bool measuring_ = true;
};

// A call that makes other calls keeps what lives between them in scratch memory of its own.
struct Workspaces {
    Scratch call, chain, round, rounds;
};

}  // namespace slip
