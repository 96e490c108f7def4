// Mixture of experts: choosing experts from router logits in one pass over a row, and adding up what they return.

// log(1 + e) for 0 <= e <= 1, to fp32 also where e is tiny: twice the series of atanh(e / (2 + e)).
TWINPOOL_INLINE F32 log1p(F32 e) {
  const F32 z = e / (e + 2.0f), square = z * z;
  F32 p = splat(1.0f / 15);
  p = fma(p, square, splat(1.0f / 13));
  p = fma(p, square, splat(1.0f / 11));
  p = fma(p, square, splat(1.0f / 9));
  p = fma(p, square, splat(1.0f / 7));
  p = fma(p, square, splat(1.0f / 5));
  p = fma(p, square, splat(1.0f / 3));
  p = fma(p, square, splat(1.0f));
  return 2.0f * z * p;
}

// max(x, 0), where NaN stays NaN.
TWINPOOL_INLINE F32 positive_part(F32 x) { return x < 0.0f ? F32{} : x; }

TWINPOOL_INLINE F32 magnitude(F32 x) { return (F32)((U32)x & 0x7fffffffu); }

// The first `count` lanes; the others are `other`.
TWINPOOL_INLINE F32 load_or(const float* from, int64_t count, float other) {
  if (count >= kLanes) return load(from);
  float padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? from[i] : other;
  return load(padded);
}

bool has_nan(const float* values, int64_t n) {
  F32 count = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 x = load(values + i, n - i);
    count += x != x ? splat(1.0f) : F32{};
  }
  return sum_lanes(count) != 0.0f;
}

// scores: as many as there are experts, padded to whole vectors.
void score_row(const GatingArgs& args, const float* logits, float* scores) {
  const int64_t n = args.num_experts;
  if (args.score == Score::softmax) {
    F32 largest = splat(-INFINITY);
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32 x = load_or(logits + i, n - i, -INFINITY);
      store(scores + i, x);
      largest = max(x, largest);  // skips NaN, which the sum does not
    }
    const F32 top = splat(max_lanes(largest));
    F32 sums = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32 e = exp(load(scores + i) - top);
      store(scores + i, e);
      sums += e;
    }
    const F32 sum = splat(sum_lanes(sums));
    for (int64_t i = 0; i < n; i += kLanes) store(scores + i, load(scores + i) / sum);
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 x = load(logits + i, n - i), e = exp(-magnitude(x));
    if (args.score == Score::sigmoid) {
      store(scores + i, (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f));
    } else {
      F32 score = positive_part(x) + log1p(e);
      for (int j = 0; j < kLanes; ++j) score[j] = std::sqrt(score[j]);
      store(scores + i, score);
    }
  }
}

template <uint32_t kHalf = kLanes / 2>
TWINPOOL_INLINE float two_best_lanes(F32 first, F32 second) {
  const F32 other = rotate<kHalf>(first, Lanes()), other_second = rotate<kHalf>(second, Lanes());
  second = max(max(second, other_second), other > first ? first : other);
  first = max(first, other);
  if constexpr (kHalf > 1) return two_best_lanes<kHalf / 2>(first, second);
  return first[0] + second[0];
}

// The sum of the two largest of n values, none of them NaN.
float two_best(const float* values, int64_t n) {
  F32 first = splat(-INFINITY), second = first;
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 x = load_or(values + i, n - i, -INFINITY);
    second = max(second, x > first ? first : x);
    first = max(first, x);
  }
  return two_best_lanes(first, second);
}

constexpr int kColumns = 16, kMostCandidates = 32;
static_assert(kColumns % kLanes == 0);

// ranks [count]: how many of `count` values are larger than each. Both are padded to whole vectors.
void rank(const float* values, int64_t count, float* ranks) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 value = load(values + i);
    F32 larger = {};
    for (int64_t j = 0; j < count; ++j) larger += splat(values[j]) > value ? splat(1.0f) : F32{};
    store(ranks + i, larger);
  }
}

// The values from `threshold` on and their indices, appended to arrays with room for all and a vector more.
int64_t collect(const float* values, int64_t n, float threshold, float* found, int32_t* indices) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
#if TWINPOOL_LANES == 16
    const __m512 x = load(values + i);
    const __mmask16 mask = _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(found + count, _mm512_maskz_compress_ps(mask, x));
    _mm512_storeu_si512(indices + count,
                        _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(i)))));
    count += __builtin_popcount(mask);
#else
    for (int64_t j = i; j < i + kLanes; ++j) {
      found[count] = values[j], indices[count] = static_cast<int32_t>(j);
      count += values[j] >= threshold;
    }
#endif
  }
  return count;
}

// The k best of a row without NaN that is padded with -infinity to whole vectors; false where infinities or equals
// leave more than one answer, or this way does not lead to one. Of kColumns columns the k + 1 best maxima are that many
// values at least: what is no less than the last of them is all that has to be ranked.
bool choose_clear(const float* choice, int64_t n, int64_t k, float* found, int32_t* indices, int32_t* experts) {
  if (k >= kColumns) return false;
  F32 largest[kColumns / kLanes];
  for (F32& each : largest) each = splat(-INFINITY);
  for (int64_t i = 0, column = 0; i < n; i += kLanes, column = (column + 1) % (kColumns / kLanes))
    largest[column] = max(load(choice + i), largest[column]);
  float maxima[kColumns], ranks[kMostCandidates];
  for (int i = 0; i < kColumns / kLanes; ++i) store(maxima + i * kLanes, largest[i]);
  rank(maxima, kColumns, ranks);
  F32 lowest = splat(-INFINITY);
  for (int i = 0; i < kColumns; i += kLanes)
    lowest = max(lowest, load(ranks + i) > static_cast<float>(k) ? splat(-INFINITY) : -load(maxima + i));
  const int64_t count = collect(choice, n, std::max(-max_lanes(lowest), std::numeric_limits<float>::lowest()), found,
                                indices);
  if (count < k || count > kMostCandidates) return false;
  for (int i = 0; i < kLanes; ++i) found[count + i] = -INFINITY;
  rank(found, count, ranks);
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto place = static_cast<int64_t>(ranks[i]);
    sum += place;
    if (place < k) experts[place] = indices[i];
  }
  return sum == count * (count - 1) / 2;
}

// The indices of the k best; in doubt those of torch.topk.
struct Chooser {
  float *padded, *found;
  int32_t* indices;
  int64_t n;

  static size_t room(int64_t n) { return (ceil_div(n, kLanes) + 1) * kLanes; }

  void operator()(const float* choice, int64_t k, bool is_ordered, int32_t* experts) const {
    for (int64_t i = 0; i < n; i += kLanes) store(padded + i, load_or(choice + i, n - i, -INFINITY));
    if (!is_ordered || !choose_clear(padded, n, k, found, indices, experts)) top_as_torch(choice, n, k, experts);
  }
};

// Takes all but the best groups out of the choice. A group counts as much as its two best experts together.
void keep_best_groups(const GatingArgs& args, bool is_ordered, float* choice) {
  constexpr int64_t kMostGroups = 256;
  const int64_t size = args.num_experts / args.num_groups;
  float group_scores[kMostGroups], padded[kMostGroups + kLanes], found[kMostGroups + kLanes];
  int32_t indices[kMostGroups + kLanes], kept[kMostGroups];
  bool is_kept[kMostGroups] = {};
  for (int64_t g = 0; g < args.num_groups; ++g) {
    const float* group = choice + g * size;
    const bool is_nan = !is_ordered && has_nan(group, size);
    group_scores[g] = is_nan ? std::numeric_limits<float>::quiet_NaN() : two_best(group, size);
  }
  Chooser{padded, found, indices, args.num_groups}(group_scores, args.groups_kept, is_ordered, kept);
  for (int64_t i = 0; i < args.groups_kept; ++i) is_kept[kept[i]] = true;
  for (int64_t g = 0; g < args.num_groups; ++g)
    if (!is_kept[g]) std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
}

void gating(const GatingArgs& args, int64_t row) {
  const int64_t n = args.num_experts, k = args.k, room = Chooser::room(n);
  float* scores = reinterpret_cast<float*>(scratch(5 * room * sizeof(float)));
  float* choice = scores + room;
  score_row(args, reinterpret_cast<const float*>(args.logits + row * args.stride), scores);
  int32_t* experts = args.experts + row * k;
  if (args.experts_of_token) {
    std::copy_n(args.experts_of_token + args.token_ids[row] * k, k, experts);
  } else {
    for (int64_t i = 0; i < n; i += kLanes)
      store(choice + i, args.bias ? load(scores + i) + load(args.bias + i, n - i) : load(scores + i));
    const bool is_ordered = !has_nan(choice, n);
    if (args.num_groups > 1) keep_best_groups(args, is_ordered, choice);
    const Chooser choose = {choice + room, choice + 2 * room, reinterpret_cast<int32_t*>(choice + 3 * room), n};
    choose(choice, k, is_ordered, experts);
  }
  float* weights = args.weights + row * k;
  float sum = 0.0f;
  for (int64_t j = 0; j < k; ++j) sum += weights[j] = scores[experts[j]];
  for (int64_t j = 0; j < k; ++j)
    weights[j] = (args.renormalize ? weights[j] / (sum + args.eps) : weights[j]) * args.scale;
}

template <class T>
void combine_row(const CombineArgs& args, int64_t row) {
  const T* rows = reinterpret_cast<const T*>(args.rows);
  const float* weights = args.weights + row * args.k;
  const int32_t* places = args.places + row * args.k;
  T* out = reinterpret_cast<T*>(args.out) + row * args.width;
  const T* added = args.added ? reinterpret_cast<const T*>(args.added) + row * args.width : nullptr;
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const int64_t left = args.width - i;
    F32 sum = {};
    for (int64_t j = 0; j < args.k; ++j) sum = fma(load(rows + places[j] * args.width + i, left), splat(weights[j]), sum);
    store(out + i, added ? rounded_to<T>(sum) + load(added + i, left) : sum, left);
  }
}

void combine(const CombineArgs& args, int64_t row) {
  args.dtype == Dtype::bf16 ? combine_row<bf16>(args, row) : combine_row<float>(args, row);
}
