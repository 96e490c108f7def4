// The output layer and the choice of the next tokens of a whole batch in one call (cpu_sampling.py), and the part of
// the choice that sorts.
#include <algorithm>
#include <cmath>

#include "dispatch.h"

namespace twinpool {

double mass_of(const Candidate* candidates, int64_t count) {
  double mass = 0;
  for (int64_t i = 0; i < count; ++i) mass += std::exp(static_cast<double>(candidates[i].score));
  return mass;
}

int32_t draw_among(Candidate* candidates, int64_t count, const TokenChoice& choice, double all_mass) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.token < b.token;
  };
  const bool keeps_all = all_mass > 0;
  const int64_t most = keeps_all ? count : std::min(count, choice.top_k);
  std::partial_sort(candidates, candidates + most, candidates + count, before);
  const double needed = choice.top_p * (keeps_all ? all_mass : mass_of(candidates, most));
  double mass = 0;
  int64_t kept = 0;
  for (; kept < most; ++kept) {
    const double weight = std::exp(static_cast<double>(candidates[kept].score));
    if (kept && ((choice.top_p < 1 && mass >= needed) || weight < choice.min_p)) break;
    mass += weight;
  }
  const double target = choice.point * mass;
  double cumulative = 0;
  for (int64_t i = 0; i < kept; ++i) {
    cumulative += std::exp(static_cast<double>(candidates[i].score));
    if (cumulative > target) return candidates[i].token;
  }
  return candidates[kept - 1].token;
}

}  // namespace twinpool

using namespace twinpool;

// logits [rows, out_features of head] = hidden * head; then each choice's token from its row.
TWINPOOL_API void twinpool_logits_and_tokens(const PackedLinear* head, const void* hidden, int64_t stride, int64_t rows,
                                             void* logits, TokenChoice* choices, int64_t num_choices) {
  run_linear(*head, hidden, stride, rows, logits);
  const ChoiceArgs args = {head->dtype, static_cast<const char*>(logits), head->out_features * size_of(head->dtype),
                           head->out_features, choices};
  parallel_for(num_choices, [&](int64_t i) { kernels().choose(args, i); });
}
