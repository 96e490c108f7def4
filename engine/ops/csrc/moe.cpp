// Mixture of experts and other groups of matrices, each multiplied with rows of its own: the C interface of cpu_moe.py.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"

using namespace twinpool;

namespace {

// Several linears as one hand-out to the threads: many of them are too small to be shared out alone.
void run_linears(const std::vector<LinearArgs>& linears) {
  thread_local std::vector<int64_t> kept_ends;
  std::vector<int64_t>& ends = kept_ends;  // the threads look at the caller's
  ends.clear();
  int64_t total = 0;
  for (const LinearArgs& each : linears)
    ends.push_back(total += ceil_div(each.rows, kLinearRows) * ceil_div(each.weight->out_features, kPanel));
  parallel_for(total, [&](int64_t task) {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    kernels().linear(linears[i], i ? task - ends[i - 1] : task);
  });
}

}  // namespace

TWINPOOL_API void twinpool_gating(int score, const void* logits, int64_t stride, int64_t rows, int64_t num_experts,
                                  int64_t k, const float* bias, int64_t num_groups, int64_t groups_kept,
                                  const int64_t* token_ids, const int32_t* experts_of_token, int renormalize,
                                  float scale, float eps, float* weights, int32_t* experts) {
  const GatingArgs args = {static_cast<Score>(score),
                           static_cast<const char*>(logits),
                           stride,
                           num_experts,
                           k,
                           bias,
                           num_groups,
                           groups_kept,
                           token_ids,
                           experts_of_token,
                           renormalize != 0,
                           scale,
                           eps,
                           weights,
                           experts};
  for_each_row(kernels().gating, args, rows);
}

// Same layout as `native.ExpertsArgs`. All matrices of a kind have one shape and format.
struct ExpertsArgs {
  int64_t num_experts;
  const PackedLinear *gate_up, *down;    // [num_experts]
  const PackedLinear* gated_rotation;    // null, or [n, n] over the inputs of `down`, n at a time
  float limit;
};

// out [rows, hidden] = for each row the weighted sum of what its k experts make of it. Rows are sorted by expert, so
// that each expert's matrices are read once, and those of experts without rows not at all.
TWINPOOL_API void twinpool_moe_experts(const ExpertsArgs* experts, const char* x, int64_t x_stride, int64_t rows,
                                       int64_t k, const float* weights, const int32_t* chosen, char* out) {
  const PackedLinear &gate_up = experts->gate_up[0], &down = experts->down[0];
  const int64_t hidden = gate_up.in_features, inner = down.in_features, size = size_of(gate_up.dtype), pairs = rows * k;
  const int64_t digits = std::max(kernels().num_digits(gate_up), kernels().num_digits(down));

  char *sorted, *projected, *gated, *turned, *returned;
  int8_t* codes;
  float* row_scales;
  int32_t* places;  // of every (row, choice) among the sorted rows
  const auto carve = [&](char* base) {
    Carver carver(base);
    sorted = carver.take<char>(pairs * hidden * size);
    projected = carver.take<char>(pairs * 2 * inner * size);
    gated = carver.take<char>(pairs * inner * size);
    turned = experts->gated_rotation ? carver.take<char>(pairs * inner * size) : gated;
    returned = carver.take<char>(pairs * down.out_features * size);
    codes = carver.take<int8_t>(pairs * digits * 4 * std::max(gate_up.steps, down.steps));
    row_scales = carver.take<float>(pairs);
    places = carver.take<int32_t>(pairs);
    return carver.bytes();
  };
  carve(caller_scratch(carve(nullptr)));

  thread_local std::vector<int64_t> kept_begins;
  std::vector<int64_t>& begins = kept_begins;  // of each expert's rows among the sorted
  begins.assign(experts->num_experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++begins[chosen[i] + 1];
  for (int64_t e = 0; e < experts->num_experts; ++e) begins[e + 1] += begins[e];
  {
    thread_local std::vector<int64_t> next;
    next.assign(begins.begin(), begins.end());
    for (int64_t i = 0; i < pairs; ++i) places[i] = static_cast<int32_t>(next[chosen[i]]++);
  }
  parallel_for(rows, [&](int64_t row) {
    for (int64_t j = 0; j < k; ++j)
      std::memcpy(sorted + places[row * k + j] * hidden * size, x + row * x_stride, hidden * size);
  });

  thread_local std::vector<LinearArgs> kept_linears;
  std::vector<LinearArgs>& linears = kept_linears;
  const auto multiply = [&](const PackedLinear* matrices, const char* from, char* to) {
    const PackedLinear& any = matrices[0];
    const int64_t in_stride = any.in_features * size, out_stride = any.out_features * size;
    const int64_t own_digits = kernels().num_digits(any);
    if (own_digits) for_each_row(kernels().quantize, {&any, from, in_stride, pairs, codes, row_scales, nullptr}, pairs);
    linears.clear();
    for (int64_t e = 0; e < experts->num_experts; ++e)
      if (const int64_t begin = begins[e], count = begins[e + 1] - begin; count)
        linears.push_back({matrices + e, from + begin * in_stride, in_stride, count, codes + begin * own_digits * 4 * any.steps,
                           row_scales + begin, to + begin * out_stride});
    run_linears(linears);
  };
  multiply(experts->gate_up, sorted, projected);
  for_each_row(kernels().silu_mul, SiluMulArgs{gate_up.dtype, projected, 2 * inner * size, inner, gated, experts->limit},
               pairs);
  if (experts->gated_rotation) {
    const int64_t width = experts->gated_rotation->in_features;
    run_linears({{experts->gated_rotation, gated, width * size, pairs * inner / width, nullptr, nullptr, turned}});
  }
  multiply(experts->down, turned, returned);
  for_each_row(kernels().combine, CombineArgs{down.dtype, returned, weights, places, k, down.out_features, out}, rows);
}

// out [groups, rows, out_features]: group g of x times matrix g.
TWINPOOL_API void twinpool_grouped_linear(const PackedLinear* matrices, int64_t groups, const char* x,
                                          int64_t x_group_stride, int64_t x_row_stride, int64_t rows, char* out) {
  thread_local std::vector<LinearArgs> kept;
  std::vector<LinearArgs>& linears = kept;
  linears.clear();
  if (!rows) return;
  const int64_t digits = kernels().num_digits(matrices[0]), row_codes = digits * 4 * matrices[0].steps;
  int8_t* codes;
  float* row_scales;
  const auto carve = [&](char* base) {
    Carver carver(base);
    codes = carver.take<int8_t>(groups * rows * row_codes), row_scales = carver.take<float>(groups * rows);
    return carver.bytes();
  };
  carve(caller_scratch(carve(nullptr)));
  for (int64_t g = 0; g < groups; ++g) {
    linears.push_back({matrices + g, x + g * x_group_stride, x_row_stride, rows, codes + g * rows * row_codes,
                       row_scales + g * rows,
                       out + g * rows * matrices[g].out_features * size_of(matrices[g].dtype)});
    if (digits) for_each_row(kernels().quantize, linears.back(), rows);
  }
  run_linears(linears);
}
