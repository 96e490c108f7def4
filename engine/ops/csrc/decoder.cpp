// All layers of a dense decoder in one call: what engine/models/decoder.py does operator by operator, on the same kernels
// and with the same bits, without a trip through Python and a new tensor for each of them.
//
// The call is cut at the places where a layer's K and V have just been stored: stage s ends layer s - 1 and begins layer
// s. Decode runs all stages in one call; prefill one at a time, to send rows off in between.
#include <algorithm>
#include <chrono>
#include <cstring>

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
  const float *cos, *sin;  // [tokens, head_dim / 2], or tables of them with a row a position
  char* residual;          // [tokens, hidden]: the embeddings; overwritten. Null:
  const int64_t *token_ids, *positions;  // [tokens]: rows of the table of embeddings and of those of angles
  const char* embedding;   // [vocab, hidden]
  int64_t vocab;
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
    turned = d.gated_rotation ? take(d.intermediate) : gated;
    int64_t code_bytes = 0;
    for (int32_t i = 0; i < d.num_layers; ++i)
      for (const PackedLinear* each : {d.layers[i].qkv, d.layers[i].gate_up, d.layers[i].down})
        if (each->format != Format::as_activations) code_bytes = std::max(code_bytes, 2 * each->steps * 4);
    codes = carver.take<int8_t>(step.tokens * code_bytes), row_scales = carver.take<float>(step.tokens);
    residual = step.residual, cos = step.cos, sin = step.sin;
    if (!residual) {
      residual = take(d.hidden);
      cos = own_cos = carver.take<float>(step.tokens * d.head_dim / 2);
      sin = own_sin = carver.take<float>(step.tokens * d.head_dim / 2);
    }
    bytes = carver.bytes();
  }

  void begin(int32_t index) {
    const LayerArgs& layer = d.layers[index];
    if (index == 0) {
      if (!step.residual) look_up();
      norm(index, nullptr, layer.input_norm, x, layer.qkv);
    }
    quantized_linear(index, *layer.qkv, x, d.hidden, qkv);
    const Timer timer(*this, Kind::kv_access, index);
    parallel_for(ceil_div(step.tokens, kTokensAtOnce), [&](int64_t run) {
      const int64_t first = run * kTokensAtOnce;
      place(layer, first, std::min(kTokensAtOnce, step.tokens - first));
    });
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
    {
      const Timer timer(*this, Kind::linear, index);
      run_linear(*layer.output, attended, d.num_heads * d.head_dim * size, step.tokens, y);
    }
    norm(index, y, layer.post_norm, x, layer.gate_up);
    quantized_linear(index, *layer.gate_up, x, d.hidden, gate_up);
    const char* inputs = gate(index, *layer.down);
    quantized_linear(index, *layer.down, inputs, d.intermediate, y);
    const bool last = index + 1 == d.num_layers;
    if (last) {
      norm(index, y, d.final_norm, step.out, nullptr);
    } else {
      norm(index, y, d.layers[index + 1].input_norm, x, d.layers[index + 1].qkv);
    }
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

  // Embeddings and angles of the step's tokens.
  void look_up() {
    const int64_t width = d.hidden * size_of(d.dtype), half = d.head_dim / 2;
    for (int64_t t = 0; t < step.tokens; ++t) {
      const int64_t id = step.token_ids[t];
      if (id >= 0 && id < step.vocab) {
        std::memcpy(residual + t * width, step.embedding + id * width, width);
      } else {
        std::memset(residual + t * width, 0xff, width);  // NaN, which comes out as an error of this token's sequence
      }
      std::memcpy(own_cos + t * half, step.cos + step.positions[t] * half, half * sizeof(float));
      std::memcpy(own_sin + t * half, step.sin + step.positions[t] * half, half * sizeof(float));
    }
  }

  // The arguments of a linear whose inputs are `from`; their codes, where it takes any, lie in `codes`.
  LinearArgs linear_args(const PackedLinear& weight, const char* from, int64_t width, char* to) const {
    return {&weight, from, width * size_of(d.dtype), step.tokens, codes, row_scales, to};
  }

  void quantized_linear(int32_t index, const PackedLinear& weight, const char* from, int64_t width, char* to) {
    const Timer timer(*this, Kind::linear, index);
    run_linear_tasks(linear_args(weight, from, width, to));
  }

  // added: null, or what is added to the residual first; next: null, or the linear whose inputs these are, for which a
  // row is quantized while it is in L1.
  void norm(int32_t index, const char* added, const void* weight, char* to, const PackedLinear* next) {
    const Timer timer(*this, Kind::other, index);
    const int64_t stride = d.hidden * size_of(d.dtype);
    const RmsNormArgs args = {d.dtype, added ? added : residual, stride, step.tokens,
                              0,       added ? residual : nullptr, stride, weight,
                              d.eps,   d.hidden, to};
    const bool quantizes = next && kernels().num_digits(*next);
    const LinearArgs after = quantizes ? linear_args(*next, to, d.hidden, nullptr) : LinearArgs{};
    parallel_for(ceil_div(step.tokens, kTokensAtOnce), [&](int64_t run) {
      const int64_t end = std::min(step.tokens, (run + 1) * kTokensAtOnce);
      for (int64_t row = run * kTokensAtOnce; row < end; ++row) {
        kernels().rms_norm(args, row);
        if (quantizes) kernels().quantize(after, row);
      }
    });
  }

  // Norms of heads, rotary embedding, the change of basis, quantizing and storing of `count` tokens, one after the
  // other while they are in L1. Queries end in q_other where there is a change of basis, else in q.
  void place(const LayerArgs& layer, int64_t first, int64_t count) {
    const int64_t head = d.head_dim * size_of(d.dtype), token = (d.num_heads + 2 * d.num_kv_heads) * head;
    Heads queries = {qkv, token, head, d.num_heads}, keys = {qkv + d.num_heads * head, token, head, d.num_kv_heads};
    if (layer.q_norm) {
      queries = head_norm(queries, layer.q_norm, q_other, first, count);
      keys = head_norm(keys, layer.k_norm, k_other, first, count);
    }
    queries = rope(queries, q, first, count), keys = rope(keys, k, first, count);
    if (d.q_rotation) {
      rotate(queries, *d.q_rotation, q_other, first, count);
      keys = rotate(keys, *d.k_rotation, k_other, first, count);
    }
    const StoreArgs args = {layer.cache, d.dtype, keys.from, qkv + (d.num_heads + d.num_kv_heads) * head,
                            keys.token_stride, keys.head_stride, token, head, step.slots};
    for (int64_t t = first; t < first + count; ++t) kernels().store_kv(args, t);
  }

  Heads head_norm(const Heads& heads, const void* weight, char* to, int64_t first, int64_t count) const {
    const RmsNormArgs args = {d.dtype, heads.from, heads.head_stride, heads.count, heads.token_stride, nullptr,
                              0,       weight,     d.eps,             d.head_dim,  to};
    for (int64_t row = first * heads.count; row < (first + count) * heads.count; ++row) kernels().rms_norm(args, row);
    return dense(to, heads.count);
  }

  Heads rope(const Heads& heads, char* to, int64_t first, int64_t count) const {
    const RopeArgs args = {d.dtype, heads.from, heads.token_stride, heads.head_stride, cos,
                           sin,     heads.count, d.head_dim,        to};
    for (int64_t t = first; t < first + count; ++t) kernels().rope(args, t);
    return dense(to, heads.count);
  }

  Heads rotate(const Heads& heads, const PackedLinear& matrix, char* to, int64_t first, int64_t count) const {
    const int64_t token = heads.count * d.head_dim * size_of(d.dtype);
    multiply_here(matrix, heads.from + first * token, d.head_dim, count * heads.count, to + first * token);
    return dense(to, heads.count);
  }

  // All of a linear that takes floats, on this thread.
  void multiply_here(const PackedLinear& matrix, const char* from, int64_t width, int64_t rows, char* to) const {
    const LinearArgs args = {&matrix, from, width * size_of(d.dtype), rows, nullptr, nullptr, to};
    const int64_t tasks = ceil_div(rows, kLinearRows) * ceil_div(matrix.out_features, kPanel);
    for (int64_t task = 0; task < tasks; ++task) kernels().linear(args, task);
  }

  // silu(gate) * up, the change of basis and quantizing for `down`, row by row. Returns where its inputs are.
  const char* gate(int32_t index, const PackedLinear& down) {
    const Timer timer(*this, Kind::other, index);
    const int64_t size = size_of(d.dtype), row_bytes = d.intermediate * size;
    const SiluMulArgs args = {d.dtype, gate_up, 2 * row_bytes, d.intermediate, gated};
    char* inputs = d.gated_rotation ? turned : gated;
    const bool quantizes = kernels().num_digits(down);
    const LinearArgs after = linear_args(down, inputs, d.intermediate, nullptr);
    parallel_for(ceil_div(step.tokens, kTokensAtOnce), [&](int64_t run) {
      const int64_t first = run * kTokensAtOnce, end = std::min(step.tokens, first + kTokensAtOnce);
      for (int64_t row = first; row < end; ++row) kernels().silu_mul(args, row);
      if (d.gated_rotation) {
        const int64_t width = d.gated_rotation->in_features, rows = (end - first) * d.intermediate / width;
        multiply_here(*d.gated_rotation, gated + first * row_bytes, width, rows, turned + first * row_bytes);
      }
      for (int64_t row = first; quantizes && row < end; ++row) kernels().quantize(after, row);
    });
    return inputs;
  }

  static constexpr int64_t kTokensAtOnce = 8;
  const DecoderArgs& d;
  StepArgs& step;
  char *x, *y, *qkv, *q, *k, *q_other, *k_other, *attended, *gate_up, *gated, *turned, *residual;
  int8_t* codes;
  float *row_scales, *own_cos = nullptr, *own_sin = nullptr;
  const float *cos, *sin;
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
