// The tile registers of AMX, eight of 16 rows of 64 bytes: each function is one instruction. The compiler knows nothing
// of tiles; "memory" keeps its own stores before the loads and its loads behind the stores.

TWINPOOL_INLINE void tiles_are_free() {}  // only looked at in tests

TWINPOOL_INLINE void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
TWINPOOL_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int kRegister>
TWINPOOL_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister) : "memory");
}

// Rows are `stride` bytes apart.
template <int kRegister>
TWINPOOL_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kRegister), "r"(from), "r"(stride) : "memory");
}

template <int kRegister>
TWINPOOL_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kRegister), "r"(to), "r"(stride) : "memory");
}

// Sums += rows * columns: pairs of bf16 into fp32,
template <int kSums, int kRows, int kColumns>
TWINPOOL_INLINE void tile_multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns) : "memory");
}

// or quadruples of unsigned by signed bytes into int32.
template <int kSums, int kRows, int kColumns>
TWINPOOL_INLINE void tile_multiply_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns) : "memory");
}
