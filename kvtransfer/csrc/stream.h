// Rows over a plain stream socket, hashed in small pieces right before they are sent or right after they arrived.
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

// One message: header (sender only), rows of row_bytes bytes each, and their checksums, little endian. It may take
// several calls; `moved`, `hashed`, `looks` and `lanes` are 0 at first and belong to these functions.
struct RowStream {
  uint8_t* const* rows;
  size_t num_rows, row_bytes;
  const uint8_t* head;
  size_t head_bytes;
  uint64_t* checksums;  // num_rows of them: computed here
  size_t moved;         // bytes of the message sent or received
  size_t hashed;        // bytes of rows, for `write` also in place
  size_t looks;         // in vain, for the other end
  uint64_t lanes[8];    // the hash of the row that is begun
};

// Sends what goes without waiting: 1 when the whole message is out, 0 when there is no more room, or -errno.
EXPORT int twinpool_kv_send(int socket, RowStream* stream);

// Waits until the whole message is there (head_bytes is 0): 1, or 0 when the other end has closed, or -errno.
EXPORT int twinpool_kv_receive(int socket, RowStream* stream, uint64_t* sent_checksums);

namespace twinpool {

inline size_t all_rows(const RowStream& stream) { return stream.num_rows * stream.row_bytes; }

// Hashes what is there of the rows' first `num_bytes` bytes, in whole blocks.
void hash_up_to(RowStream& stream, size_t num_bytes);

}  // namespace twinpool
