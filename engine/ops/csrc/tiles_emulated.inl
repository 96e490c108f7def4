// tiles_amx.inl in software, for tests on machines without AMX: what Intel's Software Developer's Manual, volume 2,
// says of LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS and TDPBUSD, palette 1. Where the
// processor would raise an exception, it ends the process.

struct TileState {
  bool configured = false;
  TileShapes shapes;
  alignas(64) uint8_t tiles[8][16][64];
};
inline TileState& tile_state() {
  thread_local TileState state;
  return state;
}

inline void tile_check(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", rule);
  std::abort();
}

inline void tiles_are_free() { tile_check(!tile_state().configured, "a task before this one left tiles configured"); }

inline void tile_configure(const TileShapes& shapes) {
  TileState& state = tile_state();
  tile_check(shapes.palette == 1 && shapes.start_row == 0, "#GP: a palette other than 1, or a start row");
  for (uint8_t byte : shapes.reserved) tile_check(byte == 0, "#GP: reserved bytes of the configuration are not zero");
  for (int i = 0; i < 16; ++i) {
    tile_check(i < 8 || (shapes.rows[i] == 0 && shapes.row_bytes[i] == 0), "#GP: a ninth tile");
    tile_check(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64, "#GP: a tile larger than 16 rows of 64 bytes");
    tile_check((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0), "#GP: a tile of rows without columns, or reverse");
  }
  state.configured = true;
  state.shapes = shapes;
  std::memset(state.tiles, 0, sizeof state.tiles);
}

inline void tile_release() { tile_state().configured = false; }

inline TileState& configured_tile(int tile) {
  TileState& state = tile_state();
  tile_check(state.configured, "#UD: tiles are not configured");
  tile_check(state.shapes.rows[tile] != 0, "#UD: a tile without a shape");
  return state;
}

template <int kRegister>
void tile_zero() {
  TileState& state = configured_tile(kRegister);
  std::memset(state.tiles[kRegister], 0, sizeof state.tiles[kRegister]);
}

template <int kRegister>
void tile_load(const void* from, int64_t stride) {
  tile_zero<kRegister>();  // what lies outside of the shape
  TileState& state = configured_tile(kRegister);
  for (int row = 0; row < state.shapes.rows[kRegister]; ++row)
    std::memcpy(state.tiles[kRegister][row], static_cast<const char*>(from) + row * stride,
                state.shapes.row_bytes[kRegister]);
}

template <int kRegister>
void tile_store(void* to, int64_t stride) {
  const TileState& state = configured_tile(kRegister);
  for (int row = 0; row < state.shapes.rows[kRegister]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, state.tiles[kRegister][row], state.shapes.row_bytes[kRegister]);
}

inline TileState& multipliable_tiles(int sums, int rows, int columns) {
  TileState& state = configured_tile(sums);
  configured_tile(rows), configured_tile(columns);
  const TileShapes& shapes = state.shapes;
  tile_check(sums != rows && sums != columns && rows != columns, "#UD: one tile as two operands");
  tile_check(shapes.row_bytes[sums] % 4 == 0 && shapes.row_bytes[rows] % 4 == 0 && shapes.row_bytes[columns] % 4 == 0,
             "#UD: rows that are not whole words");
  tile_check(shapes.rows[sums] == shapes.rows[rows], "#UD: sums and rows differ in number");
  tile_check(shapes.row_bytes[sums] == shapes.row_bytes[columns], "#UD: sums and columns differ in number");
  tile_check(shapes.row_bytes[rows] / 4 == shapes.rows[columns], "#UD: rows and columns are not equally long");
  return state;
}

// Lanes outside of the shapes hold zeros and stay zero. The products of even and of odd k are summed apart from zero
// on, then to each other, then to what was there. The caller sees to the mode of the arithmetic, and this is not to be
// inlined into it.
[[gnu::noinline]] inline void tile_sum_bf16(TileState& state, int sums, int rows, int columns) {
  for (int m = 0; m < state.shapes.rows[rows]; ++m) {
    F32 even = {}, odd = {};
    for (int k = 0; k < state.shapes.rows[columns]; ++k) {
      const U32 row = splat(load_vector<uint32_t>(state.tiles[rows][m] + 4 * k));
      const U32 column = load_vector<U32>(state.tiles[columns][k]);
      even = fma((F32)(row << 16), (F32)(column << 16), even);
      odd = fma((F32)(row & 0xffff0000u), (F32)(column & 0xffff0000u), odd);
    }
    const F32 products = even + odd;
    store_vector(state.tiles[sums][m], load_vector<F32>(state.tiles[sums][m]) + products);
  }
}

template <int kSums, int kRows, int kColumns>
void tile_multiply_bf16() {
  TileState& state = multipliable_tiles(kSums, kRows, kColumns);
  // To the nearest even, subnormal numbers are zero coming and going, no exceptions: whatever the thread's own mode is.
  constexpr unsigned kMode = 0x1f80 | 0x8040;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kMode);
  tile_sum_bf16(state, kSums, kRows, kColumns);
  _mm_setcsr(mode);
}

template <int kSums, int kRows, int kColumns>
void tile_multiply_bytes() {
  TileState& state = multipliable_tiles(kSums, kRows, kColumns);
  for (int m = 0; m < state.shapes.rows[kRows]; ++m) {
    uint32_t sums[16];  // wraps
    std::memcpy(sums, state.tiles[kSums][m], sizeof sums);
    for (int k = 0; k < state.shapes.rows[kColumns]; ++k)
      for (int n = 0; n < 16; ++n)
        for (int byte = 0; byte < 4; ++byte)
          sums[n] += static_cast<uint32_t>(int32_t{state.tiles[kRows][m][4 * k + byte]} *
                                           static_cast<int8_t>(state.tiles[kColumns][k][4 * n + byte]));
    std::memcpy(state.tiles[kSums][m], sums, sizeof sums);
  }
}
