// y = x * W^T + bias over packed panels: weights as floats, as int8 beside float activations, or int8 by int8.

// Weights of one pass of all rows: they stay in L1 while the rows pass over them and the next ones are fetched. Tiles
// are quick enough to read them from L2, and slow to begin and to end.
constexpr int64_t kStepsAtOnce = 64, kStepsInTiles = 1024;

// A task's place in the matrices.
struct LinearTask {
  int64_t panel, first_row, rows, first_column, columns;

  LinearTask(const LinearArgs& args, int64_t task) {
    const int64_t num_panels = ceil_div(args.weight->out_features, kPanel);
    panel = task % num_panels, first_row = task / num_panels * kLinearRows;
    rows = std::min(kLinearRows, args.rows - first_row);
    first_column = panel * kPanel, columns = std::min<int64_t>(kPanel, args.weight->out_features - first_column);
  }
};

// Writes the task's outputs: finish(row of the task, column of the panel) gives kLanes of them before the bias.
template <class T, class Finish>
TWINPOOL_INLINE void write_outputs(const LinearArgs& args, const LinearTask& task, const Finish& finish) {
  const int64_t width = args.out_stride ? args.out_stride / static_cast<int64_t>(sizeof(T)) : args.weight->out_features;
  const T* bias = args.weight->bias ? static_cast<const T*>(args.weight->bias) + task.first_column : nullptr;
  T* out = reinterpret_cast<T*>(args.out) + task.first_row * width + task.first_column;
  for (int64_t r = 0; r < task.rows; ++r, out += width)
    for (int64_t c = 0; c < task.columns; c += kLanes) {
      F32 sum = finish(r, c);
      if (bias) sum += load(bias + c, task.columns - c);
      store(out + c, sum, task.columns - c);
    }
}

// Multiplies the task's rows with a panel of `steps` words, kStepsAtOnce at a time; what follows is fetched ahead.
template <class T>
void multiply_task(const char* x, int64_t x_stride, int64_t rows, const uint32_t* words, int64_t steps,
                   Element<T>* sums) {
  constexpr int64_t kAtOnce = kInTiles<T> ? kStepsInTiles : kStepsAtOnce;
  for (int64_t step = 0; step < steps; step += kAtOnce) {
    const int64_t now = std::min(kAtOnce, steps - step);
    const uint32_t* block = words + step * kPanel;
    multiply_rows<T>(x + step * 4, x_stride, rows, block, now, sums, kPanel, step > 0,
                     reinterpret_cast<const char*>(block + now * kPanel));
  }
}

template <class T>
void linear_float(const LinearArgs& args, const LinearTask& task) {
  const int64_t steps = args.weight->steps;
  const uint32_t* words = args.weight->panels + task.panel * steps * kPanel;
  float* sums = reinterpret_cast<float*>(scratch(task.rows * kPanel * sizeof(float)));
  multiply_task<T>(args.x + task.first_row * args.x_stride, args.x_stride, task.rows, words, steps, sums);
  write_outputs<T>(args, task, [&](int64_t r, int64_t c) { return load(sums + r * kPanel + c); });
}

// ---- int8 weights, float activations: a block of weights is turned into floats, exactly, then multiplied ----

constexpr int64_t kStepsForeseen = 16;

// multiply_panel for codes that are unpacked on the way: few rows, kColumns vectors of columns at a time.
template <class T, int kRows, int kColumns>
void multiply_codes(const char* x, int64_t x_stride, const uint32_t* codes, int64_t steps, float* out) {
  constexpr int kWords = 4 / kPerWord<T>;
  for (int column = 0; column < kPanel; column += kColumns * kLanes) {
    F32 sums[kRows][kColumns] = {};
    for (int64_t step = 0; step < steps; ++step) {
      U32 words[kColumns][kWords];
      // Two rounds over the panel's columns read it in strides, which the hardware does not foresee.
      if constexpr (kColumns < kVectors) {
        const char* next = reinterpret_cast<const char*>(codes + (step + kStepsForeseen) * kPanel);
        for (int64_t line = 0; line < kStepBytes; line += kLine) __builtin_prefetch(next + line);
      }
      for (int v = 0; v < kColumns; ++v)
        unpack_codes<T>(load_vector<U32>(codes + step * kPanel + column + v * kLanes), words[v]);
      for (int i = 0; i < kWords; ++i)
        for (int r = 0; r < kRows; ++r) {
          const U32 row_word = splat(load_vector<uint32_t>(x + r * x_stride + (step * kWords + i) * 4));
          for (int v = 0; v < kColumns; ++v) sums[r][v] = multiply_add<T>(words[v][i], row_word, sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kColumns; ++v) store(out + r * kPanel + column + v * kLanes, sums[r][v]);
  }
}

// Rows up to here are multiplied while unpacking; more are worth a block of unpacked weights in L1.
constexpr int64_t kMostRowsWhileUnpacking = TWINPOOL_LANES == 16 ? 8 : 3;

template <class T>
void multiply_few(const char* x, int64_t x_stride, int64_t rows, const uint32_t* codes, int64_t steps, float* out) {
  switch (rows) {
    case 1: return multiply_codes<T, 1, 4>(x, x_stride, codes, steps, out);
    case 2: return multiply_codes<T, 2, 4>(x, x_stride, codes, steps, out);
    case 3: return multiply_codes<T, 3, 4>(x, x_stride, codes, steps, out);
#if TWINPOOL_LANES == 16
    case 4: return multiply_codes<T, 4, 2>(x, x_stride, codes, steps, out);
    case 5: return multiply_codes<T, 5, 2>(x, x_stride, codes, steps, out);
    case 6: return multiply_codes<T, 6, 2>(x, x_stride, codes, steps, out);
    case 7: return multiply_codes<T, 7, 2>(x, x_stride, codes, steps, out);
    case 8: return multiply_codes<T, 8, 2>(x, x_stride, codes, steps, out);
#endif
  }
}

template <class T>
void multiply_many(const char* x, int64_t x_stride, int64_t rows, const uint32_t* codes, int64_t steps, float* out,
                   uint32_t* block) {
  constexpr int kWords = 4 / kPerWord<T>;  // words of T that one word of codes becomes
  constexpr int64_t kCodeSteps = kStepsAtOnce / kWords;
  for (int64_t step = 0; step < steps; step += kCodeSteps) {
    const int64_t now = std::min(kCodeSteps, steps - step);
    for (int64_t s = 0; s < now; ++s, codes += kPanel)
      for (int c = 0; c < kPanel; c += kLanes) {
        U32 words[kWords];
        unpack_codes<T>(load_vector<U32>(codes + c), words);
#pragma GCC unroll 4
        for (int i = 0; i < kWords; ++i) store_vector(block + (s * kWords + i) * kPanel + c, words[i]);
      }
    multiply_rows<T>(x + step * kWords * 4, x_stride, rows, block, now * kWords, out, kPanel, step > 0,
                     reinterpret_cast<const char*>(codes));
  }
}

template <class T>
void linear_w8a16(const LinearArgs& args, const LinearTask& task) {
  const int64_t steps = args.weight->steps;
  const uint32_t* codes = args.weight->panels + task.panel * steps * kPanel;
  const float* scales = args.weight->scales + task.first_column;
  const char* x = args.x + task.first_row * args.x_stride;
  float* sums;
  uint32_t* block;
  const auto carve = [&](char* base) {
    Carver carver(base);
    sums = carver.take<float>(task.rows * kPanel);
    block = carver.take<uint32_t>(kStepsAtOnce * kPanel);
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));
  if (!kInTiles<T> && task.rows <= kMostRowsWhileUnpacking) {
    multiply_few<T>(x, args.x_stride, task.rows, codes, steps, sums);
  } else {
    multiply_many<T>(x, args.x_stride, task.rows, codes, steps, sums, block);
  }
  write_outputs<T>(args, task, [&](int64_t r, int64_t c) { return load(sums + r * kPanel + c) * load(scales + c); });
}

// ---- int8 weights, activations as int8 digits: one (w8a8), or two that together hold 16 bits (w8a16) ----

// 16-bit activations in two digits take the multiplier as long as bf16 ones, unpack no weights, and have exact sums.
// Only where the processor multiplies bytes natively; elsewhere, and where int32 may not hold the sums, floats are used.
template <class T>
constexpr bool kInDigits = TWINPOOL_VNNI && std::is_same_v<T, bf16>;
constexpr int64_t kMostExactInputs = std::numeric_limits<int32_t>::max() / (127 * 255);
constexpr float kLargestOfTwoDigits = 127 * 256 + 127;

// How many digits the activations of a matrix become; 0: they stay floats.
int64_t num_digits(const PackedLinear& weight) {
  if (weight.format == Format::w8a8) return 1;
  const bool two = TWINPOOL_VNNI && weight.format == Format::w8a16 && weight.dtype == Dtype::bf16;
  return two && weight.in_features <= kMostExactInputs ? 2 : 0;
}

TWINPOOL_INLINE void store_digits(int8_t* to, I32 digits, int64_t count) {
  if (count >= kLanes) return narrow(to, digits);
  int8_t lanes[kLanes];
  narrow(lanes, digits);
  std::memcpy(to, lanes, count);
}

// Digits of one row of x with one scale, largest magnitude / 127 (or what two digits hold): exact inputs for exact sums.
// A row that is not finite has a scale that is not, and digits of zero, so that all its outputs become NaN.
template <class T, int kDigits>
void quantize_to_digits(const LinearArgs& args, int64_t row) {
  const int64_t width = args.weight->in_features, stride = args.weight->steps * 4;
  const T* x = reinterpret_cast<const T*>(args.x + row * args.x_stride);
  int8_t* codes = args.codes + row * kDigits * stride;
  const float scale = largest_magnitude(x, width) / (kDigits == 1 ? 127.0f : kLargestOfTwoDigits);
  args.row_scales[row] = scale;
  const bool usable = scale > 0.0f && scale <= std::numeric_limits<float>::max();
  const F32 divisor = splat(usable ? scale : 1.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 value = usable ? load(x + i, width - i) : F32{};
    if constexpr (kDigits == 1) {
      store_digits(codes + i, to_code(value, divisor) + kCodeOffset, width - i);
    } else {
      const I32 integer = to_integer(value, divisor, kLargestOfTwoDigits), high = (integer + 128) >> 8;
      store_digits(codes + i, high + kCodeOffset, width - i);
      store_digits(codes + stride + i, integer - (high << 8) + kCodeOffset, width - i);
    }
  }
  for (int digit = 0; digit < kDigits; ++digit) std::memset(codes + digit * stride + width, kCodeOffset, stride - width);
}

template <class T, int kDigits>
void linear_digits(const LinearArgs& args, const LinearTask& task) {
  const int64_t steps = args.weight->steps, digit_rows = task.rows * kDigits;
  const uint32_t* words = args.weight->panels + task.panel * steps * kPanel;
  const float* scales = args.weight->scales + task.first_column;
  const int32_t* column_sums = args.weight->column_sums + task.first_column;
  const float* row_scales = args.row_scales + task.first_row;
  const char* codes = reinterpret_cast<const char*>(args.codes) + task.first_row * kDigits * steps * 4;
  int32_t* sums = reinterpret_cast<int32_t*>(scratch(digit_rows * kPanel * sizeof(int32_t)));
  multiply_task<int8_t>(codes, steps * 4, digit_rows, words, steps, sums);
  write_outputs<T>(args, task, [&](int64_t r, int64_t c) {
    const int32_t* own = sums + r * kDigits * kPanel + c;
    const I32 offset = kCodeOffset * load_vector<I32>(column_sums + c);
    F32 sum = __builtin_convertvector(load_vector<I32>(own) - offset, F32);
    if constexpr (kDigits == 2)
      sum = fma(sum, splat(256.0f), __builtin_convertvector(load_vector<I32>(own + kPanel) - offset, F32));
    return sum * splat(row_scales[r]) * load(scales + c);
  });
}

template <class T>
void linear_of(const LinearArgs& args, const LinearTask& task) {
  switch (args.weight->format) {
    case Format::as_activations: return linear_float<T>(args, task);
    case Format::w8a16:
      if constexpr (kInDigits<T>)
        if (num_digits(*args.weight)) return linear_digits<T, 2>(args, task);
      return linear_w8a16<T>(args, task);
    case Format::w8a8: return linear_digits<T, 1>(args, task);
  }
}

void linear(const LinearArgs& args, int64_t task) {
  [[maybe_unused]] const TileUse tiles;
  args.weight->dtype == Dtype::bf16 ? linear_of<bf16>(args, LinearTask(args, task))
                                    : linear_of<float>(args, LinearTask(args, task));
}

void quantize(const LinearArgs& args, int64_t row) {
  if constexpr (kInDigits<bf16>)
    if (args.weight->format == Format::w8a16) return quantize_to_digits<bf16, 2>(args, row);
  args.weight->dtype == Dtype::bf16 ? quantize_to_digits<bf16, 1>(args, row) : quantize_to_digits<float, 1>(args, row);
}
