// Waiting for a socket without sleeping, for a moment: the other end is at work on what comes next.
//
// Who sleeps costs the other end a wake-up for nearly every piece, and the kernel likes to run whom a socket wakes on
// the waker's own core, where the two only take turns. Looking that was in vain is not repeated for long: then the
// link is slower than the processor, or the other end waits for the very core that looks.
#pragma once

#include <poll.h>

#include <cstdint>
#include <ctime>

namespace twinpool {

constexpr int64_t kLookNs = 50'000;
constexpr int kLooksInVain = 2;  // in one message

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  for (int i = 0; i < 32; ++i) __builtin_ia32_pause();
#endif
}

// Whether one of `events` has come within `ns`. Errors are events, too.
inline bool look(int socket, short events, int64_t ns) {
  const int64_t until = now_ns() + ns;
  pollfd wanted{socket, events, 0};
  while (poll(&wanted, 1, 0) <= 0) {
    if (now_ns() > until) return false;
    relax();
  }
  return true;
}

}  // namespace twinpool
