// All layers of a dense decoder in one call: what engine/models/decoder.py does operator by operator, on the same kernels
// and with the same bits, without a trip through Python and a new tensor for each of them.
//
// The call is cut at the places where a layer's K and V have just been stored: stage s ends layer s - 1 and begins layer
// s. Decode runs all stages in one call; prefill one at a time, to send rows off in between.
#include <chrono>

#include "dispatch.h"

using namespace twinpool;

namespace {

// Same layout as `native.LayerArgs`, `native.DecoderArgs`, `native.StepArgs` and `native.Event`.
struct LayerArgs {
  const void *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm: null, or [head_dim]
  const PackedLinear *qkv, *output, *gate_up, *down;
  KvCacheArgs cache;
};

struct DecoderArgs {
  Dtype dtype;
  int32_t num_layers, num_heads, num_kv_heads, head_dim;
  float eps, scale;
  int64_t hidden, intermediate;
  const LayerArgs* layers;
  const void* final_norm;
  const PackedLinear *q_rotation, *k_rotation;  // null, or [head_dim, head_dim]
  const PackedLinear* gated_rotation;           // null, or [n, n], where n divides `intermediate`
};

enum class Kind : int32_t { linear, attention, kv_access, other };

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
  const float *cos, *sin;  // [tokens, head_dim / 2]
  char* residual;          // [tokens, hidden]: the embeddings; overwritten
  char* out;               // [tokens, hidden], after the final norm
  char* workspace;         // of twinpool_decoder_bytes; keeps its content from stage to stage
  Event* events;           // null, or room for all of a step
  int64_t num_events;
};

class Step {
 public:
  Step(const DecoderArgs& decoder, StepArgs& step, char* base) : d(decoder), step(step) {
    Carver carver(base);
    const auto take = [&](int64_t width) { return carver.take<char>(step.tokens * width * size_of(d.dtype)); };
    x = take(d.hidden), y = take(d.hidden), qkv = take((d.num_heads + 2 * d.num_kv_heads) * d.head_dim);
    q = take(d.num_heads * d.head_dim), k = take(d.num_kv_heads * d.head_dim);
    q_other = take(d.num_heads * d.head_dim), k_other = take(d.num_kv_heads * d.head_dim);
    attended = take(d.num_heads * d.head_dim), gate_up = take(2 * d.intermediate), gated = take(d.intermediate);
    bytes = carver.bytes();
  }

  void begin(int32_t index) {
    const LayerArgs& layer = d.layers[index];
    if (index == 0) norm(index, nullptr, layer.input_norm, x);
    linear(index, *layer.qkv, x, d.hidden, step.tokens, qkv);
    const int64_t head = d.head_dim * size_of(d.dtype), token = (d.num_heads + 2 * d.num_kv_heads) * head;
    Heads queries = {qkv, token, head, d.num_heads}, keys = {qkv + d.num_heads * head, token, head, d.num_kv_heads};
    if (layer.q_norm) {
      queries = head_norm(index, queries, layer.q_norm, q_other);
      keys = head_norm(index, keys, layer.k_norm, k_other);
    }
    queries = rope(index, queries, q), keys = rope(index, keys, k);
    if (d.q_rotation) {
      queries = rotate(index, queries, *d.q_rotation, q_other);
      keys = rotate(index, keys, *d.k_rotation, k_other);
    }
    const Timer timer(*this, Kind::kv_access, index);
    const StoreArgs args = {layer.cache, d.dtype, keys.from, qkv + (d.num_heads + d.num_kv_heads) * head,
                            keys.token_stride, keys.head_stride, token, head, step.slots};
    for_each_row(kernels().store_kv, args, step.tokens);
  }

  void end(int32_t index) {
    const LayerArgs& layer = d.layers[index];
    const int64_t size = size_of(d.dtype);
    {
      const Timer timer(*this, Kind::attention, index);
      const AttentionArgs args = {layer.cache,
                                  d.dtype,
                                  d.q_rotation ? q_other : q,
                                  d.num_heads * d.head_dim * size,
                                  d.head_dim * size,
                                  d.num_heads,
                                  step.block_tables,
                                  step.block_tables_stride,
                                  step.context_lens,
                                  d.scale,
                                  attended};
      run_attention(args, step.num_sequences, step.query_start);
    }
    linear(index, *layer.output, attended, d.num_heads * d.head_dim, step.tokens, y);
    norm(index, y, layer.post_norm, x);
    linear(index, *layer.gate_up, x, d.hidden, step.tokens, gate_up);
    {
      const Timer timer(*this, Kind::other, index);
      for_each_row(kernels().silu_mul,
                   SiluMulArgs{d.dtype, gate_up, 2 * d.intermediate * size, d.intermediate, gated}, step.tokens);
    }
    const char* inputs = gated;
    if (d.gated_rotation) {
      const int64_t width = d.gated_rotation->in_features;
      linear(index, *d.gated_rotation, gated, width, step.tokens * d.intermediate / width, gate_up);
      inputs = gate_up;
    }
    linear(index, *layer.down, inputs, d.intermediate, step.tokens, y);
    const bool last = index + 1 == d.num_layers;
    norm(index, y, last ? d.final_norm : d.layers[index + 1].input_norm, last ? step.out : x);
  }

  size_t bytes = 0;

 private:
  struct Heads {
    const char* from;
    int64_t token_stride, head_stride;
    int32_t count;
  };

  // Notes when an operator ran, if anybody wants to know.
  class Timer {
   public:
    Timer(Step& owner, Kind kind, int32_t layer) : step_(owner.step) {
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

  Heads dense(const char* from, int32_t count) const {
    const int64_t head = d.head_dim * size_of(d.dtype);
    return {from, count * head, head, count};
  }

  void linear(int32_t index, const PackedLinear& weight, const char* from, int64_t width, int64_t rows, char* to) {
    const Timer timer(*this, Kind::linear, index);
    run_linear(weight, from, width * size_of(d.dtype), rows, to);
  }

  // added: null, or what is added to the residual first.
  void norm(int32_t index, const char* added, const void* weight, char* to) {
    const Timer timer(*this, Kind::other, index);
    const int64_t stride = d.hidden * size_of(d.dtype);
    const RmsNormArgs args = {d.dtype, added ? added : step.residual, stride, step.tokens,
                              0,       added ? step.residual : nullptr, stride, weight,
                              d.eps,   d.hidden, to};
    for_each_row(kernels().rms_norm, args, step.tokens);
  }

  Heads head_norm(int32_t index, const Heads& heads, const void* weight, char* to) {
    const Timer timer(*this, Kind::other, index);
    const RmsNormArgs args = {d.dtype, heads.from, heads.head_stride, heads.count, heads.token_stride, nullptr,
                              0,       weight,     d.eps,             d.head_dim,  to};
    for_each_row(kernels().rms_norm, args, step.tokens * heads.count);
    return dense(to, heads.count);
  }

  Heads rope(int32_t index, const Heads& heads, char* to) {
    const Timer timer(*this, Kind::other, index);
    const RopeArgs args = {d.dtype,  heads.from,  heads.token_stride, heads.head_stride, step.cos,
                           step.sin, heads.count, d.head_dim,         to};
    for_each_row(kernels().rope, args, step.tokens);
    return dense(to, heads.count);
  }

  Heads rotate(int32_t index, const Heads& heads, const PackedLinear& matrix, char* to) {
    linear(index, matrix, heads.from, d.head_dim, step.tokens * heads.count, to);
    return dense(to, heads.count);
  }

  const DecoderArgs& d;
  StepArgs& step;
  char *x, *y, *qkv, *q, *k, *q_other, *k_other, *attended, *gate_up, *gated;
};

}  // namespace

// Bytes of workspace for a step of so many tokens.
TWINPOOL_API int64_t twinpool_decoder_bytes(const DecoderArgs* decoder, int64_t tokens) {
  StepArgs step = {};
  step.tokens = tokens;
  return static_cast<int64_t>(Step(*decoder, step, nullptr).bytes);
}

// Runs the stages first .. end - 1 of 0 .. num_layers.
TWINPOOL_API void twinpool_decoder(const DecoderArgs* decoder, StepArgs* step, int32_t first, int32_t end) {
  Step run(*decoder, *step, step->workspace);
  for (int32_t stage = first; stage < end; ++stage) {
    if (stage > 0) run.end(stage - 1);
    if (stage < decoder->num_layers) run.begin(stage);
  }
}
