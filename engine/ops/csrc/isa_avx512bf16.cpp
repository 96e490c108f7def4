// Sixteen lanes and a dot product of bf16 pairs: Cooper Lake, Sapphire Rapids, Zen 4 and later.
#include "isa.h"

#if defined(__x86_64__)
#define TWINPOOL_LANES 16
#define TWINPOOL_BF16_DOT 1

TWINPOOL_BEGIN_ISA("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace twinpool::avx512bf16 {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
