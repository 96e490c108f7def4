// What both kinds of symmetric int8 share: of the cache (kv_store.inl) and of activations (linear.inl).

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

// value / divisor to the nearest integer, ties to even, within -127 .. 127.
TWINPOOL_INLINE I32 to_code(F32 value, F32 divisor) {
  F32 code = value / divisor;
  code = code > 127.0f ? splat(127.0f) : code;
  code = code < -127.0f ? splat(-127.0f) : code;
  const F32 shifter = splat(0x1.8p23f);  // adding it leaves the nearest even integer in the low bits
  return (I32)(code + shifter) - (I32)shifter;
}
