// One vector of kLanes floats, written with the compiler's vector extensions so that one source serves every instruction set.
// No operation here may be contracted or reordered (-ffp-contract=off): an element's bits depend on its own inputs only.

constexpr int kLanes = TWINPOOL_LANES;

#define TWINPOOL_INLINE [[gnu::always_inline]] inline

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef int8_t I8 __attribute__((vector_size(kLanes)));

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

TWINPOOL_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if TWINPOOL_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif TWINPOOL_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

TWINPOOL_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }

// Sums in a fixed order: halves are added until one is left.
TWINPOOL_INLINE float sum_lanes(F32 v) {
  float lane[kLanes];
  store_vector(lane, v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

TWINPOOL_INLINE float max_lanes(F32 v) {
  float lane[kLanes];
  store_vector(lane, v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}

// ---- conversions ----

TWINPOOL_INLINE F32 load(const float* from) { return load_vector<F32>(from); }
TWINPOOL_INLINE F32 load(const bf16* from) { return (F32)(__builtin_convertvector(load_vector<U16>(from), U32) << 16); }
TWINPOOL_INLINE F32 load(const int8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(load_vector<I8>(from), I32), F32);
}

// bf16 bits in the low halves: to the nearest, ties to even, NaN stays NaN (as torch).
TWINPOOL_INLINE U32 round_to_bf16(F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : splat(uint32_t{0x7fc0});
}

TWINPOOL_INLINE void store(float* to, F32 v) { store_vector(to, v); }
TWINPOOL_INLINE void store(bf16* to, F32 v) { store_vector(to, __builtin_convertvector(round_to_bf16(v), U16)); }

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

inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;  // moves the exponent's bias, subnormals included
  std::memcpy(&bits, &value, sizeof bits);
  if (magnitude >= 0x7c00) bits |= 0x7f800000u;  // infinity, NaN
  bits |= (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
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

// ---- transpose ----

TWINPOOL_INLINE U32 pick(U32 a, U32 b, U32 lanes) {  // lane i of the result is lane lanes[i] of a followed by b
#if defined(__clang__)
  U32 picked;
  for (int i = 0; i < kLanes; ++i) picked[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return picked;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Transposes a square by swapping off-diagonal quarters of ever smaller squares.
TWINPOOL_INLINE void transpose(U32 (&row)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half; half /= 2) {
    U32 upper, lower;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < kLanes; ++i) {
      upper[i] = i & half ? kLanes + i - half : i;
      lower[i] = i & half ? kLanes + i : i + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & half) continue;
      const U32 a = row[i], b = row[i + half];
      row[i] = pick(a, b, upper);
      row[i + half] = pick(a, b, lower);
    }
  }
}
