// Running kernels of the chosen instruction set over all threads: for the single operators (api.cpp) and the whole
// decoder (decoder.cpp).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "threads.h"

#define TWINPOOL_API extern "C" __attribute__((visibility("default")))

namespace twinpool {

const Kernels& kernels();  // of the instruction set in use

// Rows of cheap operators are handed out in runs, since each hand-out costs an atomic operation.
constexpr int64_t kRowsAtOnce = 8;

template <class Body>
void for_each_row_do(int64_t rows, const Body& body) {
  parallel_for(ceil_div(rows, kRowsAtOnce), [&](int64_t run) {
    const int64_t end = run * kRowsAtOnce + kRowsAtOnce;
    for (int64_t row = run * kRowsAtOnce; row < end && row < rows; ++row) body(row);
  });
}

template <class Args>
void for_each_row(void (*kernel)(const Args&, int64_t), const Args& args, int64_t rows) {
  for_each_row_do(rows, [&](int64_t row) { kernel(args, row); });
}

// x: rows of the weight's dtype, x_stride bytes apart, as wide as `in_features` (to whole words: kernels.h).
void run_linear(const PackedLinear& weight, const void* x, int64_t x_stride, int64_t rows, void* out);

// The same for rows whose codes have been made, where the weight takes codes.
void run_linear_tasks(const LinearArgs& args);

// Group g of x times matrix g. All matrices have one shape and format.
struct LinearGroupsArgs {
  const PackedLinear* matrices;  // [groups]
  int64_t groups, rows;
  const char* x;
  int64_t x_group_stride, x_row_stride;
  char* out;
  int64_t out_group_stride, out_row_stride;
};
void run_linear_groups(const LinearGroupsArgs& args);

// The experts of a layer. All matrices of a kind have one shape and format. Same layout as `native.ExpertsArgs`.
struct ExpertsArgs {
  int64_t num_experts;
  const PackedLinear *gate_up, *down;  // [num_experts]
  const PackedLinear* gated_rotation;  // null, or [n, n] over the inputs of `down`, n at a time
  float limit;
};

// Rows with the k experts of each.
struct RoutedRows {
  const char* x;
  int64_t x_stride, rows, k;
  const float* weights;     // [rows, k]
  const int32_t* experts;   // [rows, k]
  int8_t* codes;            // null, or those of x where gate_up takes any, as LinearArgs has them,
  float* row_scales;        // and their scales
  const char* added;        // null, or [rows, hidden] that is added to what the experts make of the rows
};

// out [rows, hidden] = for each row the weighted sum of what its k experts make of it.
void run_experts(const ExpertsArgs& experts, const RoutedRows& routed, char* out);

// Sequence s owns the queries query_start[s] .. query_start[s + 1], the last of its context_lens[s] tokens.
void run_attention(const AttentionArgs& args, int32_t num_sequences, const int32_t* query_start);

// The same for the queries of latent attention over an int8 cache.
void run_latent_attention(const LatentArgs& args, int32_t num_sequences, const int32_t* query_start);

}  // namespace twinpool
