// Writes one token's keys and values, or its latent, into the cache, quantizing when the cache is int8 (reference.py:
// quantize, store_kv, store_latents).

// Symmetric int8; the codes are made with the scale as fp16 holds it. Returns the scale's fp16 bits.
template <class T>
uint16_t quantize_head(const T* x, int64_t width, int8_t* codes) {
  float scale = largest_magnitude(x, width) / 127.0f;

  uint16_t half;
  if (scale != scale) {
    half = 0x7e00;
  } else {
    scale = std::min(std::max(scale, 6.104e-05f), 65504.0f);
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    bits += 0xfff + ((bits >> 13) & 1);  // nearest, ties to even
    half = static_cast<uint16_t>((bits >> 13) - (112u << 10));
  }

  const uint16_t halves[kLanes] = {half};
  const F32 divisor = splat(load_half(halves)[0]);
  for (int64_t i = 0; i < width; i += kLanes) {
    const I32 integer = to_code(load(x + i, width - i), divisor);
    if (width - i >= kLanes) {
      narrow(codes + i, integer);
    } else {
      int8_t lanes[kLanes];
      narrow(lanes, integer);
      std::memcpy(codes + i, lanes, width - i);
    }
  }
  return half;
}

template <class T, class Kv>
void store_head(const T* x, int64_t width, Kv* to, uint16_t* scale) {
  if constexpr (sizeof(Kv) == 1) {
    *scale = quantize_head(x, width, to);
  } else {
    for (int64_t i = 0; i < width; i += kLanes) store(to + i, load(x + i, width - i), width - i);
  }
}

template <class T, class Kv>
void store_token(const StoreArgs& args, int64_t token) {
  const KvCacheArgs& cache = args.cache;
  const int64_t slot = args.slots[token], row = slot / cache.block_size * cache.row_bytes;
  for (int32_t head = 0; head < cache.num_kv_heads; ++head) {
    const int64_t index = cache.row_of(slot % cache.block_size, head);
    const auto put = [&](const char* x, char* plane, uint16_t* scales) {
      uint16_t* scale = scales ? reinterpret_cast<uint16_t*>(reinterpret_cast<char*>(scales) + row) + index : nullptr;
      store_head(reinterpret_cast<const T*>(x), cache.head_dim,
                 reinterpret_cast<Kv*>(plane + row) + index * cache.head_dim, scale);
    };
    put(args.k + token * args.k_token_stride + head * args.k_head_stride, cache.k, cache.k_scale);
    put(args.v + token * args.v_token_stride + head * args.v_head_stride, cache.v, cache.v_scale);
  }
}

template <class T>
void store_token_of(const StoreArgs& args, int64_t token) {
  switch (args.cache.dtype) {
    case Dtype::int8: return store_token<T, int8_t>(args, token);
    case Dtype::bf16: return store_token<T, bf16>(args, token);
    case Dtype::fp32: return store_token<T, float>(args, token);
  }
}

void store_kv(const StoreArgs& args, int64_t token) {
  args.dtype == Dtype::bf16 ? store_token_of<bf16>(args, token) : store_token_of<float>(args, token);
}

template <class T, class Kv>
void store_latents_of(const StoreLatentsArgs& args, int64_t token) {
  const EntryArgs& to = args.entries;
  const int64_t row = args.slots[token] / to.block_size * to.row_bytes, place = args.slots[token] % to.block_size;
  const T* latent = reinterpret_cast<const T*>(args.latents + token * args.latent_stride);
  uint16_t* scale = reinterpret_cast<uint16_t*>(to.scales + row) + place;
  store_head(latent, to.rank, reinterpret_cast<Kv*>(to.latents + row + place * to.item_stride), scale);
  if (!to.key_dim) return;
  const T* key = reinterpret_cast<const T*>(args.keys + token * args.key_stride);
  if constexpr (sizeof(Kv) == 1) {
    store_head(key, to.key_dim, reinterpret_cast<bf16*>(to.keys + row) + place * to.key_dim, nullptr);
  } else {
    store_head(key, to.key_dim, reinterpret_cast<Kv*>(to.keys + row + place * to.item_stride), nullptr);
  }
}

template <class T>
void store_latents_from(const StoreLatentsArgs& args, int64_t token) {
  switch (args.entries.dtype) {
    case Dtype::int8: return store_latents_of<T, int8_t>(args, token);
    case Dtype::bf16: return store_latents_of<T, bf16>(args, token);
    case Dtype::fp32: return store_latents_of<T, float>(args, token);
  }
}

void store_latents(const StoreLatentsArgs& args, int64_t token) {
  args.dtype == Dtype::bf16 ? store_latents_from<bf16>(args, token) : store_latents_from<float>(args, token);
}
