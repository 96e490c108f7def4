// As isa_avx512bf16.cpp, and products of bf16 and of int8 in tiles: Sapphire Rapids and later.
#include "isa.h"

#if TWINPOOL_HAS_AMX
#define TWINPOOL_LANES 16
#define TWINPOOL_BF16_DOT 1
#define TWINPOOL_VNNI 1
#define TWINPOOL_AMX 1

TWINPOOL_BEGIN_ISA(
    "amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace twinpool::amx {
#include "kernels.inl"
}
TWINPOOL_END_ISA
#endif
