// Attention over the paged cache, for prefill and decode alike, straight from the stored rows.
//
// A task is a run of one sequence's queries with all query heads of one KV head. It walks the cache in tiles of kTile
// tokens at fixed positions 0, kTile, 2 * kTile ... whatever the block size. A tile is unpacked once into two panels (K
// with tokens as columns, V with head dimensions as columns), and every query row that can see it goes over it with an
// online softmax:
//   scores = q * K;  p = exp(scores - max);  sum = sum * c + total(p);  out = out * c + p * V;  c = exp(old max - max)
// Every kChunkTokens of the context begin anew, and the chunks' results are merged in their order: by the task that
// walks through all of them, or by the last of several that took one each. What a row does in a tile and in a chunk
// depends only on the row and on where they lie. So its result is the same bits alone, beside others, in one prompt or
// in pieces, from prefill or from decode, from one thread or from many. int8 codes are exact in bf16; their scales go to
// the scores and to p.

constexpr int kTile = kPanel;

// ---- unpacking ----

// Where the tile's tokens lie in the cache, and what their scores and values are to be multiplied with.
template <class Kv>
struct Tile {
  const Kv *keys[kTile], *values[kTile];  // each token's head_dim numbers
  float score_scale[kTile], value_scale[kTile];
};

// Fills in the tile of `kv_head` that starts at token `start`. What lies beyond the context is replaced by `zeros`: no
// row sees it, and nothing that happens to be there can reach a sum.
template <class Kv>
void find_tile(const AttentionArgs& args, const AttentionTask& task, int64_t start, const Kv* zeros, Tile<Kv>& tile) {
  const KvCacheArgs& cache = args.cache;
  const int32_t* blocks = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(args.block_tables) +
                                                           task.sequence * args.block_tables_stride);
  const int64_t length = std::min<int64_t>(kTile, args.context_lens[task.sequence] - start);
  uint16_t k_scale[kTile] = {}, v_scale[kTile] = {};
  int64_t block = start / cache.block_size, place = start % cache.block_size;
  for (int64_t t = 0, run; t < length; t += run, ++block, place = 0) {  // runs of tokens of one block are contiguous
    run = std::min(length - t, cache.block_size - place);
    const int64_t row = blocks[block] * cache.row_bytes, index = cache.row_of(place, task.kv_head);
    const Kv* key = reinterpret_cast<const Kv*>(cache.k + row) + index * cache.head_dim;
    const Kv* value = reinterpret_cast<const Kv*>(cache.v + row) + index * cache.head_dim;
    for (int64_t i = 0; i < run; ++i, key += cache.head_dim, value += cache.head_dim) {
      tile.keys[t + i] = key;
      tile.values[t + i] = value;
    }
    if constexpr (sizeof(Kv) == 1) {
      const auto copy = [&](uint16_t* to, const uint16_t* plane) {
        std::memcpy(to + t, reinterpret_cast<const char*>(plane + index) + row, run * sizeof(uint16_t));
      };
      copy(k_scale, cache.k_scale);
      copy(v_scale, cache.v_scale);
    }
  }
  for (int64_t t = std::max<int64_t>(length, 0); t < kTile; ++t) tile.keys[t] = tile.values[t] = zeros;
  for (int t = 0; t < kTile; t += kLanes) {
    const bool quantized = sizeof(Kv) == 1;
    store(tile.score_scale + t, quantized ? load_half(k_scale + t) * args.scale : splat(args.scale));
    store(tile.value_scale + t, quantized ? load_half(v_scale + t) : splat(1.0f));
  }
}

// Words as panels want them, from the values of k and k + 1 (bf16), or of k alone (fp32).
template <class Kv>
TWINPOOL_INLINE U32 to_bf16_bits(F32 v) {
  if constexpr (sizeof(Kv) == sizeof(float)) return round_to_bf16(v);
  return (U32)v >> 16;  // int8 and bf16 are exact
}

#if TWINPOOL_BF16_DOT
constexpr int64_t kCodes = 64;  // int8 a vector

// Codes of `count` tokens that the next tile unpacks. Tiles are small and lie apart: the processor does not foresee
// them, and would wait for memory a third of the time.
TWINPOOL_INLINE void fetch_codes(const int8_t* const* tokens, int count, int64_t head_dim) {
  for (int t = 0; t < count; ++t)
    for (int64_t d = 0; d < head_dim; d += kLine) __builtin_prefetch(tokens[t] + d, 0, kIntoL2);
}

// What follows below, for head_dim in whole vectors of codes: keys are turned over as codes, four a lane.
void unpack_key_codes(const int8_t* const* keys, const int8_t* const* next, int64_t head_dim, uint32_t* panel) {
  for (int t = 0; t < kTile; t += kLanes) {
    if (next) fetch_codes(next + t, kLanes, head_dim);
    for (int64_t d = 0; d < head_dim; d += kCodes) {
      U32 square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load_vector<U32>(keys[t + i] + d);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) {
        U32 words[2];
        unpack_codes<bf16>(square[i], words);
        uint32_t* to = panel + (d / 2 + 2 * i) * kTile + t;
        store_vector(to, words[0]);
        store_vector(to + kTile, words[1]);
      }
    }
  }
}

void unpack_value_codes(const int8_t* const* values, const int8_t* const* next, int64_t head_dim, uint32_t* panels) {
  static_assert(kPanel == kCodes);
  constexpr int kSteps = kTile / 2;
  alignas(64) uint16_t lanes[2][2 * kLanes];  // 16 values of one token beside those of the next
  for (int i = 0; i < kLanes; ++i)
    for (int half = 0; half < 2; ++half) {
      lanes[half][2 * i] = static_cast<uint16_t>(half * kLanes + i);
      lanes[half][2 * i + 1] = static_cast<uint16_t>(2 * kLanes + half * kLanes + i);
    }
  const __m512i first = _mm512_load_si512(lanes[0]), second = _mm512_load_si512(lanes[1]);
  const __m512i lower = _mm512_load_si512(kHalves.first), upper = _mm512_load_si512(kHalves.second);
  for (int step = 0; step < kSteps; ++step) {
    if (next) fetch_codes(next + 2 * step, 2, head_dim);
    for (int64_t d = 0; d < head_dim; d += kCodes) {
      __m512i low, high, even[2], odd[2];
      bf16_bytes(load_vector<__m512i>(values[2 * step] + d), low, high);
      even[0] = _mm512_permutex2var_epi8(low, lower, high), even[1] = _mm512_permutex2var_epi8(low, upper, high);
      bf16_bytes(load_vector<__m512i>(values[2 * step + 1] + d), low, high);
      odd[0] = _mm512_permutex2var_epi8(low, lower, high), odd[1] = _mm512_permutex2var_epi8(low, upper, high);
      uint32_t* to = panels + (d / kPanel * kSteps + step) * kPanel;
      for (int half = 0; half < 2; ++half) {
        store_vector(to + 2 * half * kLanes, _mm512_permutex2var_epi16(even[half], first, odd[half]));
        store_vector(to + (2 * half + 1) * kLanes, _mm512_permutex2var_epi16(even[half], second, odd[half]));
      }
    }
  }
}
#endif

// next: null, or the keys of the next tile, to be fetched meanwhile.
template <class T, class Kv>
void unpack_keys(const Kv* const* keys, int64_t head_dim, uint32_t* staging, uint32_t* panel,
                 [[maybe_unused]] const Kv* const* next = nullptr) {
#if TWINPOOL_BF16_DOT
  if constexpr (sizeof(T) == sizeof(bf16) && sizeof(Kv) == 1)
    if (head_dim % kCodes == 0) return unpack_key_codes(keys, next, head_dim, panel);
#endif
  const int64_t words = head_dim / kPerWord<T>, stride = ceil_div(words, kLanes) * kLanes;
  for (int t = 0; t < kTile; ++t) {
    T* to = reinterpret_cast<T*>(staging + t * stride);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32 value = load(keys[t] + d, head_dim - d);
      if constexpr (sizeof(T) == sizeof(float)) {
        store(to + d, value);
      } else {
        narrow(to + d, to_bf16_bits<Kv>(value));
      }
    }
  }
  for (int t = 0; t < kTile; t += kLanes)
    for (int64_t word = 0; word < words; word += kLanes) {
      U32 square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load_vector<U32>(staging + (t + i) * stride + word);
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, words - word); ++i)
        store_vector(panel + (word + i) * kTile + t, square[i]);
    }
}

template <class T, class Kv>
void unpack_values(const Kv* const* values, int64_t head_dim, uint32_t* panels,
                   [[maybe_unused]] const Kv* const* next = nullptr) {
#if TWINPOOL_BF16_DOT
  if constexpr (sizeof(T) == sizeof(bf16) && sizeof(Kv) == 1)
    if (head_dim % kCodes == 0) return unpack_value_codes(values, next, head_dim, panels);
#endif
  constexpr int kSteps = kTile / kPerWord<T>;
  for (int step = 0; step < kSteps; ++step)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t left = head_dim - d;
      U32 words;
      if constexpr (sizeof(T) == sizeof(float)) {
        words = (U32)load(values[step] + d, left);
      } else {
        words = to_bf16_bits<Kv>(load(values[2 * step] + d, left)) |
                to_bf16_bits<Kv>(load(values[2 * step + 1] + d, left)) << 16;
      }
      store_vector(panels + (d / kPanel * kSteps + step) * kPanel + d % kPanel, words);
    }
}

// ---- softmax ----

struct SoftmaxState {
  float max, sum;
};

// Takes one row's raw scores of a tile of which it sees the tokens 0 .. last; leaves in `weights` what V is to be
// multiplied with, and scales what `out` has gathered so far to the new maximum.
template <class T>
void softmax_tile(float* scores, const float* score_scale, const float* value_scale, int64_t last, SoftmaxState& state,
                  T* weights, float* out, int64_t out_width) {
  F32 largest = splat(-INFINITY);
  for (int t = 0; t < kTile; t += kLanes) {
    F32 score = load(scores + t) * load(score_scale + t);
    if (last < kTile - 1) {
      I32 token = {};
      for (int i = 0; i < kLanes; ++i) token[i] = i;
      score = token > static_cast<int32_t>(last) - t ? splat(-INFINITY) : score;
    }
    store(scores + t, score);
    largest = max(score, largest);
  }
  const float new_max = std::max(max_lanes(largest), state.max);
  F32 total = {};
  for (int t = 0; t < kTile; t += kLanes) {
    const F32 weight = exp(load(scores + t) - new_max);
    total += weight;
    store_normal(weights + t, weight * load(value_scale + t));
  }
  const float correction = exp(splat(state.max - new_max))[0];
  state.max = new_max;
  state.sum = state.sum * correction + sum_lanes(total);
  if (correction != 1.0f)
    for (int64_t d = 0; d < out_width; d += kLanes) store(out + d, load(out + d) * correction);
}

// ---- chunks ----

static_assert(kChunkTokens % kTile == 0);

// Adds what a chunk gave a row to what the chunks before it gave.
TWINPOOL_INLINE void merge_chunk(SoftmaxState& total, float* total_out, const SoftmaxState& part, const float* part_out,
                                 int64_t out_width, bool is_first) {
  if (is_first) {
    total = part;
    std::memcpy(total_out, part_out, out_width * sizeof(float));
    return;
  }
  const float new_max = std::max(part.max, total.max);
  const float old_weight = exp(splat(total.max - new_max))[0], weight = exp(splat(part.max - new_max))[0];
  total.max = new_max;
  total.sum = total.sum * old_weight + part.sum * weight;
  for (int64_t d = 0; d < out_width; d += kLanes)
    store(total_out + d, load(total_out + d) * old_weight + load(part_out + d) * weight);
}

// The rows of a task: of each the chunk that it is in, and what the chunks before it gave.
struct ChunkRows {
  int64_t rows, out_width;
  SoftmaxState *state, *total_state;
  float *out, *total_out;  // [rows, out_width]

  // Where to put what is gathered: in scratch memory, or where the task's one chunk is wanted.
  void carve(Carver& carver, const AttentionTask& task) {
    const bool has_several = task.chunk < 0 && task.position + task.num_queries > kChunkTokens;
    total_state = carver.take<SoftmaxState>(has_several ? rows : 0);
    total_out = carver.take<float>(has_several ? rows * out_width : 0);
    state = carver.take<SoftmaxState>(task.chunk < 0 ? rows : 0);
    out = carver.take<float>(task.chunk < 0 ? rows * out_width : 0);
    if (task.chunk < 0) return;
    state = reinterpret_cast<SoftmaxState*>(task.partial);
    out = task.partial + partial_states(rows);
  }

  void begin(int64_t first) {
    std::fill(state + first, state + rows, SoftmaxState{-INFINITY, 0.0f});
    std::memset(out + first * out_width, 0, (rows - first) * out_width * sizeof(float));
  }

  void merge(int64_t r, bool is_first) {
    merge_chunk(total_state[r], total_out + r * out_width, state[r], out + r * out_width, out_width, is_first);
  }

  // Before the tile at `start`, for the rows from `first` on.
  void before_tile(int64_t start, int64_t first) {
    if (start == 0 || start % kChunkTokens) return;
    for (int64_t r = first; r < rows; ++r) merge(r, start == kChunkTokens);
    begin(first);
  }

  // Row r, the last of whose tokens is `last`, has seen all: its sums, to be divided by the sum of its weights.
  const float* end(int64_t r, int64_t last, float& sum) {
    const bool is_alone = last < kChunkTokens;
    if (!is_alone) merge(r, false);
    sum = (is_alone ? state : total_state)[r].sum;
    return (is_alone ? out : total_out) + r * out_width;
  }
};

// The tokens that a task walks through.
inline int64_t chunk_begin(const AttentionTask& task) { return std::max<int64_t>(task.chunk, 0) * kChunkTokens; }
inline int64_t chunk_end(const AttentionTask& task) {
  const int64_t end = task.position + task.num_queries;
  return task.chunk < 0 ? end : std::min(end, (task.chunk + 1) * kChunkTokens);
}

// Merges the chunks of every row into the first; write(row, sums, sum of weights).
template <class Write>
void merge_partials(const AttentionTask& task, int64_t group, int64_t width, float* partials, const Write& write) {
  const int64_t rows = task.num_queries * group, out_width = ceil_div(width, kPanel) * kPanel;
  const int64_t stride = partial_floats(rows, width);
  float* const out = partials + partial_states(rows);
  SoftmaxState* const states = reinterpret_cast<SoftmaxState*>(partials);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t chunk = 1; chunk <= (task.position + r / group) / kChunkTokens; ++chunk)
      merge_chunk(states[r], out + r * out_width,
                  reinterpret_cast<const SoftmaxState*>(partials + chunk * stride)[r],
                  out + chunk * stride + r * out_width, out_width, false);
    write(r, out + r * out_width, states[r].sum);
  }
}

// ---- one task ----

template <class T>
TWINPOOL_INLINE void write_attended(const AttentionArgs& args, const AttentionTask& task, int64_t r, const float* out,
                                    float sum) {
  const int64_t head_dim = args.cache.head_dim, group = args.num_heads / args.cache.num_kv_heads;
  T* to = reinterpret_cast<T*>(args.out) +
          ((task.first_query + r / group) * args.num_heads + task.kv_head * group + r % group) * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(out + d) / sum, head_dim - d);
}

template <class T, class Kv>
void attend(const AttentionArgs& args, const AttentionTask& task) {
  const KvCacheArgs& cache = args.cache;
  const int64_t head_dim = cache.head_dim, group = args.num_heads / cache.num_kv_heads, rows = task.num_queries * group;
  const int64_t out_width = ceil_div(head_dim, kPanel) * kPanel, words = head_dim / kPerWord<T>;
  constexpr int kValueSteps = kTile / kPerWord<T>;

  T *q, *weights;
  float* scores;
  ChunkRows gathered = {rows, out_width};
  uint32_t *key_panel, *value_panels, *staging;
  Kv* zeros;
  Tile<Kv>*tile, *next;
  const auto carve = [&](char* base) {
    Carver carver(base);
    q = carver.take<T>(rows * head_dim);
    gathered.carve(carver, task);
    key_panel = carver.take<uint32_t>(words * kTile);
    value_panels = carver.take<uint32_t>(out_width * kValueSteps);
    staging = carver.take<uint32_t>(kTile * (words + kLanes));
    scores = carver.take<float>(kRowsTogether<T> * kTile);
    weights = carver.take<T>(kRowsTogether<T> * kTile);
    tile = carver.take<Tile<Kv>>(1), next = carver.take<Tile<Kv>>(1);
    zeros = carver.take<Kv>(head_dim);
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));

  const int64_t first_head = task.kv_head * group;
  for (int64_t r = 0; r < rows; ++r) {
    const char* from =
        args.q + (task.first_query + r / group) * args.q_token_stride + (first_head + r % group) * args.q_head_stride;
    std::memcpy(q + r * head_dim, from, head_dim * sizeof(T));
  }
  gathered.begin(0);
  std::memset(value_panels, 0, out_width * kValueSteps * sizeof(uint32_t));
  std::memset(zeros, 0, head_dim * sizeof(Kv));

  find_tile(args, task, chunk_begin(task), zeros, *next);
  for (int64_t start = chunk_begin(task); start < chunk_end(task); start += kTile) {
    const int64_t first_seeing = std::max<int64_t>(0, start - task.position) * group;
    if (task.chunk < 0) gathered.before_tile(start, first_seeing);
    std::swap(tile, next);
    const bool is_last = start + kTile >= chunk_end(task), has_next = !is_last || task.next;
    if (has_next) {
      const AttentionTask& of = is_last ? *task.next : task;
      find_tile(args, of, is_last ? chunk_begin(of) : start + kTile, zeros, *next);
    }
    unpack_keys<T>(tile->keys, head_dim, staging, key_panel, has_next ? next->keys : nullptr);
    unpack_values<T>(tile->values, head_dim, value_panels, has_next ? next->values : nullptr);

    for (int64_t r = first_seeing, n; r < rows; r += n) {
      n = std::min<int64_t>(kRowsTogether<T>, rows - r);
      multiply_rows<T>(reinterpret_cast<const char*>(q + r * head_dim), head_dim * sizeof(T), n, key_panel, words,
                       scores, kTile, false);
      for (int64_t i = 0; i < n; ++i)
        softmax_tile(scores + i * kTile, tile->score_scale, tile->value_scale, task.position + (r + i) / group - start,
                     gathered.state[r + i], weights + i * kTile, gathered.out + (r + i) * out_width, out_width);
      for (int64_t d = 0; d < head_dim; d += kPanel)
        multiply_rows<T>(reinterpret_cast<const char*>(weights), kTile * sizeof(T), n, value_panels + d * kValueSteps,
                         kValueSteps, gathered.out + r * out_width + d, out_width, true);
    }
  }

  if (task.chunk >= 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    float sum;
    const float* out = gathered.end(r, task.position + r / group, sum);
    write_attended<T>(args, task, r, out, sum);
  }
}

template <class T>
void attend_over(const AttentionArgs& args, const AttentionTask& task) {
  switch (args.cache.dtype) {
    case Dtype::int8: return attend<T, int8_t>(args, task);
    case Dtype::bf16: return attend<T, bf16>(args, task);
    case Dtype::fp32: return attend<T, float>(args, task);
  }
}

void attention(const AttentionArgs& args, const AttentionTask& task) {
  [[maybe_unused]] const TileUse tiles;
  args.dtype == Dtype::bf16 ? attend_over<bf16>(args, task) : attend_over<float>(args, task);
}

void merge_attention(const AttentionArgs& args, const AttentionTask& task, float* partials) {
  merge_partials(task, args.num_heads / args.cache.num_kv_heads, args.cache.head_dim, partials,
                 [&](int64_t r, const float* out, float sum) {
                   args.dtype == Dtype::bf16 ? write_attended<bf16>(args, task, r, out, sum)
                                             : write_attended<float>(args, task, r, out, sum);
                 });
}
