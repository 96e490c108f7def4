// The C interface that cpu.py calls: picks the instruction set, splits each call into tasks, hands them to the threads.
// Shapes and dtypes are cpu.py's to check; slots and block ids are the caller's contract.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"

namespace twinpool {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool supported;
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// From the plainest to the best.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = {
      {"generic", &generic::kernels, true},
#if defined(__x86_64__)
      {"avx2", &avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {"avx512", &avx512::kernels, has_avx512()},
      {"avx512vnni", &avx512vnni::kernels, has_avx512() && __builtin_cpu_supports("avx512vnni")},
      {"avx512bf16", &avx512bf16::kernels,
       has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi")},
#endif
  };
  return all;
}

const Isa* best_isa() {
  const Isa* best = nullptr;
  for (const Isa& isa : isas())
    if (isa.supported) best = &isa;
  return best;
}

const Isa* active = best_isa();

// Query rows of one task: enough to make unpacking a tile cheap, few enough for their sums to stay in L1 and L2.
constexpr int32_t kRowsPerTask = 96;

}  // namespace

const Kernels& kernels() { return *active->kernels; }

void run_linear(const PackedLinear& weight, const void* x, int64_t x_stride, int64_t rows, void* out) {
  LinearArgs args = {&weight, static_cast<const char*>(x), x_stride, rows, nullptr, nullptr, static_cast<char*>(out)};
  if (weight.format == Format::w8a8) {
    const int64_t code_bytes = ceil_div(rows * weight.steps * 4, 64) * 64;
    char* quantized = caller_scratch(code_bytes + rows * sizeof(float));
    args.codes = reinterpret_cast<int8_t*>(quantized);
    args.row_scales = reinterpret_cast<float*>(quantized + code_bytes);
    for_each_row(kernels().quantize, args, rows);
  }
  parallel_for(ceil_div(rows, kLinearRows) * ceil_div(weight.out_features, kPanel),
               [&](int64_t task) { kernels().linear(args, task); });
}

namespace {

// Runs task(AttentionTask) for all queries of all sequences and all groups of heads, `group` query heads each.
template <class Run>
void run_attention_tasks(int32_t group, int32_t num_groups, const int32_t* context_lens, int32_t num_sequences,
                         const int32_t* query_start, const Run& run) {
  const int32_t queries_at_once = std::max(1, kRowsPerTask / group);
  thread_local std::vector<AttentionTask> tasks;  // keeps its memory for the next step
  tasks.clear();
  for (int32_t s = 0; s < num_sequences; ++s) {
    const int32_t first = query_start[s], end = query_start[s + 1], before = context_lens[s] - (end - first);
    // The last queries see the most and cost the most: first, so that the threads end together.
    for (int32_t left = end - first; left > 0; left -= queries_at_once) {
      const int32_t begin = std::max(0, left - queries_at_once);
      for (int32_t head = 0; head < num_groups; ++head)
        tasks.push_back({s, head, first + begin, left - begin, before + begin});
    }
  }
  const AttentionTask* const first_task = tasks.data();
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i) { run(first_task[i]); });
}

}  // namespace

void run_attention(const AttentionArgs& args, int32_t num_sequences, const int32_t* query_start) {
  const int32_t num_kv_heads = args.cache.num_kv_heads;
  run_attention_tasks(args.num_heads / num_kv_heads, num_kv_heads, args.context_lens, num_sequences, query_start,
                      [&](const AttentionTask& task) { kernels().attention(args, task); });
}

}  // namespace twinpool

using namespace twinpool;

// Returns 1, or 0 when this machine (or this build) does not have `name`. Not to be called while kernels run.
TWINPOOL_API int twinpool_select_isa(const char* name) {
  for (const Isa& isa : isas())
    if (isa.supported && std::strcmp(isa.name, name) == 0) {
      active = &isa;
      return 1;
    }
  return 0;
}

TWINPOOL_API const char* twinpool_isa() { return active->name; }

// kPanel, which pack_linear has to know.
TWINPOOL_API int twinpool_panel() { return kPanel; }

TWINPOOL_API void twinpool_set_num_threads(int count) { set_num_threads(count); }

TWINPOOL_API void twinpool_linear(const PackedLinear* weight, const void* x, int64_t x_stride, int64_t rows,
                                  void* out) {
  run_linear(*weight, x, x_stride, rows, out);
}

TWINPOOL_API void twinpool_rms_norm(int dtype, const void* x, int64_t x_stride, int64_t rows, int64_t width,
                                    void* residual, int64_t residual_stride, const void* weight, float eps, void* out) {
  const RmsNormArgs args = {static_cast<Dtype>(dtype),
                            static_cast<const char*>(x),
                            x_stride,
                            std::max<int64_t>(rows, 1),
                            0,
                            static_cast<char*>(residual),
                            residual_stride,
                            weight,
                            eps,
                            width,
                            static_cast<char*>(out)};
  for_each_row(kernels().rms_norm, args, rows);
}

TWINPOOL_API void twinpool_rope(int dtype, const void* x, int64_t token_stride, int64_t head_stride, int64_t tokens,
                                int64_t num_heads, int64_t head_dim, const float* cos, const float* sin, void* out) {
  const RopeArgs args = {
      static_cast<Dtype>(dtype), static_cast<const char*>(x), token_stride, head_stride, cos, sin, num_heads, head_dim,
      static_cast<char*>(out)};
  for_each_row(kernels().rope, args, tokens);
}

TWINPOOL_API void twinpool_silu_mul(int dtype, const void* gate_up, int64_t stride, int64_t rows, int64_t width,
                                    void* out) {
  const SiluMulArgs args = {static_cast<Dtype>(dtype), static_cast<const char*>(gate_up), stride, width,
                            static_cast<char*>(out)};
  for_each_row(kernels().silu_mul, args, rows);
}

TWINPOOL_API void twinpool_store_kv(const KvCacheArgs* cache, int dtype, const void* k, int64_t k_token_stride,
                                    int64_t k_head_stride, const void* v, int64_t v_token_stride, int64_t v_head_stride,
                                    const int64_t* slots, int64_t tokens) {
  const StoreArgs args = {*cache,
                          static_cast<Dtype>(dtype),
                          static_cast<const char*>(k),
                          static_cast<const char*>(v),
                          k_token_stride,
                          k_head_stride,
                          v_token_stride,
                          v_head_stride,
                          slots};
  for_each_row(kernels().store_kv, args, tokens);
}

// Sequence s owns the queries query_start[s] .. query_start[s + 1], the last of its context_lens[s] tokens.
TWINPOOL_API void twinpool_attention(const KvCacheArgs* cache, int dtype, const void* q, int64_t q_token_stride,
                                     int64_t q_head_stride, int32_t num_heads, const int32_t* block_tables,
                                     int64_t block_tables_stride, int32_t num_sequences, const int32_t* query_start,
                                     const int32_t* context_lens, float scale, void* out) {
  const AttentionArgs args = {*cache,
                              static_cast<Dtype>(dtype),
                              static_cast<const char*>(q),
                              q_token_stride,
                              q_head_stride,
                              num_heads,
                              block_tables,
                              block_tables_stride,
                              context_lens,
                              scale,
                              static_cast<char*>(out)};
  run_attention(args, num_sequences, query_start);
}

// The same for the queries of latent attention over an int8 cache.
TWINPOOL_API void twinpool_latent_attention(const LatentArgs* args, int32_t num_sequences, const int32_t* query_start) {
  run_attention_tasks(args->heads_at_once, static_cast<int32_t>(ceil_div(args->num_heads, args->heads_at_once)),
                      args->context_lens, num_sequences, query_start,
                      [&](const AttentionTask& task) { kernels().latent_attention(*args, task); });
}
