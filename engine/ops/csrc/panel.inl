// The one matrix kernel: a few rows times one panel, accumulators in registers. `linear`, the scores and the weighted
// sum of the values all run on it, with fp32 sums, and `linear` of int8 by int8 with exact int32 sums.
//
// An accumulator sees k in ascending order, whatever the number of rows beside it and wherever k is cut into blocks
// (`accumulate` picks a partial sum up where it was left). That is what makes results independent of the batch.

constexpr int kVectors = 4;  // vectors of columns held at once
constexpr int kMaxRows = TWINPOOL_LANES == 16 ? 6 : 3;

template <class T>
constexpr int kPerWord = 4 / sizeof(T);

// What an accumulator holds: int32 for int8 inputs, else fp32.
template <class T>
using Element = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, int8_t>, I32, F32>;

// The int8 instruction of AVX-512 takes one unsigned operand: there a row's codes are stored plus 128, which
// `linear` takes off the sums again.
constexpr int32_t kCodeOffset = TWINPOOL_VNNI ? 128 : 0;

template <class T>
TWINPOOL_INLINE Sum<T> multiply_add(U32 column, U32 row, Sum<T> sum) {
  if constexpr (std::is_same_v<T, int8_t>) {
#if TWINPOOL_VNNI
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)column);
#else
    sum += pair_sums((I16)(column << 8) >> 8, (I16)(row << 8) >> 8);  // the even bytes
    return sum + pair_sums((I16)column >> 8, (I16)row >> 8);
#endif
  } else if constexpr (sizeof(T) == 4) {
    return fma((F32)column, (F32)row, sum);
  } else {
#if TWINPOOL_BF16_DOT
    return _mm512_dpbf16_ps(sum, (__m512bh)column, (__m512bh)row);
#else
    sum = fma((F32)(column << 16), (F32)(row << 16), sum);
    return fma((F32)(column & 0xffff0000u), (F32)(row & 0xffff0000u), sum);
#endif
  }
}

constexpr int64_t kLine = 64;       // bytes of a cache line
constexpr int kIntoL2 = 2;          // L1 is full of what the rows pass over
constexpr int64_t kStepBytes = kPanel * 4;

#if TWINPOOL_AMX
#include "tiles.inl"
template <class T>
constexpr bool kInTiles = sizeof(T) < 4;
#else
struct TileUse {};  // no tiles to release
constexpr int64_t kRowsInTiles = 0;
template <class T>
constexpr bool kInTiles = false;
#endif

// Rows that attention hands to multiply_rows at once: their scores stay in L1.
template <class T>
constexpr int64_t kRowsTogether = kInTiles<T> ? kRowsInTiles : kMaxRows;

template <class T, int kRows>
void multiply_panel(const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps, Element<T>* out,
                    int64_t out_stride, bool accumulate, const char* ahead, int64_t ahead_step) {
  for (int column = 0; column < kPanel; column += kVectors * kLanes) {
    Sum<T> sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] =
            accumulate ? load_vector<Sum<T>>(out + r * out_stride + column + v * kLanes) : Sum<T>{};

    const uint32_t* words = panel + column;
    for (int64_t step = 0; step < steps; ++step, words += kPanel) {
      if (ahead) {
        __builtin_prefetch(ahead, 0, kIntoL2);
        __builtin_prefetch(ahead + ahead_step - kLine, 0, kIntoL2);
        ahead += ahead_step;
      }
      U32 column_words[kVectors];
      for (int v = 0; v < kVectors; ++v) column_words[v] = load_vector<U32>(words + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const U32 row_word = splat(load_vector<uint32_t>(x + r * x_stride + step * 4));
        for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<T>(column_words[v], row_word, sums[r][v]);
      }
    }

    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store_vector(out + r * out_stride + column + v * kLanes, sums[r][v]);
  }
}

// out [rows, kPanel] (+)= x [rows, steps words] * panel [steps, kPanel]. x_stride in bytes, out_stride in elements.
// ahead: null, or as many bytes as the panel's, that are needed next. Fetched while the rows pass over the panel, if
// they do so more than once: a single pass is the memory's to keep up with, and needs its instructions for itself.
template <class T>
void multiply_rows(const char* x, int64_t x_stride, int64_t rows, const uint32_t* panel, int64_t steps,
                   Element<T>* out, int64_t out_stride, bool accumulate, const char* ahead = nullptr) {
#if TWINPOOL_AMX
  // Few rows of bytes are quicker without, and sums of integers are the same either way.
  if constexpr (kInTiles<T>)
    if (sizeof(T) == sizeof(bf16) || rows > kMaxRows)
      return multiply_in_tiles<T>(x, x_stride, rows, panel, steps, out, out_stride, accumulate);
#endif
  const int64_t passes = ceil_div(rows, kMaxRows), even_share = ceil_div(rows, passes);  // 7 as 4 + 3, not as 6 + 1
  if (passes < 2) ahead = nullptr;
  const int64_t ahead_step = passes < 4 ? 2 * kLine : kLine;
  const char* const ahead_end = ahead ? ahead + steps * kStepBytes : nullptr;
  for (int64_t n; rows; rows -= n, x += n * x_stride, out += n * out_stride) {
    n = std::min(rows, even_share);
    switch (n) {
      case 1: multiply_panel<T, 1>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
      case 2: multiply_panel<T, 2>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
      case 3: multiply_panel<T, 3>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
#if TWINPOOL_LANES == 16
      case 4: multiply_panel<T, 4>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
      case 5: multiply_panel<T, 5>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
      case 6: multiply_panel<T, 6>(x, x_stride, panel, steps, out, out_stride, accumulate, ahead, ahead_step); break;
#endif
    }
    if (ahead && (ahead += steps * (kPanel / (kVectors * kLanes)) * ahead_step) >= ahead_end) ahead = nullptr;
  }
}
