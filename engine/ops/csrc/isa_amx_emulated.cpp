// isa_amx.cpp with tiles in software: the same kernels, for tests on machines that have all but the tiles.
#include "isa.h"

#if defined(__x86_64__)
#define TWINPOOL_LANES 16
#define TWINPOOL_BF16_DOT 1
#define TWINPOOL_VNNI 1
#define TWINPOOL_AMX 2

TWINPOOL_BEGIN_ISA("avx512bf16,avx512vnni,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace twinpool::amx_emulated {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
