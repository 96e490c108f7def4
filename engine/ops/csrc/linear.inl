// y = x * W^T + bias over packed panels.

constexpr int64_t kStepsAtOnce = 512;  // 128 KiB of a panel: stays in L2 while all rows of the task pass over it

template <class T>
void linear_rows(const LinearArgs& args, int64_t task) {
  const int64_t num_panels = ceil_div(args.out_features, kPanel);
  const int64_t panel = task % num_panels, first_row = task / num_panels * kLinearRows;
  const int64_t rows = std::min(kLinearRows, args.rows - first_row);
  const char* x = args.x + first_row * args.x_stride;
  const uint32_t* words = args.panels + panel * args.steps * kPanel;
  float* sums = reinterpret_cast<float*>(scratch(rows * kPanel * sizeof(float)));

  for (int64_t step = 0; step < args.steps; step += kStepsAtOnce)
    multiply_rows<T>(x + step * 4, args.x_stride, rows, words + step * kPanel,
                     std::min(kStepsAtOnce, args.steps - step), sums, kPanel, step > 0);

  const int64_t first_column = panel * kPanel, columns = std::min<int64_t>(kPanel, args.out_features - first_column);
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + first_column : nullptr;
  T* out = reinterpret_cast<T*>(args.out) + first_row * args.out_features + first_column;
  for (int64_t r = 0; r < rows; ++r, out += args.out_features)
    for (int64_t c = 0; c < columns; c += kLanes) {
      F32 sum = load(sums + r * kPanel + c);
      if (bias) sum += load(bias + c, columns - c);
      store(out + c, sum, columns - c);
    }
}

void linear(const LinearArgs& args, int64_t task) {
  args.dtype == Dtype::bf16 ? linear_rows<bf16>(args, task) : linear_rows<float>(args, task);
}
