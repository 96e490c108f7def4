// Latent attention over an int8 cache: attention.inl with one KV head whose keys are latents beside rotated keys, and
// whose values are the latents again. Tiles, softmax, chunks and the order of sums are those of attention.inl, so a row
// is the same bits alone, beside others, in one prompt or in pieces, from one thread or from many.
//   scores = (q * latent codes) * scale of the token + q * rotated key

struct LatentTile {
  const int8_t* latents[kTile];
  const bf16* keys[kTile];
  float scales[kTile];
};

inline void find_latent_tile(const LatentArgs& args, const AttentionTask& task, int64_t start, const int8_t* zeros,
                             LatentTile& tile) {
  const int32_t* blocks = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(args.block_tables) +
                                                           task.sequence * args.block_tables_stride);
  const int64_t length = std::min<int64_t>(kTile, args.context_lens[task.sequence] - start);
  uint16_t scales[kTile] = {};
  for (int64_t t = 0; t < kTile; ++t) {
    if (t >= length) {
      tile.latents[t] = zeros, tile.keys[t] = reinterpret_cast<const bf16*>(zeros);
      continue;
    }
    const int64_t row = blocks[(start + t) / args.block_size] * args.row_bytes, place = (start + t) % args.block_size;
    tile.latents[t] = reinterpret_cast<const int8_t*>(args.latents + row) + place * args.rank;
    tile.keys[t] = reinterpret_cast<const bf16*>(args.keys + row) + place * args.key_dim;
    scales[t] = reinterpret_cast<const uint16_t*>(args.scales + row)[place];
  }
  for (int t = 0; t < kTile; t += kLanes) store(tile.scales + t, load_half(scales + t));
}

inline int64_t heads_of(const LatentArgs& args, const AttentionTask& task) {
  return std::min<int64_t>(args.heads_at_once, args.num_heads - task.kv_head * args.heads_at_once);
}

template <class T>
TWINPOOL_INLINE void write_attended(const LatentArgs& args, const AttentionTask& task, int64_t r, const float* out,
                                    float sum) {
  const int64_t heads = heads_of(args, task), head = task.kv_head * args.heads_at_once + r % heads;
  T* to = reinterpret_cast<T*>(args.out) + ((task.first_query + r / heads) * args.num_heads + head) * args.rank;
  for (int64_t d = 0; d < args.rank; d += kLanes) store(to + d, load(out + d) / sum, args.rank - d);
}

template <class T>
void attend_latents(const LatentArgs& args, const AttentionTask& task) {
  const int64_t rank = args.rank, key_dim = args.key_dim, width = rank + key_dim;
  const int64_t first_head = task.kv_head * args.heads_at_once;
  const int64_t heads = heads_of(args, task);
  const int64_t rows = task.num_queries * heads, out_width = ceil_div(rank, kPanel) * kPanel;
  const int64_t latent_words = rank / kPerWord<T>, key_words = key_dim / kPerWord<T>;
  constexpr int kValueSteps = kTile / kPerWord<T>;

  T *q, *weights;
  float *scores, *key_scores, *score_scale;
  ChunkRows gathered = {rows, out_width};
  uint32_t *latent_panel, *key_panel, *value_panels, *staging;
  int8_t* zeros;
  LatentTile* tile;
  const auto carve = [&](char* base) {
    Carver carver(base);
    q = carver.take<T>(rows * width);
    gathered.carve(carver, task);
    latent_panel = carver.take<uint32_t>(latent_words * kTile);
    key_panel = carver.take<uint32_t>(key_words * kTile);
    value_panels = carver.take<uint32_t>(out_width * kValueSteps);
    staging = carver.take<uint32_t>(kTile * (std::max(latent_words, key_words) + kLanes));
    scores = carver.take<float>(kRowsTogether<T> * kTile);
    key_scores = carver.take<float>(kRowsTogether<T> * kTile);
    score_scale = carver.take<float>(kTile);
    weights = carver.take<T>(kRowsTogether<T> * kTile);
    tile = carver.take<LatentTile>(1);
    zeros = carver.take<int8_t>(std::max(rank, key_dim * 2));
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));

  for (int64_t r = 0; r < rows; ++r) {
    const char* from =
        args.q + (task.first_query + r / heads) * args.q_token_stride + (first_head + r % heads) * args.q_head_stride;
    std::memcpy(q + r * width, from, width * sizeof(T));
  }
  gathered.begin(0);
  std::memset(value_panels, 0, out_width * kValueSteps * sizeof(uint32_t));
  std::memset(zeros, 0, std::max(rank, key_dim * 2));
  std::fill(score_scale, score_scale + kTile, args.scale);

  for (int64_t start = chunk_begin(task); start < chunk_end(task); start += kTile) {
    const int64_t first_seeing = std::max<int64_t>(0, start - task.position) * heads;
    if (task.chunk < 0) gathered.before_tile(start, first_seeing);
    find_latent_tile(args, task, start, zeros, *tile);
    unpack_keys<T>(tile->latents, rank, staging, latent_panel);
    unpack_keys<T>(tile->keys, key_dim, staging, key_panel);
    unpack_values<T>(tile->latents, rank, value_panels);

    for (int64_t r = first_seeing, n; r < rows; r += n) {
      n = std::min<int64_t>(kRowsTogether<T>, rows - r);
      multiply_rows<T>(reinterpret_cast<const char*>(q + r * width), width * sizeof(T), n, latent_panel, latent_words,
                       scores, kTile, false);
      multiply_rows<T>(reinterpret_cast<const char*>(q + r * width + rank), width * sizeof(T), n, key_panel, key_words,
                       key_scores, kTile, false);
      for (int64_t i = 0; i < n; ++i) {
        for (int t = 0; t < kTile; t += kLanes)
          store(scores + i * kTile + t,
                fma(load(scores + i * kTile + t), load(tile->scales + t), load(key_scores + i * kTile + t)));
        softmax_tile(scores + i * kTile, score_scale, tile->scales, task.position + (r + i) / heads - start,
                     gathered.state[r + i], weights + i * kTile, gathered.out + (r + i) * out_width, out_width);
      }
      for (int64_t d = 0; d < rank; d += kPanel)
        multiply_rows<T>(reinterpret_cast<const char*>(weights), kTile * sizeof(T), n, value_panels + d * kValueSteps,
                         kValueSteps, gathered.out + r * out_width + d, out_width, true);
    }
  }

  if (task.chunk >= 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    float sum;
    const float* out = gathered.end(r, task.position + r / heads, sum);
    write_attended<T>(args, task, r, out, sum);
  }
}

void latent_attention(const LatentArgs& args, const AttentionTask& task) {
  [[maybe_unused]] const TileUse tiles;
  args.dtype == Dtype::bf16 ? attend_latents<bf16>(args, task) : attend_latents<float>(args, task);
}

void merge_latent_attention(const LatentArgs& args, const AttentionTask& task, float* partials) {
  merge_partials(task, heads_of(args, task), args.rank, partials, [&](int64_t r, const float* out, float sum) {
    args.dtype == Dtype::bf16 ? write_attended<bf16>(args, task, r, out, sum)
                              : write_attended<float>(args, task, r, out, sum);
  });
}
