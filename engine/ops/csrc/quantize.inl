// Symmetric int8, there and back: of the cache (kv_store.inl, attention.inl), of weights and of activations (linear.inl).

// max |x|, or NaN where there is one.
template <class T>
float largest_magnitude(const T* x, int64_t width) {
  // The bits of non-negative floats order as integers do, and NaN above all: no NaN is lost in the maximum.
  I32 largest = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const I32 magnitude = (I32)load(x + i, width - i) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = std::max(bits, static_cast<int32_t>(largest[i]));
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

// value / divisor to the nearest integer, ties to even, within -largest .. largest, which is below 2^22.
TWINPOOL_INLINE I32 to_integer(F32 value, F32 divisor, float largest) {
  F32 code = value / divisor;
  code = code > largest ? splat(largest) : code;
  code = code < -largest ? splat(-largest) : code;
  const F32 shifter = splat(0x1.8p23f);  // adding it leaves the nearest even integer in the low bits
  return (I32)(code + shifter) - (I32)shifter;
}

TWINPOOL_INLINE I32 to_code(F32 value, F32 divisor) { return to_integer(value, divisor, 127.0f); }

#if TWINPOOL_BF16_DOT
// The bf16 of 0 .. 127, split into bytes; and where the bytes of two neighbours come from, 64 + i being high byte i.
struct Magnitudes {
  alignas(64) uint8_t low[128], high[128];
  constexpr Magnitudes() : low(), high() {
    for (int i = 1; i < 128; ++i) {
      int exponent = 6;
      while (!(i >> exponent)) --exponent;
      const int bits = (127 + exponent) << 7 | ((i << (7 - exponent)) & 0x7f);
      low[i] = static_cast<uint8_t>(bits), high[i] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
struct Places {
  alignas(64) uint8_t first[64], second[64];
};
// The first and the last two of every four codes.
constexpr Places quadruples() {
  Places places = {};
  for (int i = 0; i < 64; ++i) {
    const int byte = i / 4 * 4 + i % 4 / 2, half = i % 2 * 64;
    places.first[i] = static_cast<uint8_t>(half + byte), places.second[i] = static_cast<uint8_t>(half + byte + 2);
  }
  return places;
}
// The first and the last 32 codes.
constexpr Places halves() {
  Places places = {};
  for (int i = 0; i < 64; ++i) {
    places.first[i] = static_cast<uint8_t>(i % 2 * 64 + i / 2);
    places.second[i] = static_cast<uint8_t>(places.first[i] + 32);
  }
  return places;
}
constexpr Magnitudes kMagnitudes;
constexpr Places kQuadruples = quadruples(), kHalves = halves();

// Both bytes of the bf16 of 64 codes. A magnitude is below 128: its bytes come from tables, the sign from the code.
TWINPOOL_INLINE void bf16_bytes(__m512i codes, __m512i& low, __m512i& high) {
  const __m512i magnitude = _mm512_abs_epi8(codes);
  low = _mm512_permutex2var_epi8(_mm512_load_si512(kMagnitudes.low), magnitude,
                                 _mm512_load_si512(kMagnitudes.low + 64));
  high = _mm512_permutex2var_epi8(_mm512_load_si512(kMagnitudes.high), magnitude,
                                  _mm512_load_si512(kMagnitudes.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);  // high | (codes & 0x80)
}
#endif

// Four codes of k .. k + 3 a lane -> words as panels of T hold them.
template <class T>
TWINPOOL_INLINE void unpack_codes(U32 codes, U32 (&words)[4 / kPerWord<T>]) {
#if TWINPOOL_BF16_DOT
  if constexpr (sizeof(T) == sizeof(bf16)) {
    __m512i low, high;
    bf16_bytes((__m512i)codes, low, high);
    words[0] = (U32)_mm512_permutex2var_epi8(low, _mm512_load_si512(kQuadruples.first), high);
    words[1] = (U32)_mm512_permutex2var_epi8(low, _mm512_load_si512(kQuadruples.second), high);
    return;
  }
#endif
  F32 values[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) values[i] = __builtin_convertvector((I32)(codes << (24 - 8 * i)) >> 24, F32);
  if constexpr (sizeof(T) == sizeof(float)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) words[i] = (U32)values[i];
  } else {
    words[0] = (U32)values[0] >> 16 | ((U32)values[1] & 0xffff0000u);
    words[1] = (U32)values[2] >> 16 | ((U32)values[3] & 0xffff0000u);
  }
}
