// One vector of kLanes floats, written with the compiler's vector extensions so that one source serves every
// instruction set. No operation here may be contracted or reordered (-ffp-contract=off): an element's bits depend on
// its own inputs only.

constexpr int kLanes = TWINPOOL_LANES;

#define TWINPOOL_INLINE [[gnu::always_inline]] inline

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef int16_t I16 __attribute__((vector_size(4 * kLanes)));

template <class V>
TWINPOOL_INLINE V load_vector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
TWINPOOL_INLINE void store_vector(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

TWINPOOL_INLINE F32 splat(float x) { return x - F32{}; }
TWINPOOL_INLINE U32 splat(uint32_t x) { return x - U32{}; }
TWINPOOL_INLINE I32 splat(int32_t x) { return x - I32{}; }

// ---- what the vector extensions cannot say, or gcc makes slow code of: fused multiply-add, widening and narrowing
// ----

#if TWINPOOL_LANES == 16
TWINPOOL_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
TWINPOOL_INLINE I32 widen(const int8_t* from) {
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
TWINPOOL_INLINE U32 widen(const uint16_t* from) {
  return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
TWINPOOL_INLINE void narrow(int8_t* to, I32 v) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v)); }
TWINPOOL_INLINE void narrow(uint16_t* to, U32 v) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)v));
}
TWINPOOL_INLINE I32 pair_sums(I16 a, I16 b) { return (I32)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif TWINPOOL_LANES == 8
TWINPOOL_INLINE I32 pair_sums(I16 a, I16 b) { return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
TWINPOOL_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
TWINPOOL_INLINE I32 widen(const int8_t* from) {
  return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
TWINPOOL_INLINE U32 widen(const uint16_t* from) {
  return (U32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
TWINPOOL_INLINE __m128i narrow_to_16(__m256i v) {
  return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
TWINPOOL_INLINE void narrow(int8_t* to, I32 v) {
  const __m128i bytes = narrow_to_16((__m256i)(v & 0xff));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(bytes, bytes));
}
TWINPOOL_INLINE void narrow(uint16_t* to, U32 v) { _mm_storeu_si128((__m128i*)to, narrow_to_16((__m256i)v)); }
#else
TWINPOOL_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] for every lane i
TWINPOOL_INLINE I32 pair_sums(I16 a, I16 b) {
#if defined(__x86_64__)
  return (I32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const I32 x = (I32)a, y = (I32)b;
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}
TWINPOOL_INLINE I32 widen(const int8_t* from) { return I32{from[0], from[1], from[2], from[3]}; }
TWINPOOL_INLINE U32 widen(const uint16_t* from) { return U32{from[0], from[1], from[2], from[3]}; }
template <class T, class V>
TWINPOOL_INLINE void narrow(T* to, V v) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<T>(v[i]);
}
#endif

TWINPOOL_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }

// ---- moving lanes ----

using Lanes = std::make_integer_sequence<uint32_t, kLanes>;

// Lane i of the result is lane lanes[i] of a followed by b. With constant lanes this becomes the best instruction there
// is.
TWINPOOL_INLINE U32 pick(U32 a, U32 b, U32 lanes) {
#if defined(__clang__)
  U32 picked;
  for (int i = 0; i < kLanes; ++i) picked[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return picked;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// The lanes kDistance further on, cyclically.
template <uint32_t kDistance, uint32_t... lane>
TWINPOOL_INLINE F32 rotate(F32 v, std::integer_sequence<uint32_t, lane...>) {
  return (F32)pick((U32)v, (U32)v, U32{((lane + kDistance) % kLanes)...});
}

// Sums in a fixed order: halves are added until one lane is left.
template <uint32_t kHalf = kLanes / 2>
TWINPOOL_INLINE float sum_lanes(F32 v) {
  v += rotate<kHalf>(v, Lanes());
  if constexpr (kHalf > 1) return sum_lanes<kHalf / 2>(v);
  return v[0];
}

template <uint32_t kHalf = kLanes / 2>
TWINPOOL_INLINE float max_lanes(F32 v) {
  v = max(v, rotate<kHalf>(v, Lanes()));
  if constexpr (kHalf > 1) return max_lanes<kHalf / 2>(v);
  return v[0];
}

template <uint32_t kHalf, uint32_t... lane>
TWINPOOL_INLINE void swap_quarters(U32& a, U32& b, std::integer_sequence<uint32_t, lane...>) {
  const U32 upper = pick(a, b, U32{(lane & kHalf ? kLanes + lane - kHalf : lane)...});
  b = pick(a, b, U32{(lane & kHalf ? kLanes + lane : lane + kHalf)...});
  a = upper;
}

// Transposes by swapping the off-diagonal quarters of ever smaller squares.
template <uint32_t kHalf = kLanes / 2>
TWINPOOL_INLINE void transpose(U32 (&row)[kLanes]) {
#pragma GCC unroll 16
  for (uint32_t i = 0; i < kLanes; ++i)
    if (!(i & kHalf)) swap_quarters<kHalf>(row[i], row[i + kHalf], Lanes());
  if constexpr (kHalf > 1) transpose<kHalf / 2>(row);
}

// ---- conversions ----

TWINPOOL_INLINE F32 load(const float* from) { return load_vector<F32>(from); }
TWINPOOL_INLINE F32 load(const bf16* from) { return (F32)(widen(from) << 16); }
TWINPOOL_INLINE F32 load(const int8_t* from) { return __builtin_convertvector(widen(from), F32); }

// bf16 bits in the low halves: to the nearest, ties to even, NaN stays NaN (as torch).
TWINPOOL_INLINE U32 round_to_bf16(F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : splat(uint32_t{0x7fc0});
}

TWINPOOL_INLINE void store(float* to, F32 v) { store_vector(to, v); }
TWINPOOL_INLINE void store(bf16* to, F32 v) { narrow(to, round_to_bf16(v)); }

// The same where subnormal numbers do not count.
TWINPOOL_INLINE void store_normal(float* to, F32 v) { store(to, v); }
TWINPOOL_INLINE void store_normal(bf16* to, F32 v) {
#if TWINPOOL_BF16_DOT
  store_vector(to, _mm512_cvtneps_pbh(v));
#else
  store(to, v);
#endif
}

// v as a T holds it
template <class T>
TWINPOOL_INLINE F32 rounded_to(F32 v) {
  if constexpr (sizeof(T) == sizeof(bf16)) v = (F32)(round_to_bf16(v) << 16);
  return v;
}

// The first `count` lanes; the others are zero.
template <class T>
TWINPOOL_INLINE F32 load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

template <class T>
TWINPOOL_INLINE void store(T* to, F32 v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T padded[kLanes];
  store(padded, v);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

TWINPOOL_INLINE F32 load_half(const uint16_t* from) {
  const U32 half = widen(from), magnitude = half & 0x7fff;
  U32 bits = (U32)((F32)(magnitude << 13) * 0x1p112f);       // moves the exponent's bias, subnormals included
  bits |= magnitude >= 0x7c00 ? splat(0x7f800000u) : U32{};  // infinity, NaN
  return (F32)(bits | (half & 0x8000) << 16);
}

// ---- exp ----

// e^x within 2 ulp for x <= 88; 0 below -87. Cody and Waite's reduction, Cephes' polynomial.
TWINPOOL_INLINE F32 exp(F32 x) {
  const F32 shifter = splat(0x1.8p23f);
  const F32 shifted = fma(x, splat(1.44269504f), shifter);  // its low bits are the nearest integer to x / ln 2
  const F32 n = shifted - shifter;
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const I32 power = ((I32)shifted - (I32)shifter + 127) << 23;
  return x < -87.0f ? F32{} : p * (F32)power;
}
