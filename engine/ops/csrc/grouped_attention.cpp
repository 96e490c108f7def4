// Grouped-query attention as a part of a decoder.
#include "decoder.h"

namespace twinpool {

GroupedAttention::GroupedAttention(const Step& step, const GroupedPart& part, Carver& carver)
    : s(step), p(part), head(part.head_dim * step.size), token((part.num_heads + 2 * part.num_kv_heads) * head) {
  const auto take = [&](int64_t heads) { return carver.take<char>(s.tokens * heads * head); };
  qkv = take(p.num_heads + 2 * p.num_kv_heads);
  q = take(p.num_heads), k = take(p.num_kv_heads);
  q_other = take(p.num_heads), k_other = take(p.num_kv_heads);
  attended = take(p.num_heads);
}

void GroupedAttention::store(int32_t layer) const {
  run_timed(s, layer, s.over_x(*p.qkv, qkv));
  const Timer timer(s, Kind::kv_access, layer);
  s.for_each_run([&](int64_t first, int64_t end) { place(first, end); });
}

void GroupedAttention::attend(int32_t layer) const {
  {
    const Timer timer(s, Kind::attention, layer);
    const AttentionArgs args = {p.cache,
                                s.dtype,
                                p.q_rotation ? q_other : q,
                                p.num_heads * head,
                                head,
                                p.num_heads,
                                s.args.block_tables,
                                s.args.block_tables_stride,
                                s.args.context_lens,
                                p.scale,
                                attended};
    run_attention(args, s.args.num_sequences, s.args.query_start);
  }
  const Timer timer(s, Kind::linear, layer);
  run_linear(*p.output, attended, p.num_heads * head, s.tokens, s.y);
}

// Norms of heads, rotary embedding, the change of basis, quantizing and storing of some tokens. Queries end in q_other
// where there is a change of basis, else in q.
void GroupedAttention::place(int64_t first, int64_t end) const {
  Heads queries = {qkv, token, head, p.num_heads}, keys = {qkv + p.num_heads * head, token, head, p.num_kv_heads};
  if (p.q_norm) {
    queries = head_norm(queries, p.q_norm, q_other, first, end);
    keys = head_norm(keys, p.k_norm, k_other, first, end);
  }
  queries = rope(queries, q, first, end), keys = rope(keys, k, first, end);
  if (p.q_rotation) {
    rotate(queries, *p.q_rotation, q_other, first, end);
    keys = rotate(keys, *p.k_rotation, k_other, first, end);
  }
  const StoreArgs args = {p.cache, s.dtype, keys.from, qkv + (p.num_heads + p.num_kv_heads) * head,
                          keys.token_stride, keys.head_stride, token, head, s.args.slots};
  for (int64_t t = first; t < end; ++t) kernels().store_kv(args, t);
}

GroupedAttention::Heads GroupedAttention::dense(const char* from, int32_t count) const {
  return {from, count * head, head, count};
}

GroupedAttention::Heads GroupedAttention::head_norm(const Heads& heads, const void* weight, char* to, int64_t first,
                                                    int64_t end) const {
  const RmsNormArgs args = {s.dtype, heads.from, heads.head_stride,  heads.count, heads.token_stride, nullptr,
                            0,       weight,     s.decoder.eps, p.head_dim,  to};
  for (int64_t row = first * heads.count; row < end * heads.count; ++row) kernels().rms_norm(args, row);
  return dense(to, heads.count);
}

GroupedAttention::Heads GroupedAttention::rope(const Heads& heads, char* to, int64_t first, int64_t end) const {
  const RopeArgs args = {s.dtype, heads.from,  heads.token_stride, heads.head_stride, s.cos,
                         s.sin,   heads.count, p.head_dim,         to};
  for (int64_t t = first; t < end; ++t) kernels().rope(args, t);
  return dense(to, heads.count);
}

GroupedAttention::Heads GroupedAttention::rotate(const Heads& heads, const PackedLinear& matrix, char* to,
                                                 int64_t first, int64_t end) const {
  const int64_t begin = first * heads.count * head;
  multiply_here(matrix, heads.from + begin, (end - first) * heads.count, to + begin);
  return dense(to, heads.count);
}

}  // namespace twinpool
