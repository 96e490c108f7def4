// Sixteen lanes and dot products of bf16 pairs and of int8 quadruples: Sapphire Rapids, Zen 4 and later.
#include "isa.h"

#if defined(__x86_64__)
#define TWINPOOL_LANES 16
#define TWINPOOL_BF16_DOT 1
#define TWINPOOL_VNNI 1
#define TWINPOOL_AMX 0

TWINPOOL_BEGIN_ISA("avx512bf16,avx512vnni,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace twinpool::avx512bf16 {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
