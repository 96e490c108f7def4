// The C interface that cpu.py calls: picks the instruction set, splits each call into tasks, hands them to the threads.
// Shapes and dtypes are cpu.py's to check; slots and block ids are the caller's contract.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "amx.h"
#include "dispatch.h"

namespace twinpool {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool supported;
  bool for_tests = false;  // never chosen unless asked for
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi");
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
      {"avx512bf16", &avx512bf16::kernels, has_avx512bf16()},
#if TWINPOOL_HAS_AMX
      {"amx", &amx::kernels, has_avx512bf16() && why_no_amx()[0] == '\0'},
#endif
      {"amx-emulated", &amx_emulated::kernels, has_avx512bf16(), true},
#endif
  };
  return all;
}

const Isa* best_isa() {
  const Isa* best = nullptr;
  for (const Isa& isa : isas())
    if (isa.supported && !isa.for_tests) best = &isa;
  return best;
}

const Isa* active = best_isa();

// Query rows of one task: enough to make unpacking a tile cheap, few enough for their sums to stay in L1 and L2.
constexpr int32_t kRowsPerTask = 96;

}  // namespace

const Kernels& kernels() { return *active->kernels; }

void run_linear(const PackedLinear& weight, const void* x, int64_t x_stride, int64_t rows, void* out) {
  LinearArgs args = {&weight, static_cast<const char*>(x), x_stride, rows, nullptr, nullptr, static_cast<char*>(out)};
  if (const int64_t digits = kernels().num_digits(weight)) {
    const int64_t code_bytes = ceil_div(rows * digits * weight.steps * 4, 64) * 64;
    char* quantized = caller_scratch(code_bytes + rows * sizeof(float));
    args.codes = reinterpret_cast<int8_t*>(quantized);
    args.row_scales = reinterpret_cast<float*>(quantized + code_bytes);
    for_each_row(kernels().quantize, args, rows);
  }
  run_linear_tasks(args);
}

void run_linear_tasks(const LinearArgs& args) {
  parallel_for(ceil_div(args.rows, kLinearRows) * ceil_div(args.weight->out_features, kPanel),
               [&](int64_t task) { kernels().linear(args, task); });
}

namespace {

// What unpacking a token costs beside a row that sees it.
constexpr int64_t kRowsOfUnpacking = 16;
// Tasks that are larger than a thread's share, divided by this, are cut up where threads would end far apart.
constexpr int64_t kPiecesPerThread = 4;
constexpr double kMostUneven = 1.1;

// A task whose chunks are handed out one by one.
struct SplitTask {
  AttentionTask whole;
  int64_t chunks, floats;  // of each chunk's partial
};
struct Piece {
  AttentionTask task;
  int64_t split;  // the one it is of, if its chunk says so
};

// Whether threads that take one task after the other end at nearly the same time.
template <class WorkOf>
bool ends_evenly(const std::vector<Piece>& tasks, int64_t threads, int64_t work, const WorkOf& work_of) {
  thread_local std::vector<int64_t> busy;
  busy.assign(threads, 0);
  for (const Piece& each : tasks) *std::min_element(busy.begin(), busy.end()) += work_of(each.task);
  return *std::max_element(busy.begin(), busy.end()) <= kMostUneven * work / threads;
}

// Runs run(task) for all queries of all sequences and all groups of heads, `group` query heads each, whose values are
// `width` wide; long contexts chunk by chunk where there are more threads than tasks, and merge(task, partials) then.
template <class Run, class Merge>
void run_attention_tasks(int32_t group, int32_t num_groups, int64_t width, const int32_t* context_lens,
                         int32_t num_sequences, const int32_t* query_start, const Run& run, const Merge& merge) {
  const int32_t queries_at_once = std::max(1, kRowsPerTask / group);
  const auto work_of = [&](const AttentionTask& task) {
    return (task.position + task.num_queries) * (kRowsOfUnpacking + int64_t{task.num_queries} * group);
  };
  thread_local std::vector<Piece> kept_pieces;  // keep their memory for the next step
  thread_local std::vector<SplitTask> kept_splits;
  std::vector<Piece>& pieces = kept_pieces;
  std::vector<SplitTask>& splits = kept_splits;
  pieces.clear(), splits.clear();
  int64_t work = 0;
  for (int32_t s = 0; s < num_sequences; ++s) {
    const int32_t first = query_start[s], end = query_start[s + 1], before = context_lens[s] - (end - first);
    // The last queries see the most and cost the most: first, so that the threads end together.
    for (int32_t left = end - first; left > 0; left -= queries_at_once) {
      const int32_t begin = std::max(0, left - queries_at_once);
      for (int32_t head = 0; head < num_groups; ++head) {
        pieces.push_back({{s, head, first + begin, left - begin, before + begin}, 0});
        work += work_of(pieces.back().task);
      }
    }
  }

  const int64_t threads = num_threads();
  const auto is_large = [&](const Piece& piece) {
    return piece.task.position + piece.task.num_queries > kChunkTokens &&
           work_of(piece.task) * kPiecesPerThread * threads > work;
  };
  if (threads > 1 && std::any_of(pieces.begin(), pieces.end(), is_large) &&
      !ends_evenly(pieces, threads, work, work_of)) {
    const auto first_large = std::stable_partition(pieces.begin(), pieces.end(), std::not_fn(is_large));
    for (auto each = first_large; each != pieces.end(); ++each) {
      const AttentionTask& task = each->task;
      splits.push_back({task, ceil_div(task.position + task.num_queries, kChunkTokens),
                        partial_floats(task.num_queries * group, width)});
    }
    pieces.erase(first_large, pieces.end());
  }

  std::atomic<int64_t>* left = nullptr;  // chunks of each split that are not done
  thread_local std::vector<float*> kept_partials;
  std::vector<float*>& partials = kept_partials;
  partials.resize(splits.size());
  const auto carve = [&](char* base) {
    Carver carver(base);
    left = carver.take<std::atomic<int64_t>>(splits.size());
    for (size_t i = 0; i < splits.size(); ++i) partials[i] = carver.take<float>(splits[i].chunks * splits[i].floats);
    return carver.bytes();
  };
  if (!splits.empty()) carve(caller_scratch(carve(nullptr)));
  for (size_t i = 0; i < splits.size(); ++i) {
    new (left + i) std::atomic<int64_t>(splits[i].chunks);
    AttentionTask task = splits[i].whole;
    for (int64_t chunk = 0; chunk < splits[i].chunks; ++chunk) {
      task.chunk = static_cast<int32_t>(chunk), task.partial = partials[i] + chunk * splits[i].floats;
      pieces.push_back({task, static_cast<int64_t>(i)});
    }
  }

  for (size_t i = 0; i + threads < pieces.size(); ++i) pieces[i].task.next = &pieces[i + threads].task;
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[i];
    run(piece.task);
    // Whoever is last merges; what the others wrote is seen through the counter.
    if (piece.task.chunk >= 0 && left[piece.split].fetch_sub(1, std::memory_order_acq_rel) == 1)
      merge(splits[piece.split].whole, partials[piece.split]);
  });
}

}  // namespace

void run_attention(const AttentionArgs& args, int32_t num_sequences, const int32_t* query_start) {
  const int32_t num_kv_heads = args.cache.num_kv_heads;
  run_attention_tasks(
      args.num_heads / num_kv_heads, num_kv_heads, args.cache.head_dim, args.context_lens, num_sequences, query_start,
      [&](const AttentionTask& task) { kernels().attention(args, task); },
      [&](const AttentionTask& task, float* partials) { kernels().merge_attention(args, task, partials); });
}

void run_latent_attention(const LatentArgs& args, int32_t num_sequences, const int32_t* query_start) {
  run_attention_tasks(
      args.heads_at_once, static_cast<int32_t>(ceil_div(args.num_heads, args.heads_at_once)), args.rank,
      args.context_lens, num_sequences, query_start,
      [&](const AttentionTask& task) { kernels().latent_attention(args, task); },
      [&](const AttentionTask& task, float* partials) { kernels().merge_latent_attention(args, task, partials); });
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

// As twinpool/sources.py computes it.
TWINPOOL_API const char* twinpool_sources() { return TWINPOOL_SOURCES; }

TWINPOOL_API const char* twinpool_isa() { return active->name; }

// Why the processor's tiles are not used, or nothing where it has none or they are.
TWINPOOL_API const char* twinpool_why_no_amx() { return has_amx() ? why_no_amx() : ""; }

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

TWINPOOL_API void twinpool_latent_attention(const LatentArgs* args, int32_t num_sequences, const int32_t* query_start) {
  run_latent_attention(*args, num_sequences, query_start);
}

TWINPOOL_API void twinpool_store_latents(const StoreLatentsArgs* args, int64_t tokens) {
  for_each_row(kernels().store_latents, *args, tokens);
}
