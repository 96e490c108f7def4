// Latent attention in the absorbed form as a part of a decoder: all heads attend to the latents themselves.
#include <cstring>

#include "decoder.h"

namespace twinpool {

LatentAttention::LatentAttention(const Step& step, const LatentPart& part, Carver& carver)
    : s(step),
      p(part),
      rank(part.cache.rank),
      nope_dim(part.key_up->in_features),
      rope_dim(part.cache.key_dim),
      width(rank + rope_dim),
      out_width(part.cache.dtype == Dtype::int8 ? rank : width) {
  const auto take = [&](int64_t numbers) { return carver.take<char>(s.tokens * numbers * s.size); };
  const int64_t q_rank = p.q_a ? p.q_a->out_features : 0;
  reduced = take(q_rank), reduced_normed = take(q_rank);
  codes = carver.take<int8_t>(p.q_a ? s.tokens * most_code_bytes(*p.q_b) : 0);
  row_scales = carver.take<float>(s.tokens);
  q = take(p.q_b->out_features), turned = take(p.num_heads * rope_dim), joint = take(p.num_heads * width);
  kv = take(width), latents = take(rank), keys = take(rope_dim);
  sums = take(p.num_heads * out_width), values = take(p.output->in_features);
}

void LatentAttention::store(int32_t layer) const {
  project_queries(layer);
  run_timed(s, layer, s.over_x(*p.kv_a, kv));
  const Timer timer(s, Kind::kv_access, layer);
  s.for_each_run([&](int64_t first, int64_t end) { place(first, end); });
}

void LatentAttention::attend(int32_t layer) const {
  const int64_t head = (nope_dim + rope_dim) * s.size, out_head = out_width * s.size;
  const int64_t value = p.value_up->out_features * s.size;
  {
    const Timer timer(s, Kind::linear, layer);
    run_linear_groups({p.key_up, p.num_heads, s.tokens, q, head, p.num_heads * head, joint, width * s.size,
                       p.num_heads * width * s.size});
  }
  {
    const Timer timer(s, Kind::attention, layer);
    attend_to_latents();
  }
  {
    const Timer timer(s, Kind::linear, layer);
    run_linear_groups({p.value_up, p.num_heads, s.tokens, sums, out_head, p.num_heads * out_head, values, value,
                       p.num_heads * value});
  }
  const Timer timer(s, Kind::linear, layer);
  run_linear(*p.output, values, p.num_heads * value, s.tokens, s.y);
}

void LatentAttention::attend_to_latents() const {
  const StepArgs& step = s.args;
  const EntryArgs& cache = p.cache;
  const int64_t head = width * s.size;
  if (cache.dtype == Dtype::int8) {
    const LatentArgs args = {s.dtype, cache.latents, cache.keys, cache.scales, cache.row_bytes, cache.block_size,
                             cache.rank, cache.key_dim, joint, p.num_heads * head, head, p.num_heads,
                             p.heads_at_once, step.block_tables, step.block_tables_stride, step.context_lens, p.scale,
                             sums};
    return run_latent_attention(args, step.num_sequences, step.query_start);
  }
  // One KV head whose values are as wide as its keys: their last part, the rotated keys, is summed for nothing.
  const KvCacheArgs both = {cache.dtype,     cache.latents, cache.latents,    nullptr, nullptr,
                            cache.row_bytes, 1,             cache.block_size, static_cast<int32_t>(width)};
  run_attention({both, s.dtype, joint, p.num_heads * head, head, p.num_heads, step.block_tables,
                 step.block_tables_stride, step.context_lens, p.scale, sums},
                step.num_sequences, step.query_start);
}

void LatentAttention::project_queries(int32_t layer) const {
  if (!p.q_a) return run_timed(s, layer, s.over_x(*p.q_b, q));
  run_timed(s, layer, s.over_x(*p.q_a, reduced));
  const int64_t q_rank = p.q_a->out_features;
  const LinearArgs project = {p.q_b, reduced_normed, q_rank * s.size, s.tokens, codes, row_scales, q};
  {
    const Timer timer(s, Kind::other, layer);
    norm_rows({s.dtype, reduced, q_rank * s.size, s.tokens, 0, nullptr, 0, p.q_a_norm, p.eps, q_rank, reduced_normed},
              s.tokens, project);
  }
  run_timed(s, layer, project);
}

// Norms of latents, rotary embedding, quantizing and storing of some tokens; the rotated part of queries goes to where
// attention wants it.
void LatentAttention::place(int64_t first, int64_t end) const {
  const int64_t head = (nope_dim + rope_dim) * s.size, key = rope_dim * s.size;
  const RmsNormArgs norm = {s.dtype, kv, width * s.size, s.tokens, 0, nullptr, 0, p.kv_a_norm, p.eps, rank, latents};
  const RopeArgs turn_key = {s.dtype, kv + rank * s.size, width * s.size, key, s.cos, s.sin, 1, rope_dim, keys};
  const RopeArgs turn = {s.dtype, q + nope_dim * s.size, p.num_heads * head, head, s.cos, s.sin, p.num_heads,
                         rope_dim, turned};
  const StoreLatentsArgs args = {p.cache, s.dtype, latents, keys, rank * s.size, key, s.args.slots};
  for (int64_t t = first; t < end; ++t) {
    kernels().rms_norm(norm, t);
    kernels().rope(turn_key, t);
    kernels().store_latents(args, t);
    kernels().rope(turn, t);
    for (int64_t h = t * p.num_heads; h < (t + 1) * p.num_heads; ++h)
      std::memcpy(joint + (h * width + rank) * s.size, turned + h * key, key);
  }
}

}  // namespace twinpool
