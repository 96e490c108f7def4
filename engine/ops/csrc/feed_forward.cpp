// The feed-forward blocks as parts of a decoder: the gated one, and that of experts.
#include <cstring>

#include "decoder.h"

namespace twinpool {

GatedMlp::GatedMlp(const Step& step, const GatedPart& part, Carver& carver)
    : s(step), p(part), inner(part.down->in_features) {
  const auto take = [&](int64_t numbers) { return carver.take<char>(s.tokens * numbers * s.size); };
  gate_up = take(2 * inner), gated = take(inner), turned = p.rotation ? take(inner) : gated;
  codes = carver.take<int8_t>(s.tokens * most_code_bytes(*p.down)), row_scales = carver.take<float>(s.tokens);
}

void GatedMlp::run(int32_t layer, char* to) const { run_as(Kind::linear, Kind::other, layer, to); }

void GatedMlp::run_beside_experts(int32_t layer, char* to) const { run_as(Kind::moe, Kind::moe, layer, to); }

void GatedMlp::run_as(Kind matrices, Kind between, int32_t layer, char* to) const {
  run_timed(s, layer, s.over_x(*p.gate_up, gate_up), matrices);
  const LinearArgs down = {p.down, turned, inner * s.size, s.tokens, codes, row_scales, to};
  {
    const Timer timer(s, between, layer);
    gate(down);
  }
  run_timed(s, layer, down, matrices);
}

// silu(gate) * up, the change of basis and quantizing for `down`.
void GatedMlp::gate(const LinearArgs& down) const {
  const int64_t row_bytes = inner * s.size;
  const SiluMulArgs args = {s.dtype, gate_up, 2 * row_bytes, inner, gated};
  const bool quantizes = kernels().num_digits(*p.down);
  s.for_each_run([&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) kernels().silu_mul(args, row);
    if (p.rotation) {
      const int64_t rows = (end - first) * inner / p.rotation->in_features;
      multiply_here(*p.rotation, gated + first * row_bytes, rows, turned + first * row_bytes);
    }
    for (int64_t row = first; quantizes && row < end; ++row) kernels().quantize(down, row);
  });
}

ExpertMlp::ExpertMlp(const Step& step, const ExpertPart& part, const GatedPart* beside, Carver& carver)
    : s(step), p(part) {
  if (beside) {
    shared.emplace(step, *beside, carver);
    shared_out = carver.take<char>(s.tokens * s.decoder.hidden * s.size);
  }
  precise = carver.take<float>(s.dtype == Dtype::bf16 ? s.tokens * s.decoder.hidden : 0);
  logits = carver.take<float>(s.tokens * p.experts.num_experts);
  weights = carver.take<float>(s.tokens * p.k), chosen = carver.take<int32_t>(s.tokens * p.k);
}

void ExpertMlp::run(int32_t layer) const {
  if (shared) shared->run_beside_experts(layer, shared_out);
  {
    const Timer timer(s, Kind::moe, layer);
    route();
  }
  if (s.args.chosen_experts) note_chosen(layer);
  const Timer timer(s, Kind::moe, layer);
  run_experts(p.experts,
              {s.x, s.decoder.hidden * s.size, s.tokens, p.k, weights, chosen, s.codes, s.row_scales, shared_out}, s.y);
}

void ExpertMlp::note_chosen(int32_t layer) const {
  uint8_t* experts = s.args.chosen_experts + layer * static_cast<int64_t>(p.experts.num_experts);
  for (int64_t i = 0; i < s.tokens * p.k; ++i) experts[chosen[i]] = 1;
}

// Scores that are nearly equal must not change places by rounding: in fp32.
void ExpertMlp::route() const {
  const int64_t hidden = s.decoder.hidden;
  if (s.dtype == Dtype::bf16) {
    const bf16* x = reinterpret_cast<const bf16*>(s.x);
    s.for_each_run([&](int64_t first, int64_t end) {
      for (int64_t i = first * hidden; i < end * hidden; ++i) {
        const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
        std::memcpy(precise + i, &bits, sizeof bits);
      }
    });
  }
  const void* from = s.dtype == Dtype::bf16 ? static_cast<const void*>(precise) : s.x;
  run_linear(*p.router, from, hidden * sizeof(float), s.tokens, logits);
  const Gating gating = {p.score,       p.renormalize != 0, p.experts.num_experts, p.k,
                         p.num_groups,  p.groups_kept,      p.scale,               p.eps};
  const int64_t stride = p.experts.num_experts * static_cast<int64_t>(sizeof(float));
  const GatingArgs args = {gating, reinterpret_cast<const char*>(logits), stride, p.bias, nullptr, nullptr,
                           weights, chosen};
  for_each_row(kernels().gating, args, s.tokens);
}

}  // namespace twinpool
