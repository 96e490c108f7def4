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

template <class Args>
void for_each_row(void (*kernel)(const Args&, int64_t), const Args& args, int64_t rows) {
  parallel_for(ceil_div(rows, kRowsAtOnce), [&](int64_t run) {
    const int64_t end = run * kRowsAtOnce + kRowsAtOnce;
    for (int64_t row = run * kRowsAtOnce; row < end && row < rows; ++row) kernel(args, row);
  });
}

// x: rows of the weight's dtype, x_stride bytes apart, as wide as `in_features` (to whole words: kernels.h).
void run_linear(const PackedLinear& weight, const void* x, int64_t x_stride, int64_t rows, void* out);

// The same for rows whose codes have been made, where the weight takes codes.
void run_linear_tasks(const LinearArgs& args);

// Sequence s owns the queries query_start[s] .. query_start[s + 1], the last of its context_lens[s] tokens.
void run_attention(const AttentionArgs& args, int32_t num_sequences, const int32_t* query_start);

}  // namespace twinpool
