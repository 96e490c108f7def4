// Sixteen lanes and a dot product of int8 quadruples: Cascade Lake, Ice Lake.
#include "isa.h"

#if defined(__x86_64__)
#define TWINPOOL_LANES 16
#define TWINPOOL_BF16_DOT 0
#define TWINPOOL_VNNI 1
#define TWINPOOL_AMX 0

TWINPOOL_BEGIN_ISA("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace twinpool::avx512vnni {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
