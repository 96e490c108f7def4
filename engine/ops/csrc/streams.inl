// Streams of residuals: what a block reads of them, and how its output is mixed with them. All in fp32, token by token.

inline float stream_sigmoid(float x) { return 1.0f / (1.0f + exp(splat(std::clamp(-x, -87.0f, 87.0f)))[0]); }

template <class T>
void read_streams(const StreamsInArgs& args, int64_t token) {
  const int64_t n = args.streams;
  const float* mixes = args.mixes + token * (args.post ? n * (2 + n) : n);
  float pre[kMostStreams];
  for (int64_t k = 0; k < n; ++k) pre[k] = stream_sigmoid(mixes[k] * args.scale[0] + args.base[k]) + args.eps;
  if (args.post) {
    float* comb = args.comb + token * n * n;
    for (int64_t k = 0; k < n; ++k)
      args.post[token * n + k] = 2 * stream_sigmoid(mixes[n + k] * args.scale[1] + args.base[n + k]);
    for (int64_t k = 0; k < n; ++k) {
      float* row = comb + k * n;
      float largest = -INFINITY, sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        row[j] = mixes[2 * n + k * n + j] * args.scale[2] + args.base[2 * n + k * n + j];
        largest = std::max(largest, row[j]);
      }
      for (int64_t j = 0; j < n; ++j) sum += row[j] = exp(splat(row[j] - largest))[0];
      for (int64_t j = 0; j < n; ++j) row[j] = row[j] / sum + args.eps;
    }
    const auto normalize = [&](int64_t step, int64_t next) {  // the sums over `step`, for all that are `next` apart
      for (int64_t a = 0; a < n; ++a) {
        float sum = 0;
        for (int64_t b = 0; b < n; ++b) sum += comb[a * next + b * step];
        for (int64_t b = 0; b < n; ++b) comb[a * next + b * step] /= sum + args.eps;
      }
    };
    normalize(n, 1);
    for (int64_t i = 1; i < args.iterations; ++i) {
      normalize(1, n);
      normalize(n, 1);
    }
  }
  const T* x = reinterpret_cast<const T*>(args.x) + token * n * args.width;
  T* out = reinterpret_cast<T*>(args.out) + token * args.width;
  for (int64_t d = 0; d < args.width; d += kLanes) {
    const int64_t left = args.width - d;
    F32 total = load(x + d, left) * pre[0];
    for (int64_t k = 1; k < n; ++k) total += load(x + k * args.width + d, left) * pre[k];
    store(out + d, total, left);
  }
}

void streams_in(const StreamsInArgs& args, int64_t token) {
  args.dtype == Dtype::bf16 ? read_streams<bf16>(args, token) : read_streams<float>(args, token);
}

template <class T>
void write_streams(const StreamsOutArgs& args, int64_t token) {
  const int64_t n = args.streams;
  const T* y = reinterpret_cast<const T*>(args.y) + token * args.width;
  const T* x = reinterpret_cast<const T*>(args.x) + token * n * args.width;
  T* out = reinterpret_cast<T*>(args.out) + token * n * args.width;
  const float *post = args.post + token * n, *comb = args.comb + token * n * n;
  for (int64_t d = 0; d < args.width; d += kLanes) {
    const int64_t left = args.width - d;
    F32 streams[kMostStreams];
    for (int64_t k = 0; k < n; ++k) streams[k] = load(x + k * args.width + d, left);
    for (int64_t j = 0; j < n; ++j) {
      F32 total = load(y + d, left) * post[j];
      for (int64_t k = 0; k < n; ++k) total += streams[k] * comb[k * n + j];
      store(out + j * args.width + d, total, left);
    }
  }
}

void streams_out(const StreamsOutArgs& args, int64_t token) {
  args.dtype == Dtype::bf16 ? write_streams<bf16>(args, token) : write_streams<float>(args, token);
}
