#include "amx.h"

#include "kernels.h"

#if TWINPOOL_HAS_AMX && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace twinpool {
namespace {

constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
constexpr uint64_t kTileState = 3u << 17;                    // in XCR0: configuration and data
constexpr unsigned kOsSavesState = 1u << 27;                 // leaf 1, ECX
constexpr unsigned kTiles = 1u << 24 | 1u << 22 | 1u << 25;  // leaf 7, EDX: tiles, of bf16, of int8

std::string ask() {
  if (!has_amx()) return "this processor has no AMX";
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  if (!(ecx & kOsSavesState)) return "the operating system saves no extended state";
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileState) != kTileState) return "the operating system does not save tiles";
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return std::string("the kernel refused permission for tiles (arch_prctl: ") + std::strerror(errno) + ")";
  return "";
}

}  // namespace

bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTiles) == kTiles;
}

const char* why_no_amx() {
  static const std::string reason = ask();
  return reason.c_str();
}

}  // namespace twinpool
#else
namespace twinpool {
bool has_amx() { return false; }
const char* why_no_amx() { return "not built for it"; }
}  // namespace twinpool
#endif
