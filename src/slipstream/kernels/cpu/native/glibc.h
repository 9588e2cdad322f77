// Included before every unit on Linux: functions that a newer glibc or libstdc++ versioned anew are bound to their older
// versions, so that a library built on a recent system loads wherever the manylinux_2_28 tag of our wheels promises it.
#pragma once
#include <features.h>
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
// std::condition_variable::wait(std::unique_lock<std::mutex>&)
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
