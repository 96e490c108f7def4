// The C interface of the library, with stream.h; kvtransfer/native.py declares the same parameters. Rows have kMinRowBytes at least.

#include <cstring>

#include "look.h"
#include "stream.h"
#include "xxh3.h"

using namespace twinpool;

EXPORT void twinpool_kv_hash_rows(const uint8_t* const* rows, size_t n, size_t row_bytes, uint64_t* checksums) {
  for (size_t i = 0; i < n; ++i) {
    Sums sums;
    hash_blocks(sums, rows[i], whole_blocks(row_bytes));
    checksums[i] = finish(sums, rows[i], row_bytes);
  }
}

EXPORT void twinpool_kv_copy_rows(uint8_t* const* to, const uint8_t* const* from, size_t n, size_t row_bytes,
                                  int past_cache, uint64_t* checksums) {
  const size_t blocks = whole_blocks(row_bytes), copied = blocks * kBlockBytes;
  for (size_t i = 0; i < n; ++i) {
    Sums sums;
    copy_blocks(sums, to[i], from[i], blocks, past_cache);
    std::memcpy(to[i] + copied, from[i] + copied, row_bytes - copied);
    checksums[i] = finish(sums, from[i], row_bytes);
  }
  fence_copies();
}

EXPORT int twinpool_kv_look(int socket, long ns) { return look(socket, POLLIN, ns); }

// As twinpool/sources.py computes it.
EXPORT const char* twinpool_kv_sources() { return TWINPOOL_SOURCES; }

EXPORT const char* twinpool_kv_isa() { return isa(); }

EXPORT int twinpool_kv_select_isa(const char* name) { return select_isa(name); }
