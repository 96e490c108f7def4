// Four lanes, nothing beyond what every x86-64 and aarch64 has.
#include "isa.h"

#define TWINPOOL_LANES 4
#define TWINPOOL_BF16_DOT 0
#define TWINPOOL_VNNI 0
#define TWINPOOL_AMX 0

namespace twinpool::generic {
#include "kernels.inl"
}
