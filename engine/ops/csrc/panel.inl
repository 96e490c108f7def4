// The one matrix kernel: a few rows times one panel, fp32 accumulators in registers. `linear`, the scores and the
// weighted sum of the values all run on it.
//
// An accumulator sees k in ascending order, whatever the number of rows beside it and wherever k is cut into blocks
// (`accumulate` picks a partial sum up where it was left). That is what makes results independent of the batch.

constexpr int kVectors = 4;  // vectors of columns held at once
constexpr int kMaxRows = TWINPOOL_LANES == 16 ? 6 : 3;

template <class T>
constexpr int kPerWord = 4 / sizeof(T);

template <class T>
TWINPOOL_INLINE F32 multiply_add(U32 a, U32 b, F32 sum) {
  if constexpr (sizeof(T) == 4) {
    return fma((F32)a, (F32)b, sum);
  } else {
#if TWINPOOL_BF16_DOT
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((F32)(a << 16), (F32)(b << 16), sum);
    return fma((F32)(a & 0xffff0000u), (F32)(b & 0xffff0000u), sum);
#endif
  }
}

template <class T, int kRows>
void multiply_panel(const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps, float* out,
                    int64_t out_stride, bool accumulate) {
  for (int column = 0; column < kPanel; column += kVectors * kLanes) {
    F32 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = accumulate ? load(out + r * out_stride + column + v * kLanes) : F32{};

    const uint32_t* words = panel + column;
    for (int64_t step = 0; step < steps; ++step, words += kPanel) {
      U32 column_words[kVectors];
      for (int v = 0; v < kVectors; ++v) column_words[v] = load_vector<U32>(words + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const U32 row_word = splat(load_vector<uint32_t>(x + r * x_stride + step * 4));
        for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<T>(column_words[v], row_word, sums[r][v]);
      }
    }

    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(out + r * out_stride + column + v * kLanes, sums[r][v]);
  }
}

// out [rows, kPanel] (+)= x [rows, steps words] * panel [steps, kPanel]. x_stride in bytes, out_stride in floats.
template <class T>
void multiply_rows(const char* x, int64_t x_stride, int64_t rows, const uint32_t* panel, int64_t steps, float* out,
                   int64_t out_stride, bool accumulate) {
  const int64_t even_share = ceil_div(rows, ceil_div(rows, kMaxRows));  // 7 rows as 4 + 3, not as 6 + 1
  for (int64_t n; rows; rows -= n, x += n * x_stride, out += n * out_stride) {
    n = std::min(rows, even_share);
    switch (n) {
      case 1: multiply_panel<T, 1>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
      case 2: multiply_panel<T, 2>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
      case 3: multiply_panel<T, 3>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
#if TWINPOOL_LANES == 16
      case 4: multiply_panel<T, 4>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
      case 5: multiply_panel<T, 5>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
      case 6: multiply_panel<T, 6>(x, x_stride, panel, steps, out, out_stride, accumulate); break;
#endif
    }
  }
}
