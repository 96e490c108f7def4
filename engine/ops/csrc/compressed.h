// Arguments of the kernels for attention over windows and compressed entries, and for streams of residuals
// (reference_compressed.py, reference_streams.py). Included by kernels.h.
#pragma once

namespace twinpool {

// One layer's entries in the cache. The planes of a cache row are row_bytes away from those of the next.
struct EntryArgs {
  Dtype dtype;
  char *latents, *keys, *scales;      // of a row: [block_size, rank], [block_size, key_dim], fp16 [block_size]
  int64_t row_bytes, item_stride;     // item_stride: from one latent to the next, and of keys unless int8
  int32_t block_size, rank, key_dim;  // keys is null where key_dim is 0
};

// Writes latents and their rotated keys, which are bf16 where latents are int8, to their places.
struct StoreLatentsArgs {
  EntryArgs entries;
  Dtype dtype;
  const char *latents, *keys;  // [tokens, rank], [tokens, key_dim]
  int64_t latent_stride, key_stride;
  const int64_t* slots;  // [tokens]: row * block_size + place
};

// Attention of all heads over the keys of a window and over chosen entries, which are their values as well.
struct SharedArgs {
  Dtype dtype;    // of q, local and out
  const char* q;  // [tokens, num_heads, dim]
  int64_t q_token_stride, q_head_stride;
  int32_t num_heads, heads_at_once, dim;
  const char* local;  // [keys, dim]
  int64_t local_stride;
  const int64_t* spans;  // [tokens, 2]: first and behind the last key in local
  EntryArgs entries;
  const int32_t* slots;  // [tokens, num_slots]: row * block_size + place, then -1
  int64_t slots_stride, num_slots;
  const float* sinks;  // [num_heads]
  float scale;
  char* out;  // contiguous
};
struct SharedTask {
  int64_t token, first_head;
};

// scores[token, entry] = the sum over heads of weight * relu(query . entry), of the entries that a token sees.
struct IndexArgs {
  Dtype dtype;    // of q
  const char* q;  // [tokens, num_heads, dim]
  int64_t q_token_stride, q_head_stride;
  int32_t num_heads, dim;
  const float* weights;  // [tokens, num_heads]
  EntryArgs entries;
  const int32_t* block_tables;
  int64_t block_tables_stride;
  const int32_t *sequences, *visible;  // [tokens]
  float* scores;
  int64_t scores_stride;  // in elements
};
struct IndexTask {
  int64_t token, first_entry;  // a tile of entries
};

// out [rows, width]: for each channel the mean of `count` keys weighted by the softmax of as many gates, all fp32.
struct PoolArgs {
  const float *keys, *gates;  // [rows, count, width], contiguous
  int64_t count, width;
  float* out;
};

constexpr int64_t kMostStreams = 16;

// What a block reads of the streams, and what mixes them afterwards; without post and comb the last reading of all.
struct StreamsInArgs {
  Dtype dtype;
  const char* x;       // [tokens, streams, width], contiguous
  const float* mixes;  // [tokens, streams * (2 + streams)], or [tokens, streams] without post
  const float *scale, *base;
  int64_t streams, width, iterations;
  float eps;
  char* out;     // [tokens, width]
  float *post;   // [tokens, streams], or null
  float *comb;   // [tokens, streams, streams]
};

struct StreamsOutArgs {
  Dtype dtype;
  const char *y, *x;  // [tokens, width], [tokens, streams, width], contiguous
  const float *post, *comb;
  int64_t streams, width;
  char* out;  // [tokens, streams, width]
};

}  // namespace twinpool
