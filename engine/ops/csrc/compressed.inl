// Attention over windows and compressed entries. Tiles and softmax are those of attention.inl. A token's keys come in
// one order, those of its window and then its entries, and tiles are counted from the first of them: what a token gets
// depends on its own keys only.

// The item at `slot` as T: a latent, dequantized, and the rotated key behind it.
template <class T>
void load_item(const EntryArgs& args, int64_t slot, T* to) {
  const int64_t row = slot / args.block_size * args.row_bytes, place = slot % args.block_size;
  const char* latent = args.latents + row + place * args.item_stride;
  if (args.dtype == Dtype::int8) {
    uint16_t half[kLanes] = {reinterpret_cast<const uint16_t*>(args.scales + row)[place]};
    const float scale = load_half(half)[0];
    const int8_t* codes = reinterpret_cast<const int8_t*>(latent);
    for (int64_t d = 0; d < args.rank; d += kLanes) store(to + d, load(codes + d, args.rank - d) * scale, args.rank - d);
    if (!args.key_dim) return;
    const bf16* key = reinterpret_cast<const bf16*>(args.keys + row) + place * args.key_dim;
    for (int64_t d = 0; d < args.key_dim; d += kLanes)
      store(to + args.rank + d, load(key + d, args.key_dim - d), args.key_dim - d);
    return;
  }
  const int64_t width = args.rank + args.key_dim;  // they lie side by side
  if (args.dtype == Dtype::bf16) {
    const bf16* from = reinterpret_cast<const bf16*>(latent);
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(from + d, width - d), width - d);
  } else {
    const float* from = reinterpret_cast<const float*>(latent);
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(from + d, width - d), width - d);
  }
}

template <class T>
void attend_shared(const SharedArgs& args, const SharedTask& task) {
  const int64_t dim = args.dim, heads = std::min<int64_t>(args.heads_at_once, args.num_heads - task.first_head);
  const int64_t out_width = ceil_div(dim, kPanel) * kPanel, words = dim / kPerWord<T>;
  constexpr int kValueSteps = kTile / kPerWord<T>;

  T *q, *weights, *items, *zeros;
  float *out, *scores, *score_scale, *value_scale;
  SoftmaxState* state;
  uint32_t *key_panel, *value_panels, *staging;
  const auto carve = [&](char* base) {
    Carver carver(base);
    q = carver.take<T>(heads * dim);
    items = carver.take<T>(kTile * dim);
    zeros = carver.take<T>(dim);
    out = carver.take<float>(heads * out_width);
    state = carver.take<SoftmaxState>(heads);
    key_panel = carver.take<uint32_t>(words * kTile);
    value_panels = carver.take<uint32_t>(out_width * kValueSteps);
    staging = carver.take<uint32_t>(kTile * (words + kLanes));
    scores = carver.take<float>(kRowsTogether<T> * kTile);
    score_scale = carver.take<float>(kTile);
    value_scale = carver.take<float>(kTile);
    weights = carver.take<T>(kRowsTogether<T> * kTile);
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));

  for (int64_t h = 0; h < heads; ++h) {
    const char* from = args.q + task.token * args.q_token_stride + (task.first_head + h) * args.q_head_stride;
    std::memcpy(q + h * dim, from, dim * sizeof(T));
    state[h] = {args.sinks[task.first_head + h], 1.0f};  // a key that has been seen, whose value is zero
  }
  std::memset(out, 0, heads * out_width * sizeof(float));
  std::memset(value_panels, 0, out_width * kValueSteps * sizeof(uint32_t));
  std::memset(zeros, 0, dim * sizeof(T));
  std::fill(score_scale, score_scale + kTile, args.scale);
  std::fill(value_scale, value_scale + kTile, 1.0f);

  const int64_t begin = args.spans[2 * task.token], near = args.spans[2 * task.token + 1] - begin;
  const int32_t* slots = args.slots + task.token * args.slots_stride;
  int64_t chosen = 0;
  while (chosen < args.num_slots && slots[chosen] >= 0) ++chosen;

  for (int64_t start = 0; start < near + chosen; start += kTile) {
    const T* keys[kTile];
    for (int64_t t = 0; t < kTile; ++t) {
      const int64_t key = start + t;
      keys[t] = zeros;
      if (key < near) {
        keys[t] = reinterpret_cast<const T*>(args.local + (begin + key) * args.local_stride);
      } else if (key < near + chosen) {
        load_item(args.entries, slots[key - near], items + t * dim);
        keys[t] = items + t * dim;
      }
    }
    unpack_keys<T>(keys, dim, staging, key_panel);
    unpack_values<T>(keys, dim, value_panels);
    for (int64_t h = 0, n; h < heads; h += n) {
      n = std::min<int64_t>(kRowsTogether<T>, heads - h);
      multiply_rows<T>(reinterpret_cast<const char*>(q + h * dim), dim * sizeof(T), n, key_panel, words, scores, kTile,
                       false);
      for (int64_t i = 0; i < n; ++i)
        softmax_tile(scores + i * kTile, score_scale, value_scale, near + chosen - 1 - start, state[h + i],
                     weights + i * kTile, out + (h + i) * out_width, out_width);
      for (int64_t d = 0; d < dim; d += kPanel)
        multiply_rows<T>(reinterpret_cast<const char*>(weights), kTile * sizeof(T), n, value_panels + d * kValueSteps,
                         kValueSteps, out + h * out_width + d, out_width, true);
    }
  }

  for (int64_t h = 0; h < heads; ++h) {
    T* to = reinterpret_cast<T*>(args.out) + (task.token * args.num_heads + task.first_head + h) * dim;
    for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(out + h * out_width + d) / state[h].sum, dim - d);
  }
}

void shared_attention(const SharedArgs& args, const SharedTask& task) {
  [[maybe_unused]] const TileUse tiles;
  args.dtype == Dtype::bf16 ? attend_shared<bf16>(args, task) : attend_shared<float>(args, task);
}

template <class T>
void score_entries(const IndexArgs& args, const IndexTask& task) {
  const int64_t dim = args.dim, words = dim / kPerWord<T>, heads = args.num_heads;
  T *q, *items, *zeros;
  float *scores, *sums;
  uint32_t *panel, *staging;
  const auto carve = [&](char* base) {
    Carver carver(base);
    q = carver.take<T>(heads * dim);
    items = carver.take<T>(kTile * dim);
    zeros = carver.take<T>(dim);
    panel = carver.take<uint32_t>(words * kTile);
    staging = carver.take<uint32_t>(kTile * (words + kLanes));
    scores = carver.take<float>(kRowsTogether<T> * kTile);
    sums = carver.take<float>(kTile);
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));

  for (int64_t h = 0; h < heads; ++h)
    std::memcpy(q + h * dim, args.q + task.token * args.q_token_stride + h * args.q_head_stride, dim * sizeof(T));
  std::memset(zeros, 0, dim * sizeof(T));
  std::memset(sums, 0, kTile * sizeof(float));
  const int32_t* blocks = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(args.block_tables) +
                                                           args.sequences[task.token] * args.block_tables_stride);
  const int64_t count = std::min<int64_t>(kTile, args.visible[task.token] - task.first_entry);
  const T* keys[kTile];
  for (int64_t t = 0; t < kTile; ++t) {
    keys[t] = zeros;
    if (t >= count) continue;
    const int64_t entry = task.first_entry + t;
    const int64_t slot = blocks[entry / args.entries.block_size] * static_cast<int64_t>(args.entries.block_size) +
                         entry % args.entries.block_size;
    load_item(args.entries, slot, items + t * dim);
    keys[t] = items + t * dim;
  }
  unpack_keys<T>(keys, dim, staging, panel);
  const float* weights = args.weights + task.token * heads;
  for (int64_t h = 0, n; h < heads; h += n) {
    n = std::min<int64_t>(kRowsTogether<T>, heads - h);
    multiply_rows<T>(reinterpret_cast<const char*>(q + h * dim), dim * sizeof(T), n, panel, words, scores, kTile, false);
    for (int64_t i = 0; i < n; ++i)
      for (int t = 0; t < kTile; t += kLanes)
        store(sums + t, load(sums + t) + max(load(scores + i * kTile + t), F32{}) * weights[h + i]);
  }
  std::memcpy(args.scores + task.token * args.scores_stride + task.first_entry, sums, count * sizeof(float));
}

void index_scores(const IndexArgs& args, const IndexTask& task) {
  [[maybe_unused]] const TileUse tiles;
  args.dtype == Dtype::bf16 ? score_entries<bf16>(args, task) : score_entries<float>(args, task);
}

void pool_windows(const PoolArgs& args, int64_t row) {
  const int64_t size = args.count * args.width;
  const float *keys = args.keys + row * size, *gates = args.gates + row * size;
  for (int64_t d = 0; d < args.width; d += kLanes) {
    const int64_t left = args.width - d;
    F32 largest = load(gates + d, left);
    for (int64_t slot = 1; slot < args.count; ++slot) largest = max(load(gates + slot * args.width + d, left), largest);
    F32 total = {}, norm = {};
    for (int64_t slot = 0; slot < args.count; ++slot) {
      const F32 weight = exp(load(gates + slot * args.width + d, left) - largest);
      total += load(keys + slot * args.width + d, left) * weight;
      norm += weight;
    }
    store(args.out + row * args.width + d, total / norm, left);
  }
}
