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

// Where the rows of a group of linears lie, one after the other; with stride 0 all are the same.
struct Rows {
  const char* x;
  int64_t x_stride;
  int8_t* codes;
  int64_t code_stride;
  float* scales;
  int64_t scale_stride;
};

}  // namespace

namespace twinpool {

// Rows are sorted by expert, so that each expert's matrices are read once, and those of experts without rows not at all.
void run_experts(const ExpertsArgs& experts, const RoutedRows& routed, char* out) {
  const PackedLinear &gate_up = experts.gate_up[0], &down = experts.down[0];
  const int64_t hidden = gate_up.in_features, inner = down.in_features, size = size_of(gate_up.dtype);
  const int64_t rows = routed.rows, k = routed.k, pairs = rows * k;
  const int64_t in_codes = kernels().num_digits(gate_up) * 4 * gate_up.steps;
  const int64_t down_codes = kernels().num_digits(down) * 4 * down.steps;
  const bool is_one = rows == 1;  // then each of its experts reads it where it is

  char *sorted, *projected, *gated, *turned, *returned;
  int8_t *codes, *sorted_codes, *gated_codes;
  float *scales, *sorted_scales, *gated_scales;
  int32_t* places;  // of every (row, choice) among the sorted rows
  const auto carve = [&](char* base) {
    Carver carver(base);
    sorted = carver.take<char>(is_one || in_codes ? 0 : pairs * hidden * size);
    projected = carver.take<char>(pairs * 2 * inner * size);
    gated = carver.take<char>(pairs * inner * size);
    turned = experts.gated_rotation ? carver.take<char>(pairs * inner * size) : gated;
    returned = carver.take<char>(pairs * down.out_features * size);
    codes = routed.codes ? routed.codes : carver.take<int8_t>(rows * in_codes);
    scales = routed.codes ? routed.row_scales : carver.take<float>(rows);
    sorted_codes = carver.take<int8_t>(is_one ? 0 : pairs * in_codes), sorted_scales = carver.take<float>(pairs);
    gated_codes = carver.take<int8_t>(pairs * down_codes), gated_scales = carver.take<float>(pairs);
    places = carver.take<int32_t>(pairs);
    return carver.bytes();
  };
  carve(caller_scratch(carve(nullptr)));

  thread_local std::vector<int64_t> kept_begins;
  std::vector<int64_t>& begins = kept_begins;  // of each expert's rows among the sorted
  begins.assign(experts.num_experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++begins[routed.experts[i] + 1];
  for (int64_t e = 0; e < experts.num_experts; ++e) begins[e + 1] += begins[e];
  {
    thread_local std::vector<int64_t> next;
    next.assign(begins.begin(), begins.end());
    for (int64_t i = 0; i < pairs; ++i) places[i] = static_cast<int32_t>(next[routed.experts[i]]++);
  }

  if (in_codes && !routed.codes)
    for_each_row(kernels().quantize, {&gate_up, routed.x, routed.x_stride, rows, codes, scales, nullptr}, rows);
  Rows inputs = {routed.x, 0, codes, 0, scales, 0};
  if (!is_one) {
    for_each_row_do(rows, [&](int64_t row) {
      for (int64_t i = row * k; i < (row + 1) * k; ++i) {
        if (!in_codes) {
          std::memcpy(sorted + places[i] * hidden * size, routed.x + row * routed.x_stride, hidden * size);
        } else {
          std::memcpy(sorted_codes + places[i] * in_codes, codes + row * in_codes, in_codes);
          sorted_scales[places[i]] = scales[row];
        }
      }
    });
    inputs = {sorted, hidden * size, sorted_codes, in_codes, sorted_scales, 1};
  }

  thread_local std::vector<LinearArgs> kept_linears;
  std::vector<LinearArgs>& linears = kept_linears;
  const auto multiply = [&](const PackedLinear* matrices, const Rows& from, char* to) {
    linears.clear();
    for (int64_t e = 0; e < experts.num_experts; ++e)
      if (const int64_t begin = begins[e], count = begins[e + 1] - begin; count)
        linears.push_back({matrices + e, from.x + begin * from.x_stride, from.x_stride, count,
                           from.codes + begin * from.code_stride, from.scales + begin * from.scale_stride,
                           to + begin * matrices[0].out_features * size});
    run_linears(linears);
  };
  multiply(experts.gate_up, inputs, projected);
  const SiluMulArgs silu = {gate_up.dtype, projected, 2 * inner * size, inner, gated, experts.limit};
  const LinearArgs after = {&down, turned, inner * size, pairs, gated_codes, gated_scales, nullptr};
  for_each_row_do(pairs, [&](int64_t pair) {
    kernels().silu_mul(silu, pair);
    if (!experts.gated_rotation && down_codes) kernels().quantize(after, pair);
  });
  if (experts.gated_rotation) {
    const int64_t width = experts.gated_rotation->in_features;
    run_linear_tasks(
        {experts.gated_rotation, gated, width * size, pairs * inner / width, nullptr, nullptr, turned});
    if (down_codes) for_each_row(kernels().quantize, after, pairs);
  }
  multiply(experts.down, {turned, inner * size, gated_codes, down_codes, gated_scales, 1}, returned);
  for_each_row(kernels().combine,
               CombineArgs{down.dtype, returned, routed.weights, places, k, down.out_features, out, routed.added}, rows);
}

void run_linear_groups(const LinearGroupsArgs& args) {
  if (!args.rows) return;
  thread_local std::vector<LinearArgs> kept;
  std::vector<LinearArgs>& linears = kept;
  linears.clear();
  const int64_t row_codes = kernels().num_digits(args.matrices[0]) * 4 * args.matrices[0].steps;
  int8_t* codes;
  float* row_scales;
  const auto carve = [&](char* base) {
    Carver carver(base);
    codes = carver.take<int8_t>(args.groups * args.rows * row_codes);
    row_scales = carver.take<float>(args.groups * args.rows);
    return carver.bytes();
  };
  carve(caller_scratch(carve(nullptr)));
  for (int64_t g = 0; g < args.groups; ++g) {
    linears.push_back({args.matrices + g, args.x + g * args.x_group_stride, args.x_row_stride, args.rows,
                       codes + g * args.rows * row_codes, row_scales + g * args.rows,
                       args.out + g * args.out_group_stride, args.out_row_stride});
    if (row_codes) for_each_row(kernels().quantize, linears.back(), args.rows);
  }
  run_linears(linears);
}

}  // namespace twinpool

TWINPOOL_API void twinpool_gating(const Gating* gating, const char* logits, int64_t stride, int64_t rows,
                                  const float* bias, const int64_t* token_ids, const int32_t* experts_of_token,
                                  float* weights, int32_t* experts) {
  const GatingArgs args = {*gating, logits, stride, bias, token_ids, experts_of_token, weights, experts};
  for_each_row(kernels().gating, args, rows);
}

TWINPOOL_API void twinpool_moe_experts(const ExpertsArgs* experts, const char* x, int64_t x_stride, int64_t rows,
                                       int64_t k, const float* weights, const int32_t* chosen, char* out) {
  run_experts(*experts, {x, x_stride, rows, k, weights, chosen, nullptr, nullptr, nullptr}, out);
}

// out [groups, rows, out_features]: group g of x times matrix g.
TWINPOOL_API void twinpool_grouped_linear(const PackedLinear* matrices, int64_t groups, const char* x,
                                          int64_t x_group_stride, int64_t x_row_stride, int64_t rows, char* out) {
  const int64_t row_bytes = matrices[0].out_features * size_of(matrices[0].dtype);
  run_linear_groups({matrices, groups, rows, x, x_group_stride, x_row_stride, out, rows * row_bytes, row_bytes});
}
