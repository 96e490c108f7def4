// The k largest values as torch.topk finds them on the CPU, which among equals is a matter of its algorithm: NaN counts
// as the largest, a small k is sorted off the whole, a larger one partitioned first.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels.h"

namespace twinpool {

void top_as_torch(const float* values, int64_t n, int64_t k, int32_t* indices) {
  using Entry = std::pair<float, int64_t>;
  constexpr int64_t kSortedOff = 64;  // of so many values for each one that is wanted
  thread_local std::vector<Entry> entries;
  entries.clear();
  for (int64_t i = 0; i < n; ++i) entries.emplace_back(values[i], i);
  const auto is_before = [](const Entry& a, const Entry& b) {
    return (a.first != a.first && b.first == b.first) || a.first > b.first;
  };
  if (k * kSortedOff <= n) {
    std::partial_sort(entries.begin(), entries.begin() + k, entries.end(), is_before);
  } else {
    std::nth_element(entries.begin(), entries.begin() + k - 1, entries.end(), is_before);
    std::sort(entries.begin(), entries.begin() + k - 1, is_before);
  }
  for (int64_t i = 0; i < k; ++i) indices[i] = static_cast<int32_t>(entries[i].second);
}

}  // namespace twinpool
