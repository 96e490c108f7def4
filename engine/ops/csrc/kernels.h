// The kernels' arguments, and one table of them per instruction set.
//
// Every kernel works on one independent piece of its output ("task", "rows"), so that any split of the pieces over
// threads gives the same bits. Strides are in bytes. bf16 is carried as uint16_t.
#pragma once

#include <cstdint>
#include <limits>

// Compilers that have this header, and the assemblers that come with them, know the instructions.
#if defined(__x86_64__) && __has_include(<amxtileintrin.h>)
#define TWINPOOL_HAS_AMX 1
#else
#define TWINPOOL_HAS_AMX 0
#endif

namespace twinpool {

using bf16 = uint16_t;
enum class Dtype : int32_t { fp32 = 0, bf16 = 1, int8 = 2 };

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : dtype == Dtype::bf16 ? 2 : 1; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a packed matrix holds its weights and what it is multiplied with.
enum class Format : int32_t {
  as_activations = 0,  // floats of the activations' dtype
  w8a16 = 1,           // int8 codes with one scale an output column, beside activations as they come
  w8a8 = 2,            // the same codes, beside activations that are quantized row by row
};

// A matrix packed for `linear` is a row of panels. A panel holds kPanel output columns for all of K as 32-bit words
// [steps][kPanel]: one fp32, two bf16 or four int8 of neighbouring k, the lowest k in the lowest byte. What is missing
// at the edges is zero. Made by cpu.py; same layout there as `native.PackedLinear`.
constexpr int kPanel = 64;
struct PackedLinear {
  Format format;
  Dtype dtype;  // of activations and bias
  int64_t steps, in_features, out_features;
  const uint32_t* panels;
  const float* scales;         // int8 only: [out_features, padded to kPanel]
  const int32_t* column_sums;  // int8 only: the sum of each column's codes, as many
  const void* bias;            // null, or [out_features]
};

// out [rows, out_features] = x [rows, in] * panels + bias. One task is kLinearRows rows of one panel.
constexpr int64_t kLinearRows = 240;
struct LinearArgs {
  const PackedLinear* weight;
  const char* x;
  int64_t x_stride, rows;
  int8_t* codes;      // where num_digits is not 0: [rows, num_digits, 4 * steps], and
  float* row_scales;  // [rows], filled by `quantize` before the first task
  char* out;
  int64_t out_stride = 0;  // 0: contiguous
};

// One layer's rows of the KV cache. The planes of one row are row_bytes away from those of the next.
struct KvCacheArgs {
  Dtype dtype;
  char *k, *v;
  uint16_t *k_scale, *v_scale;  // fp16, null unless dtype is int8
  int64_t row_bytes;
  int32_t num_kv_heads, block_size, head_dim;

  int64_t row_of(int64_t token, int64_t kv_head) const {  // within a block's plane, in units of head_dim (or of scales)
    return kv_head * block_size + token;
  }
};

struct StoreArgs {
  KvCacheArgs cache;
  Dtype dtype;
  const char *k, *v;  // [tokens, num_kv_heads, head_dim]
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  const int64_t* slots;
};

struct AttentionArgs {
  KvCacheArgs cache;
  Dtype dtype;
  const char* q;  // [tokens, num_heads, head_dim]
  int64_t q_token_stride, q_head_stride;
  int32_t num_heads;
  const int32_t* block_tables;
  int64_t block_tables_stride;
  const int32_t* context_lens;
  float scale;
  char* out;  // [tokens, num_heads * head_dim], contiguous
};

// Attention of all heads over one int8 latent and one bf16 rotated key a token. The planes of a cache row are row_bytes
// away from those of the next.
struct LatentArgs {
  Dtype dtype;
  const char *latents, *keys, *scales;  // of a row: [block_size, rank], [block_size, key_dim], fp16 [block_size]
  int64_t row_bytes;
  int32_t block_size, rank, key_dim;
  const char* q;  // [tokens, num_heads, rank + key_dim]
  int64_t q_token_stride, q_head_stride;
  int32_t num_heads, heads_at_once;  // a task's kv_head counts groups of so many heads
  const int32_t* block_tables;
  int64_t block_tables_stride;
  const int32_t* context_lens;
  float scale;
  char* out;  // [tokens, num_heads, rank], contiguous
};

// The queries first_query .. first_query + num_queries of a sequence, whose first sits at `position`; all query heads
// of one KV head.
struct AttentionTask {
  int32_t sequence, kv_head, first_query, num_queries, position;
  int32_t chunk = -1;        // the only one of the context to be looked at, if any;
  float* partial = nullptr;  // then what it gives comes here: partial_floats of it
  const AttentionTask* next = nullptr;  // most likely the thread's next: what it begins with is fetched meanwhile
};

// The context is attended to in chunks of so many tokens, whose results are merged in their order, whoever made them.
constexpr int64_t kChunkTokens = 1024;

// Of each of `rows` queries the largest score and the sum of the weights, then `width` weighted sums of values.
inline int64_t partial_states(int64_t rows) { return ceil_div(2 * rows, 16) * 16; }
inline int64_t partial_floats(int64_t rows, int64_t width) {
  return partial_states(rows) + rows * ceil_div(width, kPanel) * kPanel;
}

struct RmsNormArgs {
  Dtype dtype;
  const char* x;
  int64_t x_stride;
  int64_t group, group_stride;  // row r lies at r / group * group_stride + r % group * x_stride
  char* residual;  // null, or [rows, width] to which x is added first, in place
  int64_t residual_stride;
  const void* weight;
  float eps;
  int64_t width;
  char* out;  // contiguous
};

struct RopeArgs {
  Dtype dtype;
  const char* x;  // [tokens, num_heads, head_dim]
  int64_t token_stride, head_stride;
  const float *cos, *sin;  // [tokens, head_dim / 2]
  int64_t num_heads, head_dim;
  char* out;  // contiguous
};

struct SiluMulArgs {
  Dtype dtype;
  const char* gate_up;  // [rows, 2 * width]
  int64_t stride, width;
  char* out;     // contiguous
  float limit = std::numeric_limits<float>::infinity();  // of the gate from above, of up both ways
};

// What turns a row of router logits into scores.
enum class Score : int32_t { softmax = 0, sigmoid = 1, sqrtsoftplus = 2 };

// Chooses k experts for each row of logits, and their weights (reference.py: moe_gating_top_k).
struct Gating {
  Score score;
  int32_t renormalize;  // 0 or 1
  int64_t num_experts, k;
  int64_t num_groups, groups_kept;  // 1, 1 without groups
  float scale, eps;
};

struct GatingArgs : Gating {
  const char* logits;  // fp32 [rows, num_experts]
  int64_t stride;
  const float* bias;                // null, or [num_experts]
  const int64_t* token_ids;         // null, or [rows]; then the experts of a row are
  const int32_t* experts_of_token;  // [vocabulary, k] at its token
  float* weights;                   // [rows, k]
  int32_t* experts;                 // [rows, k]
};

// The indices of the k largest of n values, in the order and with the choice among equals of torch.topk (topk.cpp).
void top_as_torch(const float* values, int64_t n, int64_t k, int32_t* indices);

// out [rows, width] = the sum over j < k of weights[row, j] * rows[places[row * k + j]].
struct CombineArgs {
  Dtype dtype;
  const char* rows;  // contiguous
  const float* weights;
  const int32_t* places;
  int64_t k, width;
  char* out;  // contiguous
  const char* added = nullptr;  // null, or [rows, width] that is added to the sum once it is rounded, contiguous
};

// How the next token is chosen from row `row` of the logits (engine/sampling.py: Draw).
struct TokenChoice {
  int64_t row, top_k;  // 0: all
  double top_p, min_p, point;
  float temperature;  // 0: the likeliest
  int32_t token;      // what was chosen; -1 where the logits are not finite
};
struct ChoiceArgs {
  Dtype dtype;
  const char* logits;  // [rows, vocab]
  int64_t stride, vocab;
  TokenChoice* choices;
};

struct Candidate {
  float score;  // over the temperature; the likeliest token's is 0
  int32_t token;
};
double mass_of(const Candidate* candidates, int64_t count);
// all_mass: of the whole vocabulary, where top_k keeps all of it; else 0. Sorts the candidates.
int32_t draw_among(Candidate* candidates, int64_t count, const TokenChoice& choice, double all_mass);

}  // namespace twinpool

#include "compressed.h"

namespace twinpool {

struct Kernels {
  void (*linear)(const LinearArgs&, int64_t task);
  void (*quantize)(const LinearArgs&, int64_t row);
  int64_t (*num_digits)(const PackedLinear&);  // int8 digits of an activation, 0: it is multiplied as it is
  void (*store_kv)(const StoreArgs&, int64_t token);
  void (*attention)(const AttentionArgs&, const AttentionTask&);
  void (*latent_attention)(const LatentArgs&, const AttentionTask&);
  // Writes the outputs of a task whose chunks lie in `partials`, each partial_floats long.
  void (*merge_attention)(const AttentionArgs&, const AttentionTask&, float* partials);
  void (*merge_latent_attention)(const LatentArgs&, const AttentionTask&, float* partials);
  void (*store_latents)(const StoreLatentsArgs&, int64_t token);
  void (*rms_norm)(const RmsNormArgs&, int64_t row);
  void (*rope)(const RopeArgs&, int64_t token);
  void (*silu_mul)(const SiluMulArgs&, int64_t row);
  void (*gating)(const GatingArgs&, int64_t row);
  void (*combine)(const CombineArgs&, int64_t row);
  void (*shared_attention)(const SharedArgs&, const SharedTask&);
  void (*index_scores)(const IndexArgs&, const IndexTask&);
  void (*pool_windows)(const PoolArgs&, int64_t row);
  void (*streams_in)(const StreamsInArgs&, int64_t token);
  void (*streams_out)(const StreamsOutArgs&, int64_t token);
  void (*choose)(const ChoiceArgs&, int64_t choice);
};

namespace generic {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512vnni {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
#if TWINPOOL_HAS_AMX
namespace amx {
extern const Kernels kernels;
}
#endif
namespace amx_emulated {
extern const Kernels kernels;
}
#endif

}  // namespace twinpool
