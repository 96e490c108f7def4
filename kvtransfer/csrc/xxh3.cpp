#include "xxh3.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twinpool {
namespace {

constexpr uint64_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};

// The algorithm's default secret.
alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

// Whether blocks are copied, too, and past the cache: such stores need `to` to be aligned to a stripe.
enum Copy { kNoCopy, kInCache, kPastCache };

constexpr size_t kStripe = 64;
constexpr size_t kStripes = kBlockBytes / kStripe;
constexpr const uint8_t* kScramble = kSecret + 128;

uint64_t load(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;  // little endian, as everywhere this is built
}

void add_stripe(Sums& sums, const uint8_t* stripe, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t data = load(stripe + 8 * i), mixed = data ^ load(secret + 8 * i);
    sums.lane[i ^ 1] += data;
    sums.lane[i] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
  }
}

template <Copy kCopy>
void blocks_generic(Sums& sums, uint8_t* to, const uint8_t* from, size_t n) {
  for (; n; --n, from += kBlockBytes, to += kCopy ? kBlockBytes : 0) {
    for (size_t s = 0; s < kStripes; ++s) add_stripe(sums, from + s * kStripe, kSecret + 8 * s);
    if (kCopy) std::memcpy(to, from, kBlockBytes);
    for (int i = 0; i < 8; ++i) {
      uint64_t& sum = sums.lane[i];
      sum = (sum ^ (sum >> 47) ^ load(kScramble + 8 * i)) * kPrime32[0];
    }
  }
}

#if defined(__x86_64__)
template <Copy kCopy>
__attribute__((target("avx2"))) void blocks_avx2(Sums& sums, uint8_t* to, const uint8_t* from, size_t n) {
  __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums.lane));
  __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums.lane + 4));
  const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32[0]));
  const auto add = [&](__m256i sum, __m256i data, const uint8_t* secret) __attribute__((target("avx2"), always_inline)) {
    const __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sum, product), _mm256_shuffle_epi32(data, 0x4E));
  };
  const auto scramble = [&](__m256i sum, const uint8_t* secret) __attribute__((target("avx2"), always_inline)) {
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
    const __m256i upper = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), upper);
  };
  for (; n; --n) {
    for (size_t s = 0; s < kStripes; ++s) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
      if (kCopy) {
        __m256i* place = reinterpret_cast<__m256i*>(to);
        if (kCopy == kPastCache) {
          _mm256_stream_si256(place, a);
          _mm256_stream_si256(place + 1, b);
        } else {
          _mm256_storeu_si256(place, a);
          _mm256_storeu_si256(place + 1, b);
        }
        to += kStripe;
      }
      low = add(low, a, kSecret + 8 * s);
      high = add(high, b, kSecret + 8 * s + 32);
      from += kStripe;
    }
    low = scramble(low, kScramble);
    high = scramble(high, kScramble + 32);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums.lane), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums.lane + 4), high);
}

template <Copy kCopy>
__attribute__((target("avx512f"))) void blocks_avx512(Sums& sums, uint8_t* to, const uint8_t* from, size_t n) {
  __m512i sum = _mm512_load_si512(sums.lane);
  const __m512i prime = _mm512_set1_epi64(static_cast<long long>(kPrime32[0]));
  const __m512i last = _mm512_loadu_si512(kScramble);
  for (; n; --n) {
#pragma GCC unroll 16
    for (size_t s = 0; s < kStripes; ++s) {
      const __m512i data = _mm512_loadu_si512(from);
      if (kCopy) {
        if (kCopy == kPastCache) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(to), data);
        } else {
          _mm512_storeu_si512(to, data);
        }
        to += kStripe;
      }
      const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(kSecret + 8 * s));
      const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
      sum = _mm512_add_epi64(_mm512_add_epi64(sum, product), _mm512_shuffle_epi32(data, _MM_PERM_BADC));
      from += kStripe;
    }
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), last);
    const __m512i upper = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
    sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), upper);
  }
  _mm512_store_si512(sums.lane, sum);
}
#endif

using Blocks = void (*)(Sums&, uint8_t*, const uint8_t*, size_t);

struct Isa {
  const char* name;
  bool here;
  Blocks blocks[3];  // by Copy
};

const Isa* best() {
#if defined(__x86_64__)
  static const Isa known[] = {
      {"avx512", __builtin_cpu_supports("avx512f") > 0, {blocks_avx512<kNoCopy>, blocks_avx512<kInCache>, blocks_avx512<kPastCache>}},
      {"avx2", __builtin_cpu_supports("avx2") > 0, {blocks_avx2<kNoCopy>, blocks_avx2<kInCache>, blocks_avx2<kPastCache>}},
      {"generic", true, {blocks_generic<kNoCopy>, blocks_generic<kInCache>, blocks_generic<kInCache>}},
      {}};
#else
  static const Isa known[] = {{"generic", true, {blocks_generic<kNoCopy>, blocks_generic<kInCache>, blocks_generic<kInCache>}}, {}};
#endif
  return known;
}

const Isa* chosen() {
  const Isa* isa = best();
  while (!isa->here) ++isa;
  return isa;
}

const Isa* g_isa = chosen();

uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

Sums::Sums()
    : lane{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]} {}

void hash_blocks(Sums& sums, const uint8_t* from, size_t n) { g_isa->blocks[kNoCopy](sums, nullptr, from, n); }

void copy_blocks(Sums& sums, uint8_t* to, const uint8_t* from, size_t n, bool past_cache) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % kStripe == 0;
  g_isa->blocks[past_cache && aligned ? kPastCache : kInCache](sums, to, from, n);
}

void fence_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

uint64_t finish(Sums& sums, const uint8_t* row, size_t num_bytes) {
  const uint8_t* rest = row + whole_blocks(num_bytes) * kBlockBytes;
  const uint8_t* end = row + num_bytes;
  for (size_t s = 0; s < static_cast<size_t>(end - rest - 1) / kStripe; ++s) {
    add_stripe(sums, rest + s * kStripe, kSecret + 8 * s);
  }
  add_stripe(sums, end - kStripe, kSecret + 121);
  uint64_t hash = num_bytes * kPrime64[0];
  for (int i = 0; i < 4; ++i) {
    hash += fold(sums.lane[2 * i] ^ load(kSecret + 11 + 16 * i), sums.lane[2 * i + 1] ^ load(kSecret + 19 + 16 * i));
  }
  hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

const char* isa() { return g_isa->name; }

bool select_isa(const char* name) {
  for (const Isa* isa = best(); isa->name; ++isa) {
    if (isa->here && std::strcmp(isa->name, name) == 0) {
      g_isa = isa;
      return true;
    }
  }
  return false;
}

}  // namespace twinpool
