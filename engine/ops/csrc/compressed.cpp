// The C interface of cpu_compressed.py: attention over windows and compressed entries, and streams of residuals.
#include <algorithm>
#include <limits>
#include <vector>

#include "dispatch.h"

using namespace twinpool;

namespace {

constexpr int64_t kIndexTile = kPanel;  // entries that are scored at a time

// The k largest of n scores, the first among equals, in ascending order of their places.
void choose(const float* scores, int32_t n, int32_t k, int32_t* chosen) {
  thread_local std::vector<int32_t> places;
  places.resize(n);
  for (int32_t i = 0; i < n; ++i) places[i] = i;
  const auto rank = [&](int32_t i) {  // what is no number comes last
    return scores[i] == scores[i] ? scores[i] : -std::numeric_limits<float>::infinity();
  };
  std::nth_element(places.begin(), places.begin() + k - 1, places.end(), [&](int32_t a, int32_t b) {
    return rank(a) > rank(b) || (rank(a) == rank(b) && a < b);
  });
  std::sort(places.begin(), places.begin() + k);
  std::copy_n(places.begin(), k, chosen);
}

}  // namespace

TWINPOOL_API void twinpool_shared_attention(const SharedArgs* args, int64_t tokens) {
  const int64_t groups = ceil_div(args->num_heads, args->heads_at_once);
  parallel_for(tokens * groups, [&](int64_t i) {
    kernels().shared_attention(*args, {i / groups, i % groups * args->heads_at_once});
  });
}

// chosen [tokens, width]: of the tokens that see more than k entries the k best; the others are the caller's.
TWINPOOL_API void twinpool_lightning_indexer(const IndexArgs* args, int64_t tokens, int64_t k, int32_t* chosen,
                                             int64_t width) {
  std::vector<IndexTask> tasks;
  std::vector<int64_t> choosing;
  for (int64_t t = 0; t < tokens; ++t) {
    if (args->visible[t] <= k) continue;
    choosing.push_back(t);
    for (int64_t entry = 0; entry < args->visible[t]; entry += kIndexTile) tasks.push_back({t, entry});
  }
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i) { kernels().index_scores(*args, tasks[i]); });
  parallel_for(static_cast<int64_t>(choosing.size()), [&](int64_t i) {
    const int64_t t = choosing[i];
    choose(args->scores + t * args->scores_stride, args->visible[t], static_cast<int32_t>(k), chosen + t * width);
  });
}

TWINPOOL_API void twinpool_pool_windows(const PoolArgs* args, int64_t rows) {
  parallel_for(rows, [&](int64_t row) { kernels().pool_windows(*args, row); });
}

TWINPOOL_API void twinpool_streams_in(const StreamsInArgs* args, int64_t tokens) {
  for_each_row(kernels().streams_in, *args, tokens);
}

TWINPOOL_API void twinpool_streams_out(const StreamsOutArgs* args, int64_t tokens) {
  for_each_row(kernels().streams_out, *args, tokens);
}
