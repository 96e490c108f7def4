// Eight lanes with fused multiply-add: Haswell, Zen and later.
#include "isa.h"

#if defined(__x86_64__)
#define TWINPOOL_LANES 8
#define TWINPOOL_BF16_DOT 0
#define TWINPOOL_VNNI 0
#define TWINPOOL_AMX 0

TWINPOOL_BEGIN_ISA("avx2,fma")
namespace twinpool::avx2 {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
