// Norms, rotary embedding and the gated activation, one row a call. Roundings to T stand where reference.py has them.

template <class T>
void rms_norm_row(const RmsNormArgs& args, int64_t row) {
  const int64_t width = args.width;
  const char* from = args.x + row / args.group * args.group_stride + row % args.group * args.x_stride;
  const T* x = reinterpret_cast<const T*>(from);
  if (args.residual) {
    T* residual = reinterpret_cast<T*>(args.residual + row * args.residual_stride);
    for (int64_t i = 0; i < width; i += kLanes)
      store(residual + i, load(x + i, width - i) + load(residual + i, width - i), width - i);
    x = residual;
  }
  F32 squares[4] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 value = load(x + i, width - i);
    F32& sum = squares[i / kLanes % 4];
    sum = fma(value, value, sum);
  }
  const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const F32 factor = splat(1.0f / std::sqrt(sum / static_cast<float>(width) + args.eps));

  const T* weight = static_cast<const T*>(args.weight);
  T* out = reinterpret_cast<T*>(args.out) + row * width;
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 normed = rounded_to<T>(load(x + i, width - i) * factor);
    store(out + i, load(weight + i, width - i) * normed, width - i);
  }
}

void rms_norm(const RmsNormArgs& args, int64_t row) {
  args.dtype == Dtype::bf16 ? rms_norm_row<bf16>(args, row) : rms_norm_row<float>(args, row);
}

template <class T>
void rope_token(const RopeArgs& args, int64_t token) {
  const int64_t half = args.head_dim / 2;
  const float *cos = args.cos + token * half, *sin = args.sin + token * half;
  T* out = reinterpret_cast<T*>(args.out) + token * args.num_heads * args.head_dim;
  for (int64_t head = 0; head < args.num_heads; ++head, out += args.head_dim) {
    const T* x = reinterpret_cast<const T*>(args.x + token * args.token_stride + head * args.head_stride);
    for (int64_t i = 0; i < half; i += kLanes) {
      const F32 c = rounded_to<T>(load(cos + i, half - i)), s = rounded_to<T>(load(sin + i, half - i));
      const F32 a = load(x + i, half - i), b = load(x + half + i, half - i);
      store(out + i, rounded_to<T>(a * c) - rounded_to<T>(b * s), half - i);
      store(out + half + i, rounded_to<T>(b * c) + rounded_to<T>(a * s), half - i);
    }
  }
}

void rope(const RopeArgs& args, int64_t token) {
  args.dtype == Dtype::bf16 ? rope_token<bf16>(args, token) : rope_token<float>(args, token);
}

template <class T>
void silu_mul_row(const SiluMulArgs& args, int64_t row) {
  const int64_t width = args.width;
  const T* gate = reinterpret_cast<const T*>(args.gate_up + row * args.stride);
  const T* up = gate + width;
  T* out = reinterpret_cast<T*>(args.out) + row * width;
  const F32 limit = splat(args.limit);
  for (int64_t i = 0; i < width; i += kLanes) {
    F32 x = load(gate + i, width - i), factor = load(up + i, width - i);
    x = x > limit ? limit : x;
    factor = factor > limit ? limit : factor < -limit ? -limit : factor;
    const F32 negative = -x > 88.0f ? splat(88.0f) : -x;
    const F32 silu = rounded_to<T>(x / (1.0f + exp(negative)));
    store(out + i, silu * factor, width - i);
  }
}

void silu_mul(const SiluMulArgs& args, int64_t row) {
  args.dtype == Dtype::bf16 ? silu_mul_row<bf16>(args, row) : silu_mul_row<float>(args, row);
}
