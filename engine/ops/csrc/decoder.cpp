// All layers of a decoder in one call: what engine/models/decoder.py does operator by operator, on the same kernels and
// with the same bits, without a trip through Python and a new tensor for each of them.
//
// The call is cut at the places where a layer's tokens have just been stored in the cache: stage s ends layer s - 1 and
// begins layer s. Decode runs all stages in one call; prefill one at a time, to send rows off in between.
#include "decoder.h"

#include <cstring>

namespace twinpool {

namespace {

// The linear that reads what a layer's attention, or its feed-forward block, is given. Others that read it want the
// same codes.
const PackedLinear* first_of_attention(const LayerArgs& layer) {
  if (layer.grouped) return layer.grouped->qkv;
  return layer.latent->q_a ? layer.latent->q_a : layer.latent->q_b;
}
const PackedLinear* first_of_mlp(const LayerArgs& layer) {
  return layer.experts ? layer.experts->experts.gate_up : layer.gated->gate_up;
}

int64_t most_code_bytes(const DecoderArgs& decoder) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < decoder.num_layers; ++i)
    for (const PackedLinear* each : {first_of_attention(decoder.layers[i]), first_of_mlp(decoder.layers[i])})
      bytes = std::max(bytes, most_code_bytes(*each));
  return bytes;
}

}  // namespace

Step::Step(const DecoderArgs& decoder, StepArgs& args, Carver& carver)
    : decoder(decoder), args(args), dtype(decoder.dtype), tokens(args.tokens), size(size_of(decoder.dtype)) {
  const auto take = [&] { return carver.take<char>(tokens * decoder.hidden * size); };
  x = take(), y = take();
  codes = carver.take<int8_t>(tokens * most_code_bytes(decoder)), row_scales = carver.take<float>(tokens);
  residual = args.residual, cos = args.cos, sin = args.sin;
  if (!residual) {
    residual = take();
    cos = own_cos_ = carver.take<float>(tokens * decoder.rope_dim / 2);
    sin = own_sin_ = carver.take<float>(tokens * decoder.rope_dim / 2);
  }
}

void Step::look_up() const {
  if (args.residual) return;
  const int64_t row_bytes = decoder.hidden * size, half = decoder.rope_dim / 2;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t id = args.token_ids[t];
    if (id >= 0 && id < args.vocab) {
      std::memcpy(residual + t * row_bytes, args.embedding + id * row_bytes, row_bytes);
    } else {
      std::memset(residual + t * row_bytes, 0xff, row_bytes);  // NaN, which comes out as an error of this sequence
    }
    std::memcpy(own_cos_ + t * half, args.cos + args.positions[t] * half, half * sizeof(float));
    std::memcpy(own_sin_ + t * half, args.sin + args.positions[t] * half, half * sizeof(float));
  }
}

void Step::norm(const char* added, const void* weight, char* to, const PackedLinear* next) const {
  const int64_t stride = decoder.hidden * size;
  const RmsNormArgs norm = {dtype, added ? added : residual, stride, tokens,
                            0,     added ? residual : nullptr, stride, weight,
                            decoder.eps, decoder.hidden, to};
  norm_rows(norm, tokens, next ? over_x(*next, nullptr) : LinearArgs{});
}

void norm_rows(const RmsNormArgs& norm, int64_t rows, const LinearArgs& next) {
  const bool quantizes = next.weight && kernels().num_digits(*next.weight);
  for_each_row_do(rows, [&](int64_t row) {
    kernels().rms_norm(norm, row);
    if (quantizes) kernels().quantize(next, row);
  });
}

namespace {

// Parts of one layer after the other lie in the same memory, behind what they share.
template <class Part, class... Args>
Part in(Carver carver, const Step& step, const Args&... args) {
  return Part(step, args..., carver);
}

void begin(const Step& step, int32_t index, const Carver& carver) {
  const LayerArgs& layer = step.decoder.layers[index];
  if (index == 0) {
    const Timer timer(step, Kind::other, index);
    step.look_up();
    step.norm(nullptr, layer.input_norm, step.x, first_of_attention(layer));
  }
  if (layer.grouped) {
    in<GroupedAttention>(carver, step, *layer.grouped).store(index);
  } else {
    in<LatentAttention>(carver, step, *layer.latent).store(index);
  }
}

void end(const Step& step, int32_t index, const Carver& carver) {
  const LayerArgs& layer = step.decoder.layers[index];
  if (layer.grouped) {
    in<GroupedAttention>(carver, step, *layer.grouped).attend(index);
  } else {
    in<LatentAttention>(carver, step, *layer.latent).attend(index);
  }
  {
    const Timer timer(step, Kind::other, index);
    step.norm(step.y, layer.post_norm, step.x, first_of_mlp(layer));
  }
  if (layer.experts) {
    in<ExpertMlp>(carver, step, *layer.experts, layer.gated).run(index);
  } else {
    in<GatedMlp>(carver, step, *layer.gated).run(index, step.y);
  }
  const Timer timer(step, Kind::other, index);
  if (index + 1 == step.decoder.num_layers) return step.norm(step.y, step.decoder.final_norm, step.args.out, nullptr);
  const LayerArgs& next = step.decoder.layers[index + 1];
  step.norm(step.y, next.input_norm, step.x, first_of_attention(next));
}

// Bytes that the parts of a layer take behind what they share.
size_t bytes_with(const LayerArgs& layer, const Step& step, const Carver& carver) {
  Carver attention = carver, mlp = carver;
  if (layer.grouped) GroupedAttention(step, *layer.grouped, attention);
  if (layer.latent) LatentAttention(step, *layer.latent, attention);
  if (layer.experts) {
    ExpertMlp(step, *layer.experts, layer.gated, mlp);
  } else {
    GatedMlp(step, *layer.gated, mlp);
  }
  return std::max(attention.bytes(), mlp.bytes());
}

}  // namespace

}  // namespace twinpool

using namespace twinpool;

// Bytes of workspace for a step of so many tokens.
TWINPOOL_API int64_t twinpool_decoder_bytes(const DecoderArgs* decoder, int64_t tokens) {
  StepArgs args = {};
  args.tokens = tokens;
  Carver carver(nullptr);
  const Step step(*decoder, args, carver);
  size_t bytes = 0;
  for (int32_t i = 0; i < decoder->num_layers; ++i) bytes = std::max(bytes, bytes_with(decoder->layers[i], step, carver));
  return static_cast<int64_t>(bytes);
}

// Runs the stages first .. last - 1 of 0 .. num_layers.
TWINPOOL_API void twinpool_decoder(const DecoderArgs* decoder, StepArgs* args, int32_t first, int32_t last) {
  Carver carver(args->workspace);
  const Step step(*decoder, *args, carver);
  for (int32_t stage = first; stage < last; ++stage) {
    if (stage > 0) end(step, stage - 1, carver);
    if (stage < decoder->num_layers) begin(step, stage, carver);
  }
}
