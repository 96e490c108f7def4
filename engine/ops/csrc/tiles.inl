// The matrix kernel of panel.inl in tiles: 16 words of k of a panel's 16 columns are a tile as they lie in memory.
//
// All numbers of rows go through tiles, so that a sum of bf16 is the same bits whatever shares the call: the order in
// which an instruction adds up its 16 words is its own. k is always cut into tiles from its beginning on.

struct TileShapes {  // as LDTILECFG reads them
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64);

#if TWINPOOL_AMX == 2
#include "tiles_emulated.inl"
#else
#include "tiles_amx.inl"
#endif

constexpr int64_t kTileRows = 16, kTileWords = 16;
constexpr int64_t kRowsInTiles = 2 * kTileRows;  // at once

// The tiles of this thread: as they were configured for so many rows and words of k, or not at all.
inline int& tiles_configured() {
  thread_local int shape = 0;
  return shape;
}

// A task that may use tiles holds one, from its beginning: tiles are configured within the task and released at its
// end, since a thread that has them configured is dearer to switch, and keeps its core from sleeping deeply.
class TileUse {
 public:
  TileUse() { tiles_are_free(); }
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;
  ~TileUse() {
    if (tiles_configured()) tile_release(), tiles_configured() = 0;
  }
};

// Up to 16 rows: sums in tiles 0 .. 3 side by side, x in 4, the panel in 5 .. 7.
// More: sums in 0, 1 and below them 2, 3, x in 4 and below it 5, the panel in 6 and 7.
inline void configure_tiles(int64_t rows, int64_t words) {
  const int shape = static_cast<int>(rows * (kTileWords + 1) + words);
  if (tiles_configured() == shape) return;
  tiles_configured() = shape;
  TileShapes shapes = {};
  shapes.palette = 1;
  const auto set = [&](int tile, int64_t count, int64_t width) {
    shapes.rows[tile] = static_cast<uint8_t>(count), shapes.row_bytes[tile] = static_cast<uint16_t>(4 * width);
  };
  const int64_t upper = std::min(rows, kTileRows), lower = rows - upper;
  for (int tile = 0; tile < 4; ++tile) set(tile, lower && tile > 1 ? lower : upper, kTileWords);
  set(4, upper, words);
  lower ? set(5, lower, words) : set(5, words, kTileWords);
  set(6, words, kTileWords), set(7, words, kTileWords);
  tile_configure(shapes);
}

template <class T, int kSums, int kRows, int kColumns>
TWINPOOL_INLINE void tile_multiply() {
  if constexpr (sizeof(T) == 1) {
    tile_multiply_bytes<kSums, kRows, kColumns>();
  } else {
    tile_multiply_bf16<kSums, kRows, kColumns>();
  }
}

template <int kRegister>
TWINPOOL_INLINE void begin_sums(const void* from, int64_t stride, bool accumulate) {
  accumulate ? tile_load<kRegister>(from, stride) : tile_zero<kRegister>();
}

// Up to 16 rows times a panel: each word of it is loaded once.
template <class T>
void multiply_upper(const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps, Element<T>* out,
                    int64_t out_stride, bool accumulate) {
  const int64_t stride = out_stride * 4;
  begin_sums<0>(out, stride, accumulate), begin_sums<1>(out + kTileWords, stride, accumulate);
  begin_sums<2>(out + 2 * kTileWords, stride, accumulate), begin_sums<3>(out + 3 * kTileWords, stride, accumulate);
  for (int64_t step = 0; step < steps; step += kTileWords) {
    const uint32_t* words = panel + step * kPanel;
    tile_load<4>(x + step * 4, x_stride);
    tile_load<5>(words, kStepBytes);
    tile_load<6>(words + kTileWords, kStepBytes);
    tile_multiply<T, 0, 4, 5>();
    tile_load<7>(words + 2 * kTileWords, kStepBytes);
    tile_multiply<T, 1, 4, 6>();
    tile_load<5>(words + 3 * kTileWords, kStepBytes);
    tile_multiply<T, 2, 4, 7>();
    tile_multiply<T, 3, 4, 5>();
  }
  tile_store<0>(out, stride), tile_store<1>(out + kTileWords, stride);
  tile_store<2>(out + 2 * kTileWords, stride), tile_store<3>(out + 3 * kTileWords, stride);
}

// 17 to 32 rows: all that is loaded is used twice.
template <class T>
void multiply_both(const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps, Element<T>* out,
                   int64_t out_stride, bool accumulate) {
  const int64_t stride = out_stride * 4;
  const char* x_below = x + kTileRows * x_stride;
  for (int64_t column = 0; column < kPanel; column += 2 * kTileWords) {
    Element<T>* const left = out + column;
    Element<T>* const below = left + kTileRows * out_stride;
    begin_sums<0>(left, stride, accumulate), begin_sums<1>(left + kTileWords, stride, accumulate);
    begin_sums<2>(below, stride, accumulate), begin_sums<3>(below + kTileWords, stride, accumulate);
    for (int64_t step = 0; step < steps; step += kTileWords) {
      const uint32_t* words = panel + step * kPanel + column;
      tile_load<4>(x + step * 4, x_stride);
      tile_load<6>(words, kStepBytes);
      tile_multiply<T, 0, 4, 6>();
      tile_load<7>(words + kTileWords, kStepBytes);
      tile_multiply<T, 1, 4, 7>();
      tile_load<5>(x_below + step * 4, x_stride);
      tile_multiply<T, 2, 5, 6>();
      tile_multiply<T, 3, 5, 7>();
    }
    tile_store<0>(left, stride), tile_store<1>(left + kTileWords, stride);
    tile_store<2>(below, stride), tile_store<3>(below + kTileWords, stride);
  }
}

// multiply_rows (panel.inl) of bf16 or of bytes. `steps` words of k, in pieces that begin at multiples of kTileWords.
template <class T>
void multiply_in_tiles(const char* x, int64_t x_stride, int64_t rows, const uint32_t* panel, int64_t steps,
                       Element<T>* out, int64_t out_stride, bool accumulate) {
  const int64_t rest = steps % kTileWords;
  const auto pass = [&](int64_t first, int64_t count, int64_t words, bool add) {
    for (int64_t r = 0; r < rows; r += kRowsInTiles) {
      const int64_t now = std::min(kRowsInTiles, rows - r);
      configure_tiles(now, words);
      const auto multiply = now <= kTileRows ? multiply_upper<T> : multiply_both<T>;
      multiply(x + r * x_stride + first * 4, x_stride, panel + first * kPanel, count, out + r * out_stride, out_stride,
               add);
    }
  };
  if (steps > rest) pass(0, steps - rest, kTileWords, accumulate);
  if (rest) pass(steps - rest, rest, rest, accumulate || steps > rest);
}
