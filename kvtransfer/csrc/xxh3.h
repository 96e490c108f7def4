// xxh3_64 (seed 0) of a row that may arrive or be copied piece by piece: one pass over its bytes.
//
// The hash is the public XXH3 algorithm for inputs of more than 240 bytes. It works on stripes of 64 bytes, 16 of them
// to a block, with eight 64-bit sums; what is left behind the last whole block is hashed in `finish`, which reads up to
// 64 bytes of the row before it again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinpool {

constexpr size_t kBlockBytes = 1024;
constexpr size_t kMinRowBytes = 241;  // shorter inputs have other formulas

struct Sums {
  alignas(64) uint64_t lane[8];
  Sums();
};

// Whole blocks that `finish` does not hash: it keeps at least one byte.
inline size_t whole_blocks(size_t num_bytes) { return (num_bytes - 1) / kBlockBytes; }

// Adds n blocks to the sums; `copy_blocks` also copies them to `to`, past the cache where that is possible: what has
// been copied so is in order with later stores only after `fence_copies`.
void hash_blocks(Sums& sums, const uint8_t* from, size_t n);
void copy_blocks(Sums& sums, uint8_t* to, const uint8_t* from, size_t n, bool past_cache);
void fence_copies();

// The hash of the row of num_bytes bytes (kMinRowBytes at least), whose whole blocks are in the sums.
uint64_t finish(Sums& sums, const uint8_t* row, size_t num_bytes);

// "avx512", "avx2" or "generic"; select_isa returns false where this machine lacks it.
const char* isa();
bool select_isa(const char* name);

}  // namespace twinpool
