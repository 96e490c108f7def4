// A decoder as the parts of its layers, and what a step of it works with. Same layouts as in engine/ops/native.py.
//
// A part is what engine/models has under the same name; here it runs on the same kernels and with the same bits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "dispatch.h"

namespace twinpool {

// ---- what a decoder is ----

struct GroupedPart {  // engine/models/grouped_attention.py
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  const void *q_norm, *k_norm;  // null, or [head_dim]
  const PackedLinear *qkv, *output;
  const PackedLinear *q_rotation, *k_rotation;  // null, or [head_dim, head_dim]
  KvCacheArgs cache;
};

struct LatentPart {  // engine/models/latent_attention.py, the absorbed form
  int32_t num_heads, heads_at_once;
  float scale, eps;
  const void *q_a_norm, *kv_a_norm;
  const PackedLinear *q_a, *q_b;          // q_a: null where q_b projects at once
  const PackedLinear *kv_a, *output;
  const PackedLinear *key_up, *value_up;  // one a head
  EntryArgs cache;
};

struct GatedPart {  // engine/models/gated_mlp.py
  const PackedLinear *gate_up, *down;
  const PackedLinear* rotation;  // null, or [n, n] over the inputs of `down`, n at a time
};

struct ExpertPart {  // engine/models/expert_mlp.py
  const PackedLinear* router;  // fp32
  Score score;
  int64_t k;
  const float* bias;  // null, or one an expert
  int64_t num_groups, groups_kept;
  int32_t renormalize;
  float scale, eps;
  ExpertsArgs experts;
};

// grouped or latent, and gated, experts or both: what every token passes through beside its experts.
struct LayerArgs {
  const void *input_norm, *post_norm;
  const GroupedPart* grouped;
  const LatentPart* latent;
  const GatedPart* gated;
  const ExpertPart* experts;
};

struct DecoderArgs {
  Dtype dtype;
  int32_t num_layers;
  float eps;
  int32_t rope_dim;
  int64_t hidden;
  const LayerArgs* layers;
  const void* final_norm;
};

// ---- what a step is ----

enum class Kind : int32_t { linear, attention, kv_access, moe, other };

struct Event {
  Kind kind;
  int32_t layer;
  int64_t begin_ns, end_ns;
};

struct StepArgs {
  int64_t tokens;
  int32_t num_sequences;
  const int64_t* slots;
  const int32_t* block_tables;
  int64_t block_tables_stride;
  const int32_t *query_start, *context_lens;
  const float *cos, *sin;  // [tokens, rope_dim / 2], or tables of them with a row a position
  char* residual;          // [tokens, hidden]: the embeddings; overwritten. Null:
  const int64_t *token_ids, *positions;  // [tokens]: rows of the table of embeddings and of those of angles
  const char* embedding;   // [vocab, hidden]
  int64_t vocab;
  char* out;               // [tokens, hidden], after the final norm
  char* workspace;         // of twinpool_decoder_bytes; keeps its content from stage to stage
  Event* events;           // null, or room for all of a step
  int64_t num_events;
  uint8_t* chosen_experts;  // null, or [num_layers, experts of a layer]: those of a step become 1
};

// Tokens that pass through several kernels one after the other while they are in L1.
constexpr int64_t kTokensAtOnce = 8;

// What all parts of all layers work with. Where a linear takes codes of its inputs, who writes those makes them.
class Step {
 public:
  Step(const DecoderArgs& decoder, StepArgs& args, Carver& carver);

  const DecoderArgs& decoder;
  StepArgs& args;
  const Dtype dtype;
  const int64_t tokens, size;  // size: bytes of a number
  char *x, *y, *residual;      // [tokens, hidden]: inputs of a part, what it returns, and what that is added to
  int8_t* codes;               // of x
  float* row_scales;
  const float *cos, *sin;  // [tokens, rope_dim / 2]

  // Embeddings and angles of the step's tokens, where they are to be looked up.
  void look_up() const;

  // The arguments of a linear over x, whose codes have been made.
  LinearArgs over_x(const PackedLinear& weight, char* to) const {
    return {&weight, x, decoder.hidden * size, tokens, codes, row_scales, to};
  }

  // added: null, or what is added to the residual first; next: null, or a linear that reads what is normed, for which
  // a row is quantized while it is in L1.
  void norm(const char* added, const void* weight, char* to, const PackedLinear* next) const;

  // body(first token, the token behind the last), in runs of kTokensAtOnce.
  template <class Body>
  void for_each_run(const Body& body) const {
    parallel_for(ceil_div(tokens, kTokensAtOnce), [&](int64_t run) {
      body(run * kTokensAtOnce, std::min(tokens, (run + 1) * kTokensAtOnce));
    });
  }

 private:
  float *own_cos_ = nullptr, *own_sin_ = nullptr;
};

// next.weight: null, or a linear for which a row is quantized while it is in L1.
void norm_rows(const RmsNormArgs& norm, int64_t rows, const LinearArgs& next);

// Notes when an operator of a layer ran, if anybody wants to know.
class Timer {
 public:
  Timer(const Step& step, Kind kind, int32_t layer) : step_(step.args) {
    if (step_.events) step_.events[step_.num_events] = {kind, layer, now(), 0};
  }
  ~Timer() {
    if (step_.events) step_.events[step_.num_events++].end_ns = now();
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  StepArgs& step_;
};

// ---- the parts at work, in memory that is cut from `carver` ----

// Bytes of codes of a row that this linear may want, on whichever processor.
inline int64_t most_code_bytes(const PackedLinear& weight) {
  return weight.format == Format::as_activations ? 0 : 2 * weight.steps * 4;
}

inline void run_timed(const Step& step, int32_t layer, const LinearArgs& args, Kind kind = Kind::linear) {
  const Timer timer(step, kind, layer);
  run_linear_tasks(args);
}

// All of a linear that takes floats, on this thread.
inline void multiply_here(const PackedLinear& matrix, const char* from, int64_t rows, char* to) {
  const LinearArgs args = {&matrix, from, matrix.in_features * size_of(matrix.dtype), rows, nullptr, nullptr, to};
  const int64_t tasks = ceil_div(rows, kLinearRows) * ceil_div(matrix.out_features, kPanel);
  for (int64_t task = 0; task < tasks; ++task) kernels().linear(args, task);
}

class GroupedAttention {
 public:
  GroupedAttention(const Step& step, const GroupedPart& part, Carver& carver);
  void store(int32_t layer) const;   // from x up to K and V in the cache
  void attend(int32_t layer) const;  // from there to y

 private:
  struct Heads {
    const char* from;
    int64_t token_stride, head_stride;
    int32_t count;
  };
  void place(int64_t first, int64_t end) const;
  Heads dense(const char* from, int32_t count) const;
  Heads head_norm(const Heads& heads, const void* weight, char* to, int64_t first, int64_t end) const;
  Heads rope(const Heads& heads, char* to, int64_t first, int64_t end) const;
  Heads rotate(const Heads& heads, const PackedLinear& matrix, char* to, int64_t first, int64_t end) const;

  const Step& s;
  const GroupedPart& p;
  const int64_t head, token;  // bytes of a head, and of all of a token's
  char *qkv, *q, *k, *q_other, *k_other, *attended;
};

class LatentAttention {
 public:
  LatentAttention(const Step& step, const LatentPart& part, Carver& carver);
  void store(int32_t layer) const;
  void attend(int32_t layer) const;

 private:
  void project_queries(int32_t layer) const;
  void attend_to_latents() const;
  void place(int64_t first, int64_t end) const;

  const Step& s;
  const LatentPart& p;
  const int64_t rank, nope_dim, rope_dim, width, out_width;  // width: of a latent and its key; out_width: of sums
  char *reduced, *reduced_normed, *q, *kv, *latents, *keys, *turned, *joint, *sums, *values;
  int8_t* codes;  // of reduced_normed
  float* row_scales;
};

class GatedMlp {
 public:
  GatedMlp(const Step& step, const GatedPart& part, Carver& carver);
  void run(int32_t layer, char* to) const;  // from x
  void run_beside_experts(int32_t layer, char* to) const;  // the same, as a part of them

 private:
  void run_as(Kind matrices, Kind between, int32_t layer, char* to) const;
  void gate(const LinearArgs& down) const;

  const Step& s;
  const GatedPart& p;
  const int64_t inner;
  char *gate_up, *gated, *turned;
  int8_t* codes;  // of what goes into `down`
  float* row_scales;
};

class ExpertMlp {
 public:
  ExpertMlp(const Step& step, const ExpertPart& part, const GatedPart* shared, Carver& carver);
  void run(int32_t layer) const;  // from x to y

 private:
  void route() const;
  void note_chosen(int32_t layer) const;

  const Step& s;
  const ExpertPart& p;
  std::optional<GatedMlp> shared;
  char* shared_out = nullptr;
  float *precise, *logits, *weights;  // precise: x in fp32
  int32_t* chosen;
};

}  // namespace twinpool
