// Chooses a token from a row of logits: what engine/sampling.py does for rows without penalties. The largest of every
// block of kChoiceBlock logits is noted in the first pass, so that later ones look only where something can be found.

constexpr int64_t kChoiceBlock = 256;

TWINPOOL_INLINE float to_float(float value) { return value; }
TWINPOOL_INLINE float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// kLanes logits from x on, of which `count` exist; the others are -inf.
template <class T>
TWINPOOL_INLINE F32 load_logits(const T* x, int64_t count) {
  if (count >= kLanes) return load(x);
  float padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? to_float(x[i]) : -std::numeric_limits<float>::infinity();
  return load(padded);
}

template <class T>
struct ChoiceRow {
  const T* x;
  int64_t vocab, num_blocks;
  float* block_largest;  // [num_blocks]
  double* block_mass;    // [num_blocks]
  Candidate* candidates;  // [vocab]
  float largest, temperature;

  int64_t begin(int64_t block) const { return block * kChoiceBlock; }
  int64_t end(int64_t block) const { return std::min(vocab, (block + 1) * kChoiceBlock); }
  F32 scores(int64_t i) const { return (load_logits(x + i, vocab - i) - splat(largest)) / splat(temperature); }
  float score(int64_t i) const { return (to_float(x[i]) - largest) / temperature; }

  // False where a logit is NaN or the largest is infinite.
  bool find_largest() {
    largest = -std::numeric_limits<float>::infinity();
    I32 broken = {};
    for (int64_t block = 0; block < num_blocks; ++block) {
      F32 most = splat(-std::numeric_limits<float>::infinity());
      for (int64_t i = begin(block); i < end(block); i += kLanes) {
        const F32 value = load_logits(x + i, vocab - i);
        broken |= (I32)(value != value);
        most = max(value, most);
      }
      block_largest[block] = max_lanes(most);
      largest = std::max(largest, block_largest[block]);
    }
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= broken[i];
    return !any && std::abs(largest) <= std::numeric_limits<float>::max();
  }

  int32_t first_largest() const {
    int64_t block = 0;
    while (block_largest[block] != largest) ++block;
    int64_t i = begin(block);
    while (to_float(x[i]) != largest) ++i;
    return static_cast<int32_t>(i);
  }

  TWINPOOL_INLINE F32 weights(int64_t i, float least) const {
    const F32 weight = exp(scores(i));
    return weight >= least ? weight : F32{};
  }

  // The sum of all weights, of which those below `least` are none.
  double mass(float least) {
    double total = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
      F32 sum = {};
      for (int64_t i = begin(block); i < end(block); i += kLanes) sum += weights(i, least);
      total += block_mass[block] = sum_lanes(sum);
    }
    return total;
  }

  // The first token whose cumulative weight, in the order of the vocabulary, exceeds point * mass.
  int32_t draw(double point, float least) {
    const double target = point * mass(least);
    double before = 0;
    int64_t block = 0, last = 0;  // last: a block with weights, where rounding leaves the target behind all of them
    for (; block < num_blocks; before += block_mass[block++]) {
      if (block_mass[block] > 0) last = block;
      if (before + block_mass[block] > target) break;
    }
    if (block == num_blocks) block = last, before = target;
    int64_t chosen = begin(block);
    for (int64_t i = begin(block); i < end(block); i += kLanes) {
      float lanes[kLanes];
      store(lanes, weights(i, least));
      for (int64_t lane = 0; lane < kLanes && i + lane < vocab; ++lane) {
        if (!(lanes[lane] > 0)) continue;
        chosen = i + lane, before += lanes[lane];
        if (before > target) return static_cast<int32_t>(chosen);
      }
    }
    return static_cast<int32_t>(chosen);
  }

  // Tokens whose score is at least -reach.
  int64_t collect(float reach) {
    int64_t count = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (!((block_largest[block] - largest) / temperature >= -reach)) continue;
      for (int64_t i = begin(block); i < end(block); ++i)
        if (const float value = score(i); value >= -reach) candidates[count++] = {value, static_cast<int32_t>(i)};
    }
    return count;
  }
};

template <class T>
int32_t choose_of(const ChoiceArgs& args, const TokenChoice& choice) {
  ChoiceRow<T> row = {};
  row.x = reinterpret_cast<const T*>(args.logits + choice.row * args.stride), row.vocab = args.vocab;
  row.num_blocks = ceil_div(row.vocab, kChoiceBlock), row.temperature = choice.temperature;
  const auto carve = [&](char* base) {
    Carver carver(base);
    row.block_largest = carver.take<float>(row.num_blocks), row.block_mass = carver.take<double>(row.num_blocks);
    row.candidates = carver.take<Candidate>(row.vocab);
    return carver.bytes();
  };
  carve(scratch(carve(nullptr)));
  if (!row.find_largest()) return -1;
  if (choice.temperature == 0) return row.first_largest();
  const bool keeps_all = choice.top_k <= 0 || choice.top_k >= row.vocab;
  if (keeps_all && choice.top_p >= 1) return row.draw(choice.point, static_cast<float>(choice.min_p));
  const double all_mass = keeps_all ? row.mass(0) : 0;
  // Few are near the likeliest, and mostly enough: who reaches further down sorts more.
  for (float reach = 6; reach < 50; reach *= 2) {
    const int64_t count = row.collect(reach);
    if (keeps_all ? mass_of(row.candidates, count) >= choice.top_p * all_mass : count >= choice.top_k)
      return draw_among(row.candidates, count, choice, all_mass);
  }
  return draw_among(row.candidates, row.collect(std::numeric_limits<float>::infinity()), choice, all_mass);
}

void choose(const ChoiceArgs& args, int64_t index) {
  TokenChoice& choice = args.choices[index];
  choice.token = args.dtype == Dtype::bf16 ? choose_of<bf16>(args, choice) : choose_of<float>(args, choice);
}
